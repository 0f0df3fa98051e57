"""Causal language models of every family: ragged rounds and trees over the slot cache equal a plain forward."""

import pytest
import torch
import transformers as tf

from draftproof.core.types import InexactError
from draftproof.models.compatibility import TESTED_FAMILIES
from draftproof.models.hf import HFModel
from draftproof.models.interface import Cache, Model
from models.families import CONFIGS, LLAMA, V, family
from models.reference import TOLERANCE, Rows, branch

TEXTS = [[5, 9, 4, 8, 3, 7, 7, 20, 31, 12, 6], [11, 12], [3]]
PARENTS = [-1, 0, 0, -1, 3, 1]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def alone(model):
    @torch.no_grad()
    def plain(_row, text):
        return model(torch.tensor([text]), use_cache=False).logits[0]

    return plain


def rows_of(model, texts=TEXTS):
    served = HFModel(model)
    return Rows(served, served.new_cache(len(texts)), texts)


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_rounds_with_rollbacks_equal_a_plain_forward(name):
    model = family(name)
    rows = rows_of(model)
    for accepted in ([0, 4, 2], [4, 0, 1], [1, 3, 4], [2, 2, 0]):
        assert rows.chain_round(4, accepted, alone(model)) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tree_equals_its_branches_and_the_kept_path_is_cached(name):
    model = family(name)
    plain = alone(model)
    rows = rows_of(model)
    drafts, forward = rows.score(len(PARENTS), PARENTS)
    for row, (text, draft) in enumerate(zip(rows.texts, drafts, strict=True)):
        for slot in range(-1, len(PARENTS)):
            expected = plain(row, text + [draft[s] for s in branch(PARENTS, slot)])[-1]
            assert (forward.logits[row, slot + 1] - expected).abs().max() < TOLERANCE
    paths = [[3, 4], [0, 1, 5], []]
    kept = [[draft[slot] for slot in path] for draft, path in zip(drafts, paths, strict=True)]
    rows.extend(kept, torch.tensor([path + [-1] * (len(PARENTS) - len(path)) for path in paths]))
    assert rows.chain_round(3, [1, 2, 3], plain) < TOLERANCE
    assert rows.chain_round(3, [0, 0, 0], plain) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon", "gpt2"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_both_kinds_of_attention_are_served(name, implementation):
    model = family(name, attn_implementation=implementation)
    rows = rows_of(model)
    for accepted in ([0, 3, 2], [3, 0, 1]):
        assert rows.chain_round(3, accepted, alone(model)) < TOLERANCE


def test_a_model_loaded_for_flex_attention_is_served_with_our_masks():
    model = family("llama", attn_implementation="flex_attention")
    rows = rows_of(model)
    assert rows.chain_round(3, [0, 1, 2], alone(family("llama"))) < TOLERANCE
    assert model.config._attn_implementation == "flex_attention"


def test_rows_leave_and_enter_between_rounds():
    model = family("qwen3")
    rows = rows_of(model)
    assert rows.chain_round(4, [1, 4, 0], alone(model)) < TOLERANCE
    late = rows_of(model, [[9, 8, 7, 6], [5, 4]])
    rows.cache = rows.cache.take([2, 0]).join(late.cache)
    rows.texts = [rows.texts[2], rows.texts[0], *late.texts]
    assert rows.chain_round(4, [4, 0, 2, 1], alone(model)) < TOLERANCE
    assert rows.chain_round(1, [1, 0, 1, 0], alone(model)) < TOLERANCE


def test_fresh_rows_can_join_before_their_first_pass():
    model = family("llama")
    served = HFModel(model)
    rows = rows_of(model)
    rows.cache = rows.cache.join(served.new_cache(1))
    rows.texts.append([7])
    assert rows.chain_round(2, [1, 2, 0, 1], alone(model)) < TOLERANCE


def test_a_buffer_that_grows_keeps_its_content():
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**LLAMA, "max_position_embeddings": 600})).eval()
    served = HFModel(model)
    rows = Rows(served, served.new_cache(2), [[3, 4, 5] * 84, [8]])
    before = rows.cache.capacity
    assert rows.chain_round(6, [6, 0], alone(model)) < TOLERANCE
    assert rows.cache.capacity > before
    assert rows.chain_round(2, [0, 1], alone(model)) < TOLERANCE


def test_only_the_positions_asked_for_are_scored():
    served = HFModel(family("llama"))
    tokens = torch.tensor([TEXTS[0]])
    everything = served(tokens, served.new_cache(1)).logits
    last = served(tokens, served.new_cache(1), scored=2).logits
    assert last.shape == (1, 2, V)
    assert torch.allclose(everything[:, -2:], last, atol=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_are_those_of_a_plain_forward(name):
    model = family(name)
    rows = rows_of(model)
    tokens = torch.tensor([[text[-1], 4, 5] for text in rows.texts])
    last = model.config.num_hidden_layers
    forward = rows.model(tokens, rows.cache, layers=(2, 1, last))
    for row, text in enumerate(rows.texts):
        with torch.no_grad():
            plain = model(torch.tensor([[*text, 4, 5]]), output_hidden_states=True).hidden_states
        for layer, states in zip((2, 1, last), forward.hidden, strict=True):
            assert torch.allclose(plain[layer][0, -3:], states[row], atol=TOLERANCE)


def everything_about(model):
    """Return every attribute, flag, hook and configuration entry of every module."""
    return [
        (name, type(module), module.training, sorted(module.__dict__), [len(getattr(module, h)) for h in HOOKS])
        for name, module in model.named_modules()
    ], model.config.to_dict()


@pytest.mark.parametrize("name", ["llama", "bloom", "falcon-alibi", "gemma3"])
def test_the_users_model_is_not_altered(name):
    model = family(name)
    before, tensors = everything_about(model), [(id(p), p._version, p.dtype) for p in model.parameters()]
    rows = rows_of(model)
    rows.model(torch.tensor([[3, 4]] * 3), rows.cache, layers=(1,))
    rows.model.first_layers(2)
    assert everything_about(model) == before
    assert [(id(p), p._version, p.dtype) for p in model.parameters()] == tensors


def test_no_weight_is_copied():
    model = family("llama")
    served = HFModel(model)
    pointers = {p.data_ptr() for p in [*served._net.parameters(), *served.first_layers(1)._net.parameters()]}
    assert pointers <= {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3", "gpt2", "opt", "bloom", "falcon-alibi"])
def test_the_first_layers_are_a_model_of_that_many_layers(name):
    model = family(name)
    config = CONFIGS[name]()
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    short = type(model)(config).eval()
    short.load_state_dict(model.state_dict(), strict=False)
    drafter = HFModel(model).first_layers(2)
    rows = Rows(drafter, drafter.new_cache(3), TEXTS)
    for accepted in ([0, 3, 2], [3, 0, 1]):
        assert rows.chain_round(3, accepted, alone(short)) < TOLERANCE


@pytest.mark.parametrize("count", [0, 3, -1])
def test_only_fewer_layers_can_be_the_first(count):
    with pytest.raises(ValueError, match=r"has 3 layers, so take 1 to 2"):
        HFModel(family("llama")).first_layers(count)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "opt", "llama"])
def test_padding_past_the_last_position_is_harmless(name):
    model = family(name)
    served = HFModel(model)
    assert served.max_length == 128
    rows = Rows(served, served.new_cache(2), [([5, 6, 7, 8] * 32)[:126], [9]])
    tokens = torch.tensor([[rows.texts[0][-1], 4, 5, 6, 0, 0], [9, 10, 11, 12, 13, 14]])
    logits = served(tokens, rows.cache).logits
    plain = alone(model)
    assert torch.allclose(plain(0, [*rows.texts[0], 4, 5])[-3:], logits[0, :3], atol=TOLERANCE)
    assert torch.allclose(plain(1, [9, 10, 11, 12, 13, 14]), logits[1], atol=TOLERANCE)


def test_a_full_row_is_refused():
    served = HFModel(family("gpt2"))
    cache = served.new_cache(1)
    served(torch.full((1, 128), 5), cache, scored=1)
    cache.keep(torch.tensor([128]))
    with pytest.raises(ValueError, match="a row holds 128 tokens, all of the model's 128 positions"):
        served(torch.tensor([[5]]), cache)


def test_longrope_is_served_up_to_where_its_frequencies_change():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
    }
    config = tf.Phi3Config(**LLAMA, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=16)
    assert HFModel(tf.Phi3ForCausalLM(config).eval()).max_length == 16


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi"])
def test_alibi_has_no_last_position(name):
    assert HFModel(family(name)).max_length is None


def test_logits_can_be_written_to_and_trained_on():
    served = HFModel(family("llama"))
    forward = served(torch.tensor([[3, 4]]), served.new_cache(1), layers=(1,))
    forward.logits[0, 0, 0] = 1.0
    assert not forward.logits.is_inference()
    assert not forward.hidden[0].is_inference()


def test_it_is_a_model_and_its_cache_a_cache():
    served = HFModel(family("llama"))
    assert isinstance(served, Model)
    assert isinstance(served.new_cache(1), Cache)
    assert served.vocab_size == V
    assert served.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"scored": 3}, "scored=3, but the pass has 2 tokens"),
        ({"scored": 0}, "scored=0"),
        ({"layers": (4,)}, "there is no 4"),
        ({"layers": (0,)}, "there is no 0"),
        ({"parents": torch.tensor([[-1, 0]])}, r"parents \(1, 2\) must name a parent"),
    ],
)
def test_wrong_arguments_are_named(options, complaint):
    served = HFModel(family("llama"))
    with pytest.raises(ValueError, match=complaint):
        served(torch.tensor([[3, 4]]), served.new_cache(1), **options)


def test_another_number_of_rows_than_the_cache_has_is_refused():
    served = HFModel(family("llama"))
    with pytest.raises(ValueError, match="must have 2 rows"):
        served(torch.tensor([[3, 4]]), served.new_cache(2))


def test_training_mode_is_refused():
    model = family("llama").train()
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        HFModel(model)
    assert model.training


RECURRENT = {
    "mamba": lambda: tf.MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2),
    "jamba": lambda: tf.JambaConfig(
        **{**LLAMA, "num_hidden_layers": 4}, num_experts=2, attn_layer_period=2, attn_layer_offset=1
    ),
    "qwen3-next": lambda: tf.Qwen3NextConfig(
        **{**LLAMA, "num_hidden_layers": 4},
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
    ),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_that_cannot_be_shortened_is_refused_by_name(name):
    model = tf.AutoModelForCausalLM.from_config(RECURRENT[name]()).eval()
    with pytest.raises(InexactError, match="layer 0 keeps a LinearAttentionLayer, a state that cannot be shortened"):
        HFModel(model)


def test_a_recurrent_state_outside_of_the_cache_is_refused():
    model = tf.RwkvForCausalLM(tf.RwkvConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2)).eval()
    with pytest.raises(InexactError, match=r"transformers marks its state \(rwkv\) as recurrent"):
        HFModel(model)


def test_positions_that_are_not_counted_for_each_row_are_refused():
    config = tf.GPTNeoConfig(vocab_size=V, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["local"], 2]])
    with pytest.raises(InexactError, match="window by slot"):
        HFModel(tf.GPTNeoForCausalLM(config).eval())


def test_every_family_of_the_tests_skips_the_probe_and_no_other():
    assert {family(name).config.model_type for name in CONFIGS} == TESTED_FAMILIES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
def test_a_gpu_gives_the_same_without_a_sync(name):
    model = family(name).cuda()
    served = HFModel(model)
    rows = [torch.tensor([text[-1], 4, 5, 6]) for text in TEXTS]
    cache = served.new_cache(len(TEXTS))
    served(torch.tensor([text + [0] * (11 - len(text)) for text in TEXTS]).cuda(), cache, scored=1)
    cache.keep(torch.tensor([len(text) - 1 for text in TEXTS]))
    tokens, kept = torch.stack(rows).cuda(), torch.tensor([0, 0, 0]).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            logits = served(tokens, cache).logits
            cache.keep(kept)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for row, text in enumerate(TEXTS):
        with torch.no_grad():
            plain = model(torch.tensor([[*text, 4, 5, 6]]).cuda()).logits[0, -4:]
        assert torch.allclose(plain, logits[row], atol=1e-3)
