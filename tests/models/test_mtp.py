"""MTP layers inside checkpoints: equal to transformers' `MtpModel` at draft steps 1 to 4, or refused by name.

tests/data/mtp.safetensors holds what `MtpModel` of transformers 5.22 computes. Qwen's layers are also compared with the
package `speculators` (step 1: its training forward attends to later steps' states).
"""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from draftproof.models.head import mtp
from draftproof.models.head.checkpoint import Checkpoint
from models.mtp_checkpoints import FAMILIES, HIDDEN, LAYERS, V, edit, with_mtp_settings, write
from models.numbered_weights import numbered
from models.reference_checkpoints import DATA
from models.reference_environment import run_reference

STEPS, LENGTH = 4, 6
CLOSE, DIFFERENT = 1e-5, 0.05
TOKENS = torch.tensor([[3, 17, 8, 21, 5, 11, 2, 9, 14, 20, 1]])


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp") / request.param
    return write(folder, request.param), folder


STATES = 1.5 * numbered("states", (1, LENGTH, HIDDEN))
"""What the target's states after its final norm may be."""


@torch.no_grad()
def ours(model, network: mtp.Mtp) -> Tensor:
    """Return the logits of each step of drafting after the text, [STEPS, V]."""
    fitted = mtp.attach_mtp(network, model)
    cache = network.new_cache(1, 32)
    embedded = fitted.embedded(TOKENS[:, 1 : LENGTH + 1])
    h = network.step(embedded, network.fuse([STATES]), torch.arange(LENGTH)[None], cache)[:, -1:]
    logits = [fitted.logits(h)[0, 0]]
    for step in range(1, STEPS):
        at = LENGTH + step
        h = network.step(fitted.embedded(TOKENS[:, at, None]), h, torch.tensor([[at - 1]]), cache)
        logits.append(fitted.logits(h)[0, 0])
    return torch.stack(logits)


@torch.no_grad()
def theirs(model) -> Tensor:
    """Return the same of transformers' own implementation, with its cache and its masks."""
    from transformers.cache_utils import MtpCache

    model = with_mtp_settings(copy.deepcopy(model))
    network = MtpModel.from_pretrained(model).eval()
    cache = MtpCache(config=model.config.get_mtp_config())
    h, logits = STATES, []
    for step in range(STEPS):
        first, last = (1, LENGTH + 1) if step == 0 else (LENGTH + step, LENGTH + step + 1)
        h = network.forward_layer(0, h, torch.arange(first, last)[None], cache, input_ids=TOKENS[:, first:last])[:, -1:]
        logits.append(model.lm_head(h)[0, 0])
    return torch.stack(logits)


def expected(folder) -> Tensor:
    return load_file(DATA / "mtp.safetensors")[folder.name]


def test_logits_are_those_of_transformers(checkpoint):
    model, folder = checkpoint
    network = mtp.load(Checkpoint.of(folder), model)
    torch.testing.assert_close(ours(model, network), expected(folder), atol=CLOSE, rtol=0)
    assert network.taps == (LAYERS,)


@pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="this transformers cannot run one MTP layer alone")
def test_transformers_still_computes_what_is_stored(checkpoint):
    model, folder = checkpoint
    torch.testing.assert_close(theirs(model), expected(folder), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("part", ["enorm.weight", "hnorm.weight", "norm.weight", "eh_proj.weight"])
def test_every_part_matters(checkpoint, part):
    """Control: with one tensor changed, logits are others."""
    model, folder = checkpoint
    network = mtp.load(Checkpoint.of(folder), model)
    with torch.no_grad():
        network.get_parameter(part).copy_(network.get_parameter(part).flip(0))
    assert float((ours(model, network) - expected(folder)).abs().max()) > DIFFERENT


def test_the_targets_weights_are_lent_and_not_copied(checkpoint):
    model, folder = checkpoint
    fitted = mtp.attach_mtp(mtp.load(Checkpoint.of(folder), model), model)
    assert fitted.table.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert fitted.rows.layer is model.get_output_embeddings()
    assert fitted.logits(torch.zeros(1, HIDDEN)).shape == (1, V)


def test_a_checkpoint_that_also_reads_images_has_its_layers_elsewhere(tmp_path):
    model = write(tmp_path / "glm4_moe", "glm4_moe")
    edit(tmp_path / "glm4_moe", lambda tensors: {
        name.replace("model.layers.", "model.language_model.layers."): tensor for name, tensor in tensors.items()
    })  # fmt: skip
    network = mtp.load(Checkpoint.of(tmp_path / "glm4_moe"), model)
    torch.testing.assert_close(ours(model, network), expected(tmp_path / "glm4_moe"), atol=CLOSE, rtol=0)


def test_bfloat16_stays_bfloat16(checkpoint):
    model, folder = checkpoint
    half = copy.deepcopy(model).to(torch.bfloat16)
    network = mtp.load(Checkpoint.of(folder), half)
    assert {weight.dtype for weight in network.parameters()} == {torch.bfloat16}
    assert ours(half, network).dtype == torch.float32
    assert network.new_cache(1).keys.dtype == torch.bfloat16


# -------------------------------------------------------------------------------------------------------- bad input


def without(part: str):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


BAD = {
    "no layer": (without(f"layers.{LAYERS}."), r"holds no MTP layer: neither 'model\.layers\.4\.eh_proj\.weight'"),
    "missing": (
        without("4.self_attn.o_proj"),
        r"lacks tensor 'model\.layers\.4\.self_attn\.o_proj\.weight' of shape \[16, 32\]",
    ),
    "an expert": (without("4.mlp.experts.2.up_proj"), r"experts\.2\.up_proj\.weight' is missing among those of 4"),
    "two layers": (
        lambda tensors: tensors | {"model.layers.5.eh_proj.weight": torch.ones(1)},
        r"'model\.layers\.5\.eh_proj\.weight': more than one MTP layer is not supported",
    ),
    "quantised": (
        lambda tensors: tensors | {"model.layers.4.eh_proj.weight_scale_inv": torch.ones(1)},
        r"holds tensor 'model\.layers\.4\.eh_proj\.weight_scale_inv'",
    ),
    "shape": (
        lambda tensors: tensors | {"model.layers.4.enorm.weight": torch.ones(3)},
        r"'model\.layers\.4\.enorm\.weight' has shape \[3\], .* asks for \[16\]",
    ),
    "an expert's shape": (
        lambda tensors: tensors | {"model.layers.4.mlp.experts.1.up_proj.weight": torch.ones(3, 3)},
        r"'model\.layers\.4\.mlp\.experts\.1\.up_proj\.weight' has shape \[3, 3\], .* ask for \[8, 16\]",
    ),
    "whole numbers": (
        lambda tensors: tensors | {"model.layers.4.hnorm.weight": torch.ones(16, dtype=torch.int8)},
        r"'model\.layers\.4\.hnorm\.weight' holds int8, .* that is not quantised",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_checkpoints_that_do_not_fit_are_refused_by_name(change, message, tmp_path):
    model = write(tmp_path, "glm4_moe")
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=message) as raised:
        mtp.load(Checkpoint.of(tmp_path), model)
    assert str(tmp_path) in str(raised.value), "the message names the file"


def test_a_target_that_was_not_loaded_needs_a_folder(tmp_path):
    kind, model_class, sizes = FAMILIES["glm4_moe"]
    from models.mtp_checkpoints import SIZES

    with pytest.raises(ValueError, match=r'was not loaded from one: name its folder, "mtp:folder"'):
        mtp.checkpoint_of(model_class(kind(**SIZES, **sizes)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_logits_are_those_of_speculators(family, tmp_path):
    """Needs the environment of `make test-references`."""
    model = write(tmp_path, family)
    run_reference("mtp", tmp_path)
    wanted = load_file(tmp_path / "expected.safetensors")["logits"]
    network = mtp.load(Checkpoint.of(tmp_path), model)
    fitted = mtp.attach_mtp(network, model)
    with torch.no_grad():
        n = wanted.shape[0]
        given = torch.stack([torch.full((HIDDEN,), 1.0).cumsum(0).add(3 * i).sin() for i in range(n)])[None]
        made = network.step(
            fitted.embedded(TOKENS[:, 1 : n + 1]), given, torch.arange(n)[None], network.new_cache(1, n)
        )
        torch.testing.assert_close(fitted.logits(made)[0], wanted, atol=CLOSE, rtol=0)
