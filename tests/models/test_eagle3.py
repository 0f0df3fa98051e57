"""Published EAGLE-3 heads: equal to the package `speculators` in every option, in all formats, or refused by name.

Logits agree to 1e-5 at draft steps 1 to 4; their standard deviation is about 1. Each option, when unset, moves them by
more than 0.1.
"""

import copy
import json

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.models.head import eagle3_file
from draftproof.models.head.attach_published import attach_eagle3, fitted_eagle3
from draftproof.models.head.checkpoint import Checkpoint
from draftproof.models.head.eagle3_file import Eagle3Head, taps_of
from draftproof.models.head.published import kind_of
from draftproof.models.head.rotary import Rotary
from models import reference_checkpoints as reference
from models.numbered_weights import DRAFTED, LENGTH, STEPS, VOCABULARY, numbered, states, tokens
from models.reference_environment import run_reference
from models.tiny_targets import tiny_target

LAYERS = 8
VARIANTS = list(reference.described("eagle3"))
CLOSE, DIFFERENT = 1e-5, 0.1


def variant(name: str) -> tuple[dict, dict[str, Tensor]]:
    """Return config and tensors of a reference checkpoint, to be edited."""
    found = copy.deepcopy(reference.described("eagle3")[name])
    return found["config"], {key: numbered(key, shape) for key, shape in found["tensors"].items()}


def load(folder, config: dict, tensors: dict[str, Tensor], layers: int = LAYERS) -> Eagle3Head:
    reference.save(folder, config, tensors)
    return eagle3_file.load(Checkpoint.of(folder), layers)


@torch.no_grad()
def drafted(head: Eagle3Head) -> Tensor:
    """Return the logits at each step of drafting after each position, [STEPS, LENGTH - STEPS, R]."""
    network, table, text, ends = head.network, head.vocabulary.embeddings, tokens(), range(LENGTH - STEPS)
    width = network.shape.target_hidden
    fused = network.fuse(states(width * len(network.taps)).split(width, -1))
    logits = torch.empty(STEPS, len(ends), len(head.vocabulary.output_rows))
    for end in ends:
        cache, n = network.new_cache(1, 2 * LENGTH), end + 1
        h = network.step(table[text[:, 1 : n + 1]], fused[:, :n], torch.arange(n)[None], cache)[:, -1:]
        for step in range(STEPS):
            if step:
                at = torch.tensor([[end + step]])
                h = network.step(table[text[:, n + step, None]], h, at, cache)
            logits[step, end] = network.out(h)[0, 0] @ head.vocabulary.output_rows.T
    return logits


def distance(head: Eagle3Head, wanted: Tensor) -> float:
    return float((drafted(head) - wanted[:, : LENGTH - STEPS]).abs().max())


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_speculators(name, tmp_path):
    head = eagle3_file.load(Checkpoint.of(reference.written("eagle3", name, tmp_path)), LAYERS)
    assert distance(head, reference.expected("eagle3", name)) < CLOSE


def without(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


UNSET = {
    "fc_norm": lambda c, t: ({**c, "fc_norm": False}, without(t, "fc_norm")),
    "norm_before_fc": lambda c, t: ({**c, "norm_before_fc": False}, without(t, "input_norm")),
    "norm_before_residual": lambda c, t: ({**c, "norm_before_residual": False}, t),
    "norm_output": lambda c, t: ({**c, "norm_output": False}, t),
    "qwen3": lambda c, t: (with_layer(c, model_type="llama"), without(without(t, "q_norm"), "k_norm")),
    "biases": lambda c, t: (with_layer(c, attention_bias=False, mlp_bias=False), without(t, "bias")),
    "two layers": lambda c, t: (with_layer(c, num_hidden_layers=1), without(t, "layers.1.")),
    "llama3 rope": lambda c, t: (with_layer(c, rope_parameters={"rope_type": "default", "rope_theta": 500.0}), t),
    "yarn": lambda c, t: (with_layer(c, rope_parameters={"rope_type": "default", "rope_theta": 500.0}), t),
    "plain": lambda c, t: (with_layer(c, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}), t),
}


def with_layer(config: dict, **changes) -> dict:
    return {**config, "transformer_layer_config": {**config["transformer_layer_config"], **changes}}


@pytest.mark.parametrize("name", UNSET)
def test_every_option_matters(name, tmp_path):
    """Control: without its option, a head's logits are others."""
    head = load(tmp_path, *UNSET[name](*variant(name)))
    assert distance(head, reference.expected("eagle3", name)) > DIFFERENT


def test_linear_scaling_divides_positions():
    """It has no reference of its own: a factor of 4 at position 4 n is none at position n."""
    settings = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    scaled, plain = (
        Rotary(tf.LlamaConfig(**settings, rope_parameters={"rope_theta": 500.0, **kind}))
        for kind in ({"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"})
    )
    x = numbered("x", (1, 2, 5, 8))
    assert torch.allclose(scaled(x, 4 * torch.arange(5)[None]), plain(x, torch.arange(5)[None]), atol=1e-6)
    assert not torch.allclose(scaled(x, torch.arange(5)[None]), plain(x, torch.arange(5)[None]), atol=1e-2)


# ------------------------------------------------------------------------------------------------ the other formats


def flat(config: dict, **more) -> dict:
    """Return the configuration as SpecForge writes it."""
    layer = {key: value for key, value in config["transformer_layer_config"].items() if key != "rope_parameters"}
    options = {key: config[key] for key in ("norm_before_residual", "norm_output") if config[key]}
    rope = config["transformer_layer_config"]["rope_parameters"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        **layer,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["draft_vocab_size"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        **options,
        **more,
    }


def renamed(tensors: dict[str, Tensor], **names: str) -> dict[str, Tensor]:
    for new, old in names.items():
        tensors = {
            name.replace(old, new.replace("__", "."), 1) if name.startswith(old) else name: tensor
            for name, tensor in tensors.items()
        }
    return tensors


@pytest.mark.parametrize("name", ["plain", "norm_before_residual", "biases", "llama3 rope", "yarn"])
def test_a_flat_configuration_as_of_specforge_is_read(name, tmp_path):
    config, weights = variant(name)
    head = load(tmp_path, flat(config), weights)
    assert head.network.taps == (2, 3, 5)
    assert distance(head, reference.expected("eagle3", name)) < CLOSE


def test_the_original_names_are_read(tmp_path):
    config, weights = variant("plain")
    weights = renamed(weights, midlayer__="layers.0.") | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    head = load(tmp_path, flat(config, architectures=["LlamaForCausalLM"], eagle_config=None), weights, layers=9)
    assert head.network.taps == (2, 4, 6)
    assert distance(head, reference.expected("eagle3", "plain")) < CLOSE


def test_angelslims_tied_embeddings_do_not_replace_an_output_layer_that_is_there(tmp_path):
    config, weights = variant("full vocabulary")
    tied = flat(config, architectures=["Eagle3LlamaForCausalLM"], tie_word_embeddings=True, model_type="qwen3")
    assert distance(load(tmp_path, tied, weights), reference.expected("eagle3", "full vocabulary")) < CLOSE


def test_older_names_of_the_tap_norms_are_read(tmp_path):
    config, weights = variant("fc_norm")
    old = renamed(weights, aux_norm_low__="fc_norm.0.", aux_norm_mid__="fc_norm.1.", aux_norm_high__="fc_norm.2.")
    assert distance(load(tmp_path, config, old), reference.expected("eagle3", "fc_norm")) < CLOSE


def test_a_flat_configuration_norms_queries_and_keys_where_it_has_weights_for_it(tmp_path):
    config, weights = variant("qwen3")
    assert distance(load(tmp_path, flat(config), weights), reference.expected("eagle3", "qwen3")) < CLOSE


def test_a_checkpoint_of_several_files_is_read(tmp_path):
    config, weights = variant("plain")
    reference.save(tmp_path, config, weights)
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    head = eagle3_file.load(Checkpoint.of(tmp_path), LAYERS)
    assert distance(head, reference.expected("eagle3", "plain")) < CLOSE
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names b\.safetensors, which is not in the folder"):
        Checkpoint.of(tmp_path)


def test_layers_are_numbered_as_their_source_numbers_them():
    key = "eagle_aux_hidden_state_layer_ids"
    assert taps_of({}, 32) == (2, 16, 29), "vLLM's default"
    assert taps_of({key: [1, 5, 9]}, 32) == (1, 5, 9), "speculators: after layer k"
    assert taps_of({"eagle_config": {key: [1, 15, 28]}}, 32) == (2, 16, 29), "SpecForge: after layer k + 1"
    assert taps_of({"eagle_config": {key: [2, 16, 29]}}, 32) == (2, 16, 29), "lists for vLLM begin with 2"


# ------------------------------------------------------------------------------------------------- on its own target


def test_what_the_head_lacks_is_the_targets(tmp_path):
    config, weights = variant("full vocabulary")
    reference.save(tmp_path, config, without(without(weights, "embed_tokens"), "lm_head"))
    model = tiny_target(VOCABULARY, hidden=16, layers=LAYERS)
    fitted = fitted_eagle3(tmp_path, model)
    assert torch.equal(fitted.table, model.get_input_embeddings().weight)
    assert fitted.vocab.ids.tolist() == list(range(VOCABULARY))
    states = torch.eye(16)
    wanted = fitted.head.out(states) @ model.lm_head.weight.T
    torch.testing.assert_close(fitted.logits(states), wanted, atol=0.05, rtol=0)  # packed rows may be bfloat16


def test_the_draft_vocabulary_is_the_heads(tmp_path):
    fitted = fitted_eagle3(reference.written("eagle3", "plain", tmp_path), tiny_target(VOCABULARY, 16, LAYERS))
    assert fitted.vocab.ids.tolist() == list(DRAFTED)
    assert fitted.head.taps == (2, 3, 5)


def test_a_head_is_read_once_and_again_when_its_files_change(tmp_path):
    model = tiny_target(VOCABULARY, 16, LAYERS)
    first = fitted_eagle3(reference.written("eagle3", "plain", tmp_path), model)
    assert fitted_eagle3(tmp_path, model) is first
    reference.written("eagle3", "norm_output", tmp_path)
    assert fitted_eagle3(tmp_path, model) is not first


def test_another_kind_of_target_is_a_warning(tmp_path):
    config, weights = variant("plain")
    config["speculators_config"]["verifier"]["architectures"] = ["Qwen3ForCausalLM"]
    reference.save(tmp_path, config, weights)
    with pytest.warns(UserWarning, match=r"trained for Qwen3ForCausalLM, and the target is a LlamaForCausalLM"):
        fitted_eagle3(tmp_path, tiny_target(VOCABULARY, 16, LAYERS))


@pytest.mark.parametrize(
    ("target", "without_own", "message"),
    [
        ((VOCABULARY, 32, LAYERS), "", r"'fc\.weight' reads states of width 16, and the target has 32"),
        ((VOCABULARY + 1, 16, LAYERS), "", r"tokens in tensor 'embed_tokens\.weight': 24, and the target has 25"),
        ((20, 16, LAYERS), "", r"last token in tensor 'd2t': 23, and the target has 20"),
        ((23, 16, LAYERS), "", r"last token in tensor 'd2t': 23, and the target has 23"),
        ((VOCABULARY, 16, 4), "", r"states after layers \(2, 3, 5\); this target has layers 1 to 4"),
        ((VOCABULARY, 16, 5), "", r"the last one's before the final norm, .*reads layers below 5"),
    ],
)
def test_a_head_for_another_target_is_refused(target, without_own, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fitted_eagle3(reference.written("eagle3", "plain", tmp_path), tiny_target(*target))


def test_a_head_of_another_width_than_its_target_needs_embeddings_of_its_own(tmp_path):
    config, weights = variant("plain")
    model, wide = tiny_target(VOCABULARY, 32, LAYERS), numbered("fc.weight", (16, 96))
    head = load(tmp_path, {**config, "target_hidden_size": 32}, weights | {"fc.weight": wide})
    assert attach_eagle3(head, model, "it").head.fuse([torch.ones(1, 32)] * 3).shape == (1, 16)
    head = load(tmp_path, {**config, "target_hidden_size": 32}, without(weights, "embed") | {"fc.weight": wide})
    with pytest.raises(ValueError, match=r"without an 'embed_tokens\.weight' it needs embeddings of width 16"):
        attach_eagle3(head, model, "it")


# -------------------------------------------------------------------------------------------------------- bad input

BAD_TENSORS = {
    "missing": (
        lambda t: without(t, "o_proj"),
        r"lacks tensor 'layers\.0\.self_attn\.o_proj\.weight' of shape \[16, 32",
    ),
    "shape": (lambda t: t | {"norm.weight": torch.ones(3)}, r"'norm\.weight' has shape \[3\], .* asks for \[16\]"),
    "unknown": (lambda t: t | {"extra.weight": torch.ones(2)}, r"holds tensor 'extra\.weight' of shape \[2\]"),
    "option not set": (lambda t: t | {"fc_norm.0.weight": torch.ones(16)}, r"'fc_norm\.0\.weight'.*lacks the option"),
    "NaN": (lambda t: t | {"norm.weight": torch.full((16,), torch.nan)}, r"'norm\.weight' holds NaN"),
    "no map": (lambda t: without(t, "d2t"), r"lacks tensor 'd2t' of shape \[14\]"),
    "maps disagree": (
        lambda t: t | {"d2t": torch.zeros(14, dtype=torch.long)},
        r"'d2t' and 't2d' name different tokens",
    ),
    "no output layer": (lambda t: without(t, "lm_head"), r"lacks tensor 'lm_head\.weight' of shape \[14, 16\]"),
    "output layer": (lambda t: t | {"lm_head.weight": torch.ones(9, 16)}, r"'lm_head\.weight' has shape \[9, 16\]"),
    "taps": (lambda t: t | {"fc.weight": torch.ones(16, 50)}, r"'fc\.weight' reads 50 numbers, which are no 3 states"),
    "whole numbers": (
        lambda t: t | {"fc.weight": torch.ones(16, 48, dtype=torch.int8)},
        r"'fc\.weight' holds int8, and weights in float32, bfloat16 or float16 were expected",
    ),
    "embeddings in whole numbers": (
        lambda t: t | {"embed_tokens.weight": torch.ones(VOCABULARY, 16, dtype=torch.int8)},
        r"'embed_tokens\.weight' holds int8",
    ),
    "embeddings": (
        lambda t: t | {"embed_tokens.weight": torch.full((VOCABULARY, 16), torch.nan)},
        r"'embed_tokens\.weight' holds NaN or infinity",
    ),
    "infinite output layer": (
        lambda t: t | {"lm_head.weight": torch.full((14, 16), torch.inf)},
        r"'lm_head\.weight' holds NaN or infinity",
    ),
    "a number": (
        lambda t: t | {"fc.weight": torch.tensor(1.0)},
        r"'fc\.weight' has shape \[\], .* asks for \[16, 48\]",
    ),
    "two names": (
        lambda t: t | {"midlayer.mlp.up_proj.weight": torch.ones(1)},
        r"'layers\.0\.mlp\.up_proj\.weight' twice",
    ),
    "older names": (
        lambda t: without({name.replace("layers.0.", "midlayer."): w for name, w in t.items()}, "o_proj"),
        r"lacks tensor 'midlayer\.self_attn\.o_proj\.weight'",
    ),
    "length of the map": (lambda t: t | {"d2t": t["d2t"][:5]}, r"'d2t' has shape \[5\], .* asks for \[14\]"),
    "map of fractions": (lambda t: t | {"d2t": t["d2t"].float()}, r"'d2t' must hold whole numbers; got torch\.float32"),
    "negative tokens": (
        lambda t: without(t, "t2d") | {"d2t": torch.cat([torch.tensor([-3]), t["d2t"][1:]])},
        r"'d2t' names token -3 in entry 0",
    ),
    "a token twice": (
        lambda t: without(t, "t2d") | {"d2t": torch.zeros(14, dtype=torch.long).index_fill_(0, torch.tensor([5]), -1)},
        r"'d2t' names token 4 2 times",
    ),
    "P-EAGLE": (lambda t: t | {"mask_hidden": torch.ones(1, 1, 48)}, r"'mask_hidden', so it is a P-EAGLE head"),
}


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_tensors_that_do_not_fit_are_refused_by_name(change, message, tmp_path):
    config, weights = variant("plain")
    with pytest.raises(ValueError, match=message) as raised:
        load(tmp_path, config, change(weights))
    assert str(tmp_path) in str(raised.value), "the message names the file"


BAD_CONFIGS = {
    "kind": (lambda c: {**c, "speculators_model_type": "dspark"}, r"not that of an EAGLE-3 head but of 'dspark'"),
    "no layer": (lambda c: {**c, "transformer_layer_config": None}, "lacks transformer_layer_config"),
    "layer": (lambda c: with_layer(c, model_type="mamba"), "model_type 'mamba' are not known; known are llama, qwen3"),
    "both norms": (lambda c: {**c, "fc_norm": True, "norm_before_fc": True}, "sets both fc_norm and norm_before_fc"),
    "flag": (lambda c: {**c, "norm_output": "yes"}, "norm_output must be true or false; got 'yes'"),
    "rope": (
        lambda c: with_layer(c, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}),
        "rope_type 'dynamic' depends on the length of the text",
    ),
    "window": (
        lambda c: with_layer(c, model_type="qwen3", layer_types=["sliding_attention"], sliding_window=4),
        "sliding attention are not supported",
    ),
    "a size as text": (lambda c: with_layer(c, hidden_size="16"), "does not describe a llama layer: .*hidden_size"),
    "no heads": (lambda c: with_layer(c, num_attention_heads=0), "does not describe a llama layer"),
    "no layers": (lambda c: with_layer(c, num_hidden_layers=0), "num_hidden_layers must be a whole number ≥ 1; got 0"),
    "shared heads": (lambda c: with_layer(c, num_key_value_heads=3), "4 num_attention_heads cannot share 3"),
    "activation": (lambda c: with_layer(c, hidden_act="none"), "hidden_act 'none' is none that transformers knows"),
    "list of kinds": (lambda c: with_layer(c, model_type=["llama"]), r"model_type \['llama'\] are not known"),
    "unknown rope": (
        lambda c: with_layer(c, rope_parameters={"rope_type": "none", "rope_theta": 500.0}),
        "rope_type 'none' is not known; served are",
    ),
    "width": (lambda c: {**c, "target_hidden_size": "16"}, "target_hidden_size must be a whole number ≥ 1; got '16'"),
    "negative width": (lambda c: {**c, "target_hidden_size": -1}, "target_hidden_size must be a whole number ≥ 1"),
    "true": (lambda c: {**c, "eagle_aux_hidden_state_layer_ids": [True, 2, 3]}, "must be a list of layers' numbers"),
    "no list": (lambda c: {**c, "eagle_aux_hidden_state_layer_ids": "2,3,5"}, "must be a list of layers' numbers"),
    "layer ids": (lambda c: {**c, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, r"after layers \(0, 2, 3\)"),
}


@pytest.mark.parametrize(("change", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_configurations_that_do_not_fit_are_refused_by_name(change, message, tmp_path):
    config, weights = variant("plain")
    with pytest.raises(ValueError, match=message):
        load(tmp_path, change(config), weights)


@pytest.mark.parametrize("settings", [[1], {"verifier": "LlamaForCausalLM"}, {"verifier": {"architectures": 5}}])
def test_what_a_checkpoint_says_of_its_target_may_be_anything(settings, tmp_path):
    config, weights = variant("plain")
    reference.save(tmp_path, {**config, "speculators_config": settings, "architectures": 5}, weights)
    fitted_eagle3(tmp_path, tiny_target(VOCABULARY, 16, LAYERS))


def test_an_index_that_names_tensors_which_are_not_there_is_refused(tmp_path):
    reference.written("eagle3", "plain", tmp_path)
    index = {"weight_map": {"fc.weight": "model.safetensors", "absent.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.safetensors holds no tensor 'absent\.weight', although"):
        fitted_eagle3(tmp_path, tiny_target(VOCABULARY, 16, LAYERS))


def test_damaged_files_are_refused_by_name(tmp_path):
    reference.written("eagle3", "plain", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors .* truncated"):
        Checkpoint.of(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"as a pickle, pytorch_model\.bin, which can run any code"):
        Checkpoint.of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        Checkpoint.of(tmp_path)
    with pytest.raises(ValueError, match="neither a folder nor a hub id that can be reached"):
        Checkpoint.of(tmp_path / "nowhere")


def test_a_folder_says_what_it_holds(tmp_path):
    reference.written("eagle3", "plain", tmp_path / "published")
    assert kind_of(tmp_path / "published") == "eagle3"
    reference.save(tmp_path / "model", {"architectures": ["LlamaForCausalLM"]}, {})
    assert kind_of(tmp_path / "model") is None
    reference.save(tmp_path / "later", {"speculators_model_type": "dspark"}, {})
    with pytest.raises(ValueError, match="drafter of kind 'dspark'"):
        kind_of(tmp_path / "later")


@pytest.mark.slow
def test_speculators_still_computes_what_is_stored(tmp_path):
    """Needs the environment of `make test-references`."""
    run_reference("eagle3", tmp_path)
    variants, logits = reference.describe(tmp_path)
    assert list(variants) == sorted(VARIANTS)
    for name, wanted in logits.items():
        torch.testing.assert_close(reference.expected("eagle3", name), wanted, atol=1e-6, rtol=0)
        head = eagle3_file.load(Checkpoint.of(tmp_path / name), LAYERS)
        assert distance(head, wanted) < CLOSE
        assert set(load_file(tmp_path / name / "model.safetensors")) == set(variants[name]["tensors"])
