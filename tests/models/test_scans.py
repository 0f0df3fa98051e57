"""States computed from what scans read equal those of the recurrences, token by token."""

from functools import wraps
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize, softplus

from draftproof.models import scans
from draftproof.models.scans import Kept, Scan, after_delta_rule, after_state_space, hear_scans, states_after

B, T, H, G, P, N, LAYERS = 4, 6, 6, 3, 5, 7, 2
TOLERANCE = 1e-5
COUNTS = [{0: 1, 1: 4, 2: 0, 3: 5}, {0: 3, 1: 3, 2: 3, 3: 3}, {1: 2, 3: 5}, {2: 4}]
each_counts = pytest.mark.parametrize("counts", COUNTS)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state_space_arguments(seed):
    """Arguments of a state space with fewer groups than heads, and time steps on both sides of a limit."""
    return {
        "hidden_states": numbers(B, T, H, P, seed=seed),
        "dt": numbers(B, T, H, seed=seed + 1),
        "A": -numbers(H, seed=seed + 2).exp(),
        "B": numbers(B, T, G, N, seed=seed + 3),
        "dt_bias": numbers(H, seed=seed + 4),
        "dt_softplus": True,
        "dt_limit": [0.3, 1.5],
    }


def state_space_state(read, state, row, n):
    for t in range(n):
        dt = softplus(read["dt"][row, t] + read["dt_bias"]).clamp(*read["dt_limit"])[:, None, None]
        B_heads = read["B"][row, t].repeat_interleave(H // G, 0)
        state = (read["A"][:, None, None] * dt).exp() * state
        state = state + dt * read["hidden_states"][row, t][:, :, None] * B_heads[:, None]
    return state


def delta_rule_arguments(seed):
    return {
        "key": numbers(B, T, H, N, seed=seed),
        "value": numbers(B, T, H, P, seed=seed + 1),
        "g": -numbers(B, T, H, seed=seed + 2).exp(),
        "beta": numbers(B, T, H, seed=seed + 3).sigmoid(),
        "use_qk_l2norm_in_kernel": True,
    }


def delta_rule_state(read, state, row, n):
    for t in range(n):
        k, beta = normalize(read["key"][row, t], dim=-1), read["beta"][row, t][:, None]
        state = read["g"][row, t].exp()[:, None, None] * state
        w = beta * (read["value"][row, t] - (k[:, None] @ state)[:, 0])
        state = state + k[:, :, None] * w[:, None]
    return state


RULES = {
    "state space": (after_state_space, state_space_arguments, state_space_state, (H, P, N)),
    "delta rule": (after_delta_rule, delta_rule_arguments, delta_rule_state, (H, N, P)),
}
rules = pytest.mark.parametrize("rule", RULES)


def worst(rule, counts):
    """Return the largest difference to the recurrence over two stacked layers."""
    states_of, arguments, state_of, shape = RULES[rule]
    kept = Kept.of(counts, B, torch.device("cpu"))
    read = [arguments(10 * layer) for layer in range(LAYERS)]
    before = [numbers(B, *shape, seed=90 + layer) for layer in range(LAYERS)]
    found = states_of(read, [kept.rows_of(state) for state in before], kept)
    return max(
        float((found[layer][i] - state_of(read[layer], before[layer][row], row, n)).abs().max())
        for layer in range(LAYERS)
        for i, (row, n) in enumerate(counts.items())
    )


@each_counts
@rules
def test_states_are_those_of_the_recurrence(rule, counts):
    assert worst(rule, counts) < TOLERANCE


def keep_what_was_rejected(monkeypatch):
    monkeypatch.setattr(Kept, "masked", lambda _self, value: value)


def forget_the_state_before(monkeypatch):
    monkeypatch.setattr(scans, "_with_rest", lambda written, _before, _decay: list(written))


def decay_nothing(monkeypatch):
    real = scans._with_rest
    monkeypatch.setattr(scans, "_with_rest", lambda written, before, decay: real(written, before, decay * 0 + 1))


FAULTS = [keep_what_was_rejected, forget_the_state_before, decay_nothing]


@pytest.mark.parametrize("fault", FAULTS)
@rules
def test_a_fault_is_found(rule, fault, monkeypatch):
    fault(monkeypatch)
    assert worst(rule, COUNTS[0]) > 100 * TOLERANCE


@each_counts
def test_a_convolutions_state_is_a_window_of_its_inputs(counts):
    kept, inputs = Kept.of(counts, B, torch.device("cpu")), numbers(B, 5, 3 + T)
    windows = kept.window(inputs, 3)
    for window, (row, n) in zip(windows, counts.items(), strict=True):
        assert torch.equal(window, inputs[row, :, n : n + 3])


@rules
def test_layers_of_other_shapes_and_settings_are_not_stacked(rule):
    """A layer with one head fewer, and one with another setting, between layers that are alike."""
    states_of, arguments, state_of, shape = RULES[rule]
    form = next(form for form in scans.FORMS if form.states_after is states_of)
    read = [arguments(10 * layer) for layer in range(4)]
    narrow = slice(0, H - G)  # the heads of two groups
    by_head = {"hidden_states": 2, "dt": 2, "A": 0, "dt_bias": 0, "key": 2, "value": 2, "g": 2, "beta": 2}
    read[1] = {
        name: value[(slice(None),) * by_head[name] + (narrow,)] if name in by_head else value
        for name, value in read[1].items()
    }
    if "B" in read[1]:
        read[1]["B"] = read[1]["B"][:, :, :1].expand(-1, -1, H - G, -1)
    key, other = {"state space": ("dt_limit", [0.5, 0.7]), "delta rule": ("use_qk_l2norm_in_kernel", False)}[rule]
    read[2] = {**read[2], key: other}
    before = [numbers(B, *shape, seed=90 + layer) for layer in range(4)]
    before[1] = before[1][:, narrow]
    kept = Kept.of(COUNTS[0], B, torch.device("cpu"))
    found = states_after([Scan(form, each) for each in read], before, kept)
    alone = [states_of([each], [state], kept)[0] for each, state in zip(read, before, strict=True)]
    for one, other_one in zip(found, alone, strict=True):
        assert torch.allclose(one, other_one, atol=TOLERANCE)
    for layer in (0, 3):
        assert torch.allclose(found[layer][1], state_of(read[layer], before[layer][1], 1, 4), atol=TOLERANCE)


# --- hearing


def chunk_rule(query, key, value, g, beta, initial_state=None, use_qk_l2norm_in_kernel=False):
    return query + value


def decorated(function):
    @wraps(function)
    def wrapped(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return wrapped


class Mixing(nn.Module):
    @decorated
    def forward(self, x, *, scale=2):
        return chunk_rule(x, x + 1, x + 2, g=x, beta=x, use_qk_l2norm_in_kernel=True) * scale


def test_scans_are_heard_through_decorators_and_others_are_left_alone():
    ours, other, heard = Mixing(), Mixing(), []
    hear_scans(ours, heard.append)
    x = torch.arange(3.0)
    assert torch.equal(ours(x), other(x))
    assert torch.equal(ours(x, scale=3), other(x, scale=3))
    assert len(heard) == 2
    assert heard[0].read.keys() == {"key", "value", "g", "beta", "use_qk_l2norm_in_kernel"}
    assert torch.equal(heard[0].read["key"], x + 1)
    assert isinstance(chunk_rule, FunctionType)
    assert "forward" not in vars(other)


def test_chunks_are_fitted_to_the_pass():
    def rule(query, key, value, g, beta, initial_state=None, use_qk_l2norm_in_kernel=False, chunk_size=64):
        return chunk_size

    sized = scans._announced(rule, scans._form_of(rule), lambda _: None)
    for tokens, size in [(8, 8), (64, 64), (256, 64)]:
        assert sized(*[torch.zeros(1, tokens, 1, 1)] * 5) == size
    assert sized(*[torch.zeros(1, 8, 1, 1)] * 5, chunk_size=16) == 16


def test_a_replaced_forward_is_left_alone():
    module, heard = Mixing(), []
    module.forward = lambda x: x
    hear_scans(module, heard.append)
    assert module(3) == 3
    assert heard == []
