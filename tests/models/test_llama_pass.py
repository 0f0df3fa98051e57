"""The pass on four-bit weights computes what the model's own modules compute, and a row's bits are its own."""

import copy

import pytest
import torch

from draftproof.core.types import PAD
from draftproof.models import llama_pass
from draftproof.models.compiled_pass import CompiledPass, RotationTable
from draftproof.models.hf import HFModel
from draftproof.models.int4_linear import Int4Linear
from draftproof.models.llama_model import LlamaModel
from draftproof.models.llama_pass import LlamaPass
from draftproof.models.loading import as_model
from draftproof.models.quantised import quantise
from draftproof.models.rows import Block, PooledRows, Reading
from models.int4_models import float_llama, int4_llama, needs_compiled, needs_int4

pytestmark = needs_int4

V = 50


@pytest.fixture(params=["torch", pytest.param("compiled", marks=needs_compiled)], autouse=True)
def kind(request, monkeypatch):
    """Run each test with and without compiled passes."""
    if request.param == "torch":
        monkeypatch.setattr(llama_pass, "compiled_refusal", lambda: "switched off")
    return {"torch": LlamaPass, "compiled": CompiledPass}[request.param]


def model():
    return int4_llama(V, layers=3)


@torch.no_grad()
def reference(tokens):
    """Return logits and states of transformers' own forward of the same quantised modules."""
    out = model()(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return out.logits[0], [states[0] for states in out.hidden_states]


def close(made, expected):
    """Tell whether results agree up to rounding: products return bfloat16, a relative 2⁻⁹ in each of 12 products."""
    return float((made - expected).norm() / expected.norm()) < 0.02


def test_it_is_used_for_quantised_llamas_alone(kind):
    assert isinstance(as_model(model()), LlamaModel)
    assert type(LlamaModel.of(model())._run) is kind
    assert isinstance(as_model(float_llama(V)), HFModel)
    assert type(LlamaModel.of(model()).first_layers(2)._run) is kind
    with pytest.raises(ValueError, match=r"first_layers\(3\): the model has 3 layers, so take 1 to 2"):
        as_model(model()).first_layers(3)


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        LlamaModel.of(copy.deepcopy(model()).train())


@pytest.mark.parametrize("split", [[12], [1] * 12, [5, 1, 4, 2]])
def test_logits_and_states_are_those_of_the_modules(split):
    tokens = torch.randint(V, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    logits, states = reference(tokens)
    rows = PooledRows(LlamaModel.of(model()), pages=4)
    rows.enter(7, 12)
    made, hidden, at = [], [], 0
    for width in split:
        [read] = rows.score([], layers=(1, 3), reading=[Reading(7, tokens[at : at + width], scored=True)]).read
        made.append(read.logits)
        hidden.append(read.hidden)
        at += width
    assert close(torch.cat(made), logits)
    assert close(torch.cat([first for first, _ in hidden]), states[1])
    assert close(torch.cat([last for _, last in hidden]), states[3])


def defects(kind, lean):
    """Return what three defects change: no epsilon, rotations in another order, twice the scale of scores."""
    if kind is LlamaPass:
        return {"_eps_column": 0.0, "_frequencies": lean._frequencies.flip(0), "_scale": 2 * lean._scale}
    flipped = RotationTable(lean._layers._rotation._frequencies.flip(0))
    return {"eps": [0.0, lean._sizes.scale], "_rotation": flipped, "scale": [lean._sizes.eps, 2 * lean._sizes.scale]}


def test_a_wrong_epsilon_rotation_or_scale_would_show(kind, monkeypatch):
    """Each of three defects moves the logits by more than the comparison allows."""
    tokens = torch.randint(V, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    logits, _ = reference(tokens)
    for name, change in defects(kind, LlamaModel.of(model())._run).items():
        hf = LlamaModel.of(model())
        if isinstance(change, list):
            hf._run._layers._settings[:] = change
        else:
            monkeypatch.setattr(hf._run if kind is LlamaPass else hf._run._layers, name, change)
        made = hf(torch.tensor([tokens]), hf.new_cache(1, 12)).logits[0]
        assert not close(made, logits), name


def test_trees_attend_to_their_ancestors_alone():
    hf = LlamaModel.of(model())
    cache = hf.new_cache(1, 16)
    prompt = [3, 1, 4, 1, 5]
    hf(torch.tensor([prompt]), cache)
    cache.keep(torch.tensor([5]))
    parents = torch.tensor([[-1, -1, 0, 1]])  # root → (a, b), a → c, b → d
    out = hf(torch.tensor([[9, 20, 30, 21, 31]]), cache, parents=parents).logits[0]
    for index, path in {1: [9, 20], 3: [9, 20, 21], 4: [9, 30, 31]}.items():
        assert close(out[index], reference(prompt + path)[0][-1])
    assert not close(out[4], reference([*prompt, 9, 20, 30, 21, 31])[0][-1])
    cache.keep(torch.tensor([3]), torch.tensor([[1, 3, PAD, PAD]]))
    after = hf(torch.tensor([[7]]), cache).logits[0]
    assert close(after[0], reference([*prompt, 9, 30, 31, 7])[0][-1])


def test_a_row_has_the_same_bits_in_any_company():
    hf = LlamaModel.of(model())
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(V, (n,), generator=generator).tolist() for n in (9, 3, 30, 1, 17, 12)]

    def scores(company):
        rows = PooledRows(hf, pages=16)
        for row in company:
            rows.enter(row, 64)
        rows.score([], reading=[Reading(row, texts[row]) for row in company])
        block = Block(list(company), torch.tensor([[row, 7, 8] for row in company]))
        [groups] = rows.score([block], layers=(2,)).groups
        return {
            company[member]: (group.forward.logits[i], group.forward.hidden[0][i])
            for group in groups
            for i, member in enumerate(group.members)
        }

    together = scores([0, 1, 2, 3, 4, 5])
    for company in ([0], [2, 0], [5, 4, 3, 2, 1, 0]):
        for row, (logits, hidden) in scores(company).items():
            assert torch.equal(logits, together[row][0])
            assert torch.equal(hidden, together[row][1])


def test_codes_are_in_memory_once(kind):
    """Queries' and keys' are not: their rows are in pairs in the pass. Compiled passes have codes in another layout."""
    if kind is CompiledPass:
        first, second = (LlamaModel.of(model())._run._layers._table for _ in range(2))
        assert (first == second).all()
        return
    first, second = (LlamaModel.of(model())._net.model.layers[0] for _ in range(2))
    start = first.mlp.gate_proj.joined.packed.data_ptr()
    assert first.mlp.gate_proj.int4.packed.data_ptr() == start
    assert first.mlp.up_proj.int4.packed.data_ptr() == start + first.mlp.gate_proj.int4.packed.nbytes
    joined, values = first.self_attn.v_proj.joined.packed, first.self_attn.v_proj.int4.packed
    assert values.data_ptr() == joined[-len(values) :].data_ptr()
    assert second.self_attn.v_proj.joined.packed.data_ptr() == joined.data_ptr()


@needs_compiled
def test_a_compiled_model_gives_up_torchs_layout_until_its_modules_are_called(kind):
    """Control: torch's passes keep it."""
    net = float_llama(V)
    quantise(net, "int4")
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        before = net(tokens).logits
    LlamaModel.of(net)
    linears = [module for module in net.modules() if isinstance(module, Int4Linear)]
    assert all((linear._int4 is None) == (kind is CompiledPass) for linear in linears)
    assert (net.lm_head._codes is None) == (kind is CompiledPass)
    with torch.no_grad():
        assert torch.equal(net(tokens).logits, before)
