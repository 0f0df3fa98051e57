"""Published DFlash drafters: equal to the packages `dflash` and `speculators`, in both formats, or refused by name.

Logits of a block's four tokens agree to 1e-5, after texts of 1 to 9 states; each option, when unset, moves them by more
than 0.01.
"""

import copy

import pytest
import torch
from torch import Tensor

from draftproof.models.head import dflash_file
from draftproof.models.head.attach_published import attach_dflash, fitted_dflash
from draftproof.models.head.checkpoint import Checkpoint
from draftproof.models.head.dflash import FittedDFlash
from draftproof.models.head.published import kind_of
from models import reference_checkpoints as reference
from models.numbered_weights import DRAFTED, LENGTH, VOCABULARY, numbered, states, tokens
from models.reference_environment import run_reference
from models.tiny_targets import tiny_target

LAYERS, HIDDEN, BLOCK, MASK = 8, 16, 5, 22
VARIANTS = list(reference.described("dflash"))
CLOSE, DIFFERENT = 1e-5, 0.01


def target():
    """Return a target whose embeddings and output rows are those of the reference."""
    model = copy.deepcopy(tiny_target(VOCABULARY, HIDDEN, LAYERS))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(numbered("embed_tokens.weight", (VOCABULARY, HIDDEN)))
        model.lm_head.weight.copy_(numbered("lm_head.weight", (VOCABULARY, HIDDEN)))
    return model


def variant(name: str) -> tuple[dict, dict[str, Tensor]]:
    """Return config and tensors of a reference checkpoint, to be edited."""
    found = copy.deepcopy(reference.described("dflash")[name])
    return found["config"], {key: numbered(key, shape) for key, shape in found["tensors"].items()}


def load(folder, config: dict, tensors: dict[str, Tensor]) -> FittedDFlash:
    """Read a drafter as it is attached to the target, but not packed: a CPU may pack it in bfloat16."""
    reference.save(folder, config, tensors)
    return unpacked(Checkpoint.of(folder))


def unpacked(checkpoint: Checkpoint) -> FittedDFlash:
    draft, model = dflash_file.load(checkpoint, LAYERS), target()
    dflash_file.check_target(draft, model, "it")
    ids, rows = draft.vocabulary.ids, draft.vocabulary.output_rows
    output = torch.nn.Linear(HIDDEN, VOCABULARY if ids is None else len(ids), bias=False)
    output.weight = torch.nn.Parameter(model.lm_head.weight if rows is None else rows, requires_grad=False)
    vocab = attach_dflash(dflash_file.load(checkpoint, LAYERS), model, "it").vocab
    return FittedDFlash(draft.network, model.model.embed_tokens.weight.detach(), output, vocab)


@torch.no_grad()
def drafted(fitted: FittedDFlash) -> Tensor:
    """Return the logits of blocks after texts of each length, which are read in two parts: [LENGTH, BLOCK - 1, R]."""
    network, text = fitted.network, tokens()
    given = states(len(network.shape.taps) * HIDDEN)
    logits = []
    for n in range(1, LENGTH + 1):
        cache = network.new_cache(1, 2 * LENGTH)
        for start, stop in ((0, n // 2), (n // 2, n)):
            if stop > start:
                fused = network.fuse(given[:, start:stop].split(HIDDEN, -1))
                network.read(fused, torch.arange(start, stop)[None], cache)
        block = torch.tensor([[int(text[0, n]), *[network.shape.mask_token] * (BLOCK - 1)]])
        made = network.predict(fitted.embedded(block), torch.tensor([n]), cache, n + BLOCK)
        logits.append(fitted.logits(made)[0, 1:])
    return torch.stack(logits)


def distance(fitted: FittedDFlash, name: str) -> float:
    return float((drafted(fitted) - reference.expected("dflash", name)).abs().max())


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_reference(name, tmp_path):
    fitted = unpacked(Checkpoint.of(reference.written("dflash", name, tmp_path)))
    assert fitted.network.shape.taps == (2, 3, 5)
    assert distance(fitted, name) < CLOSE


def with_option(config: dict, **options) -> dict:
    return {**config, "dflash_config": {**config["dflash_config"], **options}}


UNSET = {
    "window": lambda c, t: ({**c, "layer_types": ["full_attention"] * 2}, t),
    "not causal": lambda c, t: ({**c, "is_causal": None}, t),
    "biases": lambda c, t: ({**c, "attention_bias": False}, {n: w for n, w in t.items() if "bias" not in n}),
    "yarn": lambda c, t: ({**c, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, t),
    "output": lambda c, t: (with_option(c, output_multiplier=1.0), t),
    "output, cap": lambda c, t: (with_option(c, final_logit_softcapping=None), t),
    "output, embeddings": lambda c, t: (with_option(c, input_embedding_scale=1.0), t),
    "plain": lambda c, t: (with_option(c, mask_token_id=MASK - 1), t),
    "plain, norm": lambda c, t: (c, t | {"hidden_norm.weight": torch.ones(HIDDEN)}),
}


@pytest.mark.parametrize("name", UNSET)
def test_every_option_matters(name, tmp_path):
    """Control: without its option, a drafter's logits are others."""
    base = name.partition(",")[0]
    assert distance(load(tmp_path, *UNSET[name](*variant(base))), base) > DIFFERENT


def test_layers_are_numbered_as_their_source_numbers_them(tmp_path):
    original = Checkpoint.of(reference.written("dflash", "plain", tmp_path / "original"))
    assert original.config["dflash_config"]["target_layer_ids"] == [1, 2, 4]
    speculators = Checkpoint.of(reference.written("dflash", "speculators", tmp_path / "speculators"))
    assert speculators.config["aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert dflash_file.taps_of(original) == dflash_file.taps_of(speculators) == (2, 3, 5)


def test_a_folder_says_what_it_holds(tmp_path):
    for name in ("plain", "speculators"):
        assert kind_of(reference.written("dflash", name, tmp_path / name)) == "dflash"


def test_what_the_drafter_lacks_is_the_targets(tmp_path):
    model = target()
    whole = fitted_dflash(reference.written("dflash", "plain", tmp_path / "whole"), model)
    assert whole.table.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert whole.vocab.ids.tolist() == list(range(VOCABULARY))
    part = fitted_dflash(reference.written("dflash", "speculators", tmp_path / "part"), model)
    assert part.vocab.ids.tolist() == list(DRAFTED)


BAD = {
    "missing": (lambda c, t: (c, {n: w for n, w in t.items() if n != "fc.weight"}), r"lacks tensor 'fc\.weight'"),
    "shape": (lambda c, t: (c, t | {"norm.weight": torch.ones(3)}), r"'norm\.weight' has shape \[3\]"),
    "DSpark": (lambda c, t: (c, t | {"markov_head.markov_w1": torch.ones(1)}), "it is a DSpark drafter"),
    "DFlash 2": (lambda c, t: (c, t | {"candidate_selector.x": torch.ones(1)}), "it is a DFlash 2 drafter"),
    "kind": (lambda c, t: ({**c, "speculators_model_type": "mtp"}, t), "not that of a DFlash drafter but of 'mtp'"),
    "block": (lambda c, t: ({**c, "block_size": 1}, t), "block_size must be a whole number ≥ 2; got 1"),
    "mask": (
        lambda c, t: (with_option(c, mask_token_id=None), t),
        "mask_token_id must be a whole number",
    ),
    "mask id": (lambda c, t: (with_option(c, mask_token_id=24), t), "mask_token_id 24 has no embedding"),
    "layers": (lambda c, t: (with_option(c, target_layer_ids=[1, 2, 9]), t), r"layers \(2, 3, 10\); .* layers 1 to 8"),
    "no layers": (lambda c, t: (with_option(c, target_layer_ids=None), t), "must list the target's layers"),
    "a number": (lambda c, t: (c, t | {"fc.weight": torch.tensor(1.0)}), r"'fc\.weight' has shape \[\]"),
    "whole numbers": (
        lambda c, t: (c, t | {"fc.weight": torch.ones(t["fc.weight"].shape, dtype=torch.int8)}),
        r"'fc\.weight' holds int8",
    ),
    "kinds of layers": (lambda c, t: ({**c, "layer_types": ["none"]}, t), "does not describe a qwen3 layer"),
    "window": (
        lambda c, t: ({**c, "layer_types": ["sliding_attention"] * 2, "sliding_window": None}, t),
        "layers with sliding_attention, and no sliding_window",
    ),
    "cap": (lambda c, t: ({**c, "final_logit_softcapping": float("nan")}, t), "must be a finite number; got nan"),
    "anchor": (lambda c, t: ({**c, "sample_from_anchor": True}, t), "sample_from_anchor is not supported"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_checkpoints_that_do_not_fit_are_refused_by_name(change, message, tmp_path):
    reference.save(tmp_path, *change(*variant("plain")))
    with pytest.raises(ValueError, match=message):
        fitted_dflash(tmp_path, target())


def test_a_drafter_for_another_target_is_refused(tmp_path):
    reference.written("dflash", "plain", tmp_path)
    with pytest.raises(ValueError, match=r"'fc\.weight' reads states of width 16, and the target has 32"):
        fitted_dflash(tmp_path, tiny_target(VOCABULARY, 32, LAYERS))


@pytest.mark.slow
def test_the_references_still_compute_what_is_stored(tmp_path):
    """Needs the environment of `make test-references`."""
    run_reference("dflash", tmp_path)
    variants, logits = reference.describe(tmp_path)
    assert list(variants) == sorted(VARIANTS)
    for name, wanted in logits.items():
        torch.testing.assert_close(reference.expected("dflash", name), wanted, atol=1e-6, rtol=0)
        assert distance(unpacked(Checkpoint.of(tmp_path / name)), name) < CLOSE
