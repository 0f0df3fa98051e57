"""Recurrent states after rollbacks equal those of a plain forward, in every family that is served."""

import copy

import pytest
import torch
import transformers as tf
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof.core.types import InexactError
from draftproof.models import hybrid_cache, recurrent
from draftproof.models.cache import SlotCache
from draftproof.models.cpu_linear import pack, packable
from draftproof.models.hybrid import HybridModel
from draftproof.models.hybrid_cache import NO_TREES, HybridCache
from draftproof.models.hybrid_rows import PIECE
from draftproof.models.interface import Cache, Model
from draftproof.models.loading import as_model
from draftproof.models.pooled_slots import PooledSlots
from draftproof.models.rows import Reading, open_rows
from models.hybrid_families import IGNORES_STATE, QUICK, SERVED, V, hybrid
from models.test_scans import FAULTS

TOLERANCE = 1e-3
"""Largest difference of logits, in standard deviations: the rounding of float32 in models with wide random weights."""

families = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SERVED]
)


@pytest.fixture
def always_replay(monkeypatch):
    """No state is computed from what a scan read."""
    monkeypatch.setattr(hybrid_cache, "same_states", lambda *_: False)


@pytest.fixture(params=["scans", "replay"])
def either_way(request):
    if request.param == "replay":
        request.getfixturevalue("always_replay")


class Ragged:
    """Four rows of different lengths, each with its text, and the difference to plain forwards of the texts."""

    def __init__(self, name, *, prepared=True):
        """prepared=False: the model is probed now, and it is decided now how its mixers are rolled back."""
        self.model = hybrid(name)
        self.served = as_model(self.model) if prepared else HybridModel(self.model)
        self.generator = torch.Generator().manual_seed(3)
        self.cache, self.texts = self.served.new_cache(4), [[] for _ in range(4)]

    def score(self, width):
        """Score random tokens after each row; return the largest difference to plain forwards."""
        self.tokens = torch.randint(V, (4, width), generator=self.generator)
        logits = self.served(self.tokens, self.cache).logits
        worst = 0.0
        for b, text in enumerate(self.texts):
            with torch.no_grad():
                plain = self.model(torch.tensor([[*text, *self.tokens[b].tolist()]]), use_cache=False).logits[
                    0, -width:
                ]
            worst = max(worst, float((logits[b] - plain).abs().max() / plain.std()))
        return worst

    def keep(self, counts):
        self.cache.keep(torch.tensor(counts))
        for b, n in enumerate(counts):
            self.texts[b] += self.tokens[b, :n].tolist()


def worst_over_rollbacks(name):
    """Return the largest difference over rounds in which rows keep every number of tokens, from none to all."""
    return worst_of(Ragged(name))


def worst_of(rows):
    worst = 0.0
    for width, counts in [(5, [5, 2, 0, 1]), (4, [0, 1, 2, 3]), (4, [4, 3, 2, 1]), (1, [1, 0, 1, 1]), (1, [0, 1, 1, 1]),
                          (3, [1, 1, 1, 1]), (4, [0, 0, 0, 0]), (2, [2, 2, 2, 2]), (1, [1, 1, 1, 1])]:  # fmt: skip
        worst = max(worst, rows.score(width))
        rows.keep(counts)
    return max(worst, rows.score(3))


@pytest.mark.usefixtures("either_way")
@families
def test_rows_that_keep_different_numbers_of_tokens_equal_a_plain_forward(name):
    assert worst_of(Ragged(name, prepared=False)) < TOLERANCE


@families
def test_rows_in_a_pool_equal_a_plain_forward(name):
    rows = Ragged(name)
    rows.cache = rows.served._probed_cache(4)
    assert (rows.served.pool_refusal is None) == isinstance(rows.cache.slots, PooledSlots) == (name != "mamba2")
    assert worst_of(rows) < TOLERANCE


def forget_to_restore(cache):
    cache._before, cache._calls = None, {}


def restore_without_replay(cache):
    before, T = cache._before, cache.slots.width
    cache._before = None
    for index, states in (before or {}).items():
        short = torch.tensor([n - start < T for n, start in zip(cache.lengths.tolist(), cache._start, strict=True)])
        for key, state in cache.layers[index].states.items():
            state[short] = states[key][short]


@pytest.mark.parametrize("fault", [forget_to_restore, restore_without_replay])
@families
def test_a_rollback_that_is_not_one_is_found(name, fault, monkeypatch):
    as_model(hybrid(name))  # probed before the fault is there
    monkeypatch.setattr(HybridCache, "settle", torch.inference_mode()(fault))
    assert worst_over_rollbacks(name) > 100 * TOLERANCE


@families
def test_no_family_that_is_served_needs_a_replay(name, monkeypatch):
    rows = Ragged(name)
    rows.score(5)
    rows.keep([3, 1, 0, 4])
    monkeypatch.setattr(recurrent.Mixer, "replay", lambda *_: pytest.fail("replayed"))
    rows.cache.settle()
    assert rows.score(2) < TOLERANCE


SCANNING = ["qwen3_5_text", "falcon_h1"]
"""The delta rule and a state space."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCANNING)
def test_a_mixer_whose_scan_gives_other_states_is_replayed(name, fault, monkeypatch):
    fault(monkeypatch)
    rows = Ragged(name, prepared=False)
    assert all(mixer.replayed for mixer in rows.served._mixers)
    assert worst_of(rows) < TOLERANCE


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCANNING)
def test_wrong_states_from_scans_are_found(name, fault, monkeypatch):
    """The control: the same faults, after both ways to roll back were compared."""
    rows = Ragged(name)
    fault(monkeypatch)
    assert worst_of(rows) > 100 * TOLERANCE


def test_a_mixer_whose_scan_is_not_recognised_is_replayed(monkeypatch):
    monkeypatch.setattr(recurrent, "hear_scans", lambda *_: None)
    rows = Ragged("falcon_h1", prepared=False)
    assert all(mixer.replayed for mixer in rows.served._mixers)
    assert worst_of(rows) < TOLERANCE


class Operations(TorchDispatchMode):
    """Counts the operations that compute something: on a GPU, each is launched."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += not operation.is_view
        return operation(*args, **(kwargs or {}))


def share_of_operations(name):
    """Return the operations of a rollback, as a share of those of the pass before it."""
    served = HybridModel(hybrid(name))
    cache = served.new_cache(1)
    with Operations() as of_pass:
        served(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 1]]), cache)
    cache.keep(torch.tensor([4]))
    with Operations() as of_rollback:
        cache.settle()
    return of_rollback.count / of_pass.count


@pytest.mark.parametrize("name", SCANNING)
def test_a_rollback_launches_few_operations(name):
    assert share_of_operations(name) < 0.2


@pytest.mark.usefixtures("always_replay")
@pytest.mark.parametrize("name", SCANNING)
def test_a_replay_launches_many_operations(name):
    """The control. On a GPU, rollbacks by replay cost 0.59 of a pass of Qwen3.5."""
    assert share_of_operations(name) > 0.4


def test_layers_are_stacked_up_to_a_limit():
    mixers = as_model(hybrid("mamba2"))._mixers * 3
    size = 2 * sum(state.nbytes for state in mixers[0].one_row.values())
    for limit, sizes in [(1, [1] * 6), (2 * size, [2, 2, 2]), (5 * size - 1, [4, 2]), (6 * size, [6])]:
        parts = list(recurrent.in_parts(mixers, 2, limit))
        assert [len(part) for part in parts] == sizes
        assert [mixer for part in parts for mixer in part] == mixers


@pytest.mark.usefixtures("always_replay")
@families
def test_a_replay_computes_no_linear_layer_of_a_mixer(name, monkeypatch):
    rows = Ragged(name, prepared=False)
    assert all(mixer.replayed for mixer in rows.served._mixers)
    rows.score(5)
    rows.keep([3, 3, 3, 3])
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: pytest.fail("computed"))
    rows.cache.settle()


def test_rows_may_be_kept_one_after_the_other():
    rows = Ragged("lfm2")
    for counts in ([0, 3, 0, 0], [4, 0, 0, 0], [0, 0, 2, 0]):
        if counts == [0, 3, 0, 0]:
            rows.score(4)
        rows.keep(counts)
    assert rows.cache.lengths.tolist() == [4, 3, 2, 0]
    assert rows.score(2) < TOLERANCE


@pytest.mark.parametrize("name", QUICK)
def test_rows_are_taken_and_joined_with_tokens_that_are_not_settled(name):
    rows = Ragged(name)
    rows.score(5)
    rows.keep([5, 1, 3, 0])
    rows.score(4)
    rows.keep([2, 4, 1, 3])
    one, two = rows.cache.take([3, 0]), rows.cache.take([1])
    rows.cache = one.join(two).join(rows.served.new_cache(1))
    rows.texts = [rows.texts[3], rows.texts[0], rows.texts[1], []]
    assert rows.score(3) < TOLERANCE
    rows.keep([1, 2, 3, 1])
    assert rows.score(1) < TOLERANCE


def test_rows_can_be_shortened_within_the_last_pass_only():
    rows = Ragged("qwen3_5_text")
    rows.score(4)
    rows.keep([4, 4, 2, 3])
    rows.cache.lengths = torch.tensor([2, 4, 0, 1])
    rows.texts = [text[:n] for text, n in zip(rows.texts, (2, 4, 0, 1), strict=True)]
    assert rows.score(2) < TOLERANCE
    rows.keep([2, 2, 2, 2])
    with pytest.raises(ValueError, match=r"lengths\[1\]=3: the recurrent states of this row hold 4 tokens"):
        rows.cache.lengths = torch.tensor([4, 3, 2, 3])


def test_trees_are_refused():
    served = as_model(hybrid("lfm2"))
    cache = served.new_cache(1)
    with pytest.raises(ValueError, match="a tree cannot be scored"):
        served(torch.tensor([[1, 2, 3]]), cache, parents=torch.tensor([[-1, -1]]))
    served(torch.tensor([[1, 2, 3]]), cache)
    with pytest.raises(ValueError, match=NO_TREES[:40]):
        cache.keep(torch.tensor([2]), torch.tensor([[1, -1]]))


def test_prompts_are_read_in_runs_of_equal_length_and_in_pieces():
    """So nothing is replayed: no padding enters a pass."""
    served = as_model(hybrid("lfm2"))
    widths = []

    class Watched(HybridModel):
        def __init__(self):
            self.__dict__ = served.__dict__

        def __call__(self, tokens, cache, **options):
            widths.append(tuple(tokens.shape))
            return super().__call__(tokens, cache, **options)

    rows = open_rows(Watched(), 20)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(V, (n,), generator=generator).tolist() for n in (PIECE + 3, 2, PIECE + 3, 0)]
    for row in range(4):
        rows.enter(row, 300)
    read = rows.score([], layers=[1], reading=[Reading(row, text, scored=True) for row, text in enumerate(texts)]).read
    assert widths == [(2, PIECE), (2, 3), (1, 2)]
    for text, each in zip(texts[:3], read, strict=False):
        with torch.no_grad():
            plain = hybrid("lfm2")(torch.tensor([text]), use_cache=False, output_hidden_states=True)
        assert (each.logits - plain.logits[0]).abs().max() < TOLERANCE * plain.logits.std()
        assert (each.hidden[0] - plain.hidden_states[1][0]).abs().max() < TOLERANCE * plain.hidden_states[1].std()
    assert read[3].logits is None


def test_the_model_itself_is_not_altered():
    model = copy.deepcopy(hybrid("falcon_h1"))
    chunk = model.model.layers[0].mamba.chunk_size
    served = HybridModel(model)
    served(torch.tensor([[1, 2]]), served.new_cache(1))
    assert model.model.layers[0].mamba.chunk_size == chunk
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)


def test_packed_linear_layers_which_copies_of_a_model_share():
    model = copy.deepcopy(hybrid("lfm2"))
    if not packable(model):
        pytest.skip("this build of torch cannot pack")
    pack(model)
    packed = model.model.layers[0].conv.in_proj
    HybridModel(model)
    HybridModel(model)
    assert model.model.layers[0].conv.in_proj is packed
    assert "forward" not in vars(packed)


def test_it_is_a_model_with_a_cache():
    served = as_model(hybrid("lfm2"))
    assert isinstance(served, Model)
    assert isinstance(served.new_cache(2), Cache)
    assert served.max_length == 512
    other = SlotCache(1, 1, 0, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"take one from this model's new_cache\(\)"):
        served(torch.tensor([[1]]), other)
    with pytest.raises(ValueError, match="can be joined only with a HybridCache"):
        served.new_cache(1).join(other)


# --- refusals


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [0.3, 0.02])
@pytest.mark.parametrize("name", IGNORES_STATE)
def test_a_family_whose_passes_ignore_their_state_is_refused_with_the_measured_error(name, weights, dtype):
    """With small weights the logits of short texts do not show it: those of Mamba and Jamba differ by 2e-6 and 9e-5."""
    config = IGNORES_STATE[name]()
    config.initializer_range = weights
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    measured = r"differ by \d\.\de[-+]\d\d of their standard deviation, or by \d\.\de[-+]\d\d from made-up"
    with pytest.raises(InexactError, match=measured):
        as_model(model)


@families
def test_a_served_family_is_accepted_in_bfloat16(name):
    config = SERVED[name](V)
    config.initializer_range = 0.02
    with torch.random.fork_rng():
        torch.manual_seed(0)
        as_model(tf.AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16))


def test_a_cache_of_the_models_own_is_refused():
    config = tf.MiniMaxConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=48)  # fmt: skip
    with pytest.raises(InexactError, match="cannot be served: it does not accept our masks and cache"):
        as_model(tf.AutoModelForCausalLM.from_config(config).eval())


def test_a_hybrid_does_not_draft():
    with pytest.raises(InexactError, match="layer 0 keeps a LinearAttentionLayer, a state that cannot be shortened"):
        as_model(hybrid("lfm2"), "drafter")


@pytest.mark.parametrize("name", ["nemotron_h", pytest.param("zamba2", marks=pytest.mark.slow)])
def test_time_steps_are_limited_in_passes_over_one_token_too(name, monkeypatch):
    """Without our limit transformers' two ways to compute a token differ, which the probe finds."""
    model = copy.deepcopy(hybrid(name))
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            module.dt_bias.data -= 12.0  # time steps far below the limit of 1e-3
    HybridModel(model)
    monkeypatch.setattr(recurrent, "_limit_time_steps", lambda module: None)
    with pytest.raises(InexactError, match="use it in another way than passes over one"):
        HybridModel(model)
