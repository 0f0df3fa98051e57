"""Count the syncs of a round. Parts of engine_gpu.py.

A sync is what torch itself reports as a synchronisation inside a round, with the line that caused it, or a read of an
`AsyncCopy` that had not arrived yet.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import draftproof as dp
from draftproof.core.device import AsyncCopy
from draftproof.engine import scheduler as batches
from engine_checks import Found, K
from engine_models import Scale, drafters, first_layers, numbers, small_target, tree_drafters

S = dp.SamplingParams
WARM = [S(temperature=0.8, seed=1), S(temperature=0, seed=2)]
COLD = [S(temperature=0, seed=1)] * 2
PENALISED = [S(temperature=0.8, seed=1, repetition_penalty=1.1), S(temperature=0, seed=2, logit_bias={3: 1.0})]
FILTERED = [S(top_k=20, seed=3), S(top_p=0.9, min_p=0.02, seed=4)]


def waits(scale: Scale) -> Found:
    """Count the syncs in a round and list their lines, besides the read of the copy; with a control that syncs."""
    made, run = _runner(scale)
    yield "control: a look", _sync(scale.device)
    for name in made:
        yield name, run(name, WARM)
    yield "head, greedy", run("head", COLD)
    yield "model, coupled", run("model", WARM, "coupled")
    yield "model, token", run("model", WARM, "token")
    yield "model, log-probabilities", run("model", WARM, logprobs=True)
    yield "model, penalties", run("model", PENALISED)
    yield "head, penalties", run("head", PENALISED)


def trees(scale: Scale) -> Found:
    """Count the syncs under rule="tree": trees that are copied, drawn, or grown from the likeliest paths."""
    made, run = _runner(scale, branches=2)
    for name in made:
        yield name, run(name, WARM, "tree")
        yield f"{name}, greedy", run(name, COLD, "tree")
    yield "model, log-probabilities", run("model", WARM, "tree", logprobs=True)
    yield "head, penalties", run("head", PENALISED, "tree")


def filtered(scale: Scale) -> Found:
    """Count the syncs with top-k, top-p and min-p, whose kernels take longest to compile."""
    _, run = _runner(scale)
    yield "ngram", run("ngram", FILTERED)
    yield "model", run("model", FILTERED)
    yield "head", run("head", FILTERED)


def _runner(scale: Scale, branches: int = 1) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """Return the drafters by name, and a function that generates with one of them and counts the syncs."""
    model = small_target(scale)
    small = first_layers(model, 2, 0.3)
    made = drafters(model, small) if branches == 1 else tree_drafters(model, small, branches)
    prompts = [numbers(9, 40, model.config.vocab_size)] * 2

    def run(name: str, samplings: list[dp.SamplingParams], rule: str = "block", **more: Any) -> dict[str, Any]:
        engine = dp.load(model, made[name](), rule=rule, num_draft_tokens=K)
        engine.generate(prompts, samplings, max_tokens=20, **more)  # compiles kernels, which syncs
        return watched(lambda: engine.generate(prompts, samplings, max_tokens=20, **more), scale.device)

    return made, run


def watched(call: Callable[[], Any], device: str) -> dict[str, Any]:
    """Run a call and count the syncs of its rounds."""
    advance, read = batches.advance, AsyncCopy.read
    rounds: list[tuple[int, list[str]]] = []
    late: list[bool] = []

    def read_and_count(copy: Any) -> Any:
        late.append(copy._arrived is not None and not copy._arrived.query())
        return read(copy)

    def advance_and_count(*args: Any) -> Any:
        late.clear()
        with reported_syncs(device) as lines:
            rows = advance(*args)
        rounds.append((sum(late), lines))
        return rows

    batches.advance, AsyncCopy.read = advance_and_count, read_and_count  # type: ignore[assignment, method-assign]
    try:
        call()
    finally:
        batches.advance, AsyncCopy.read = advance, read  # type: ignore[method-assign]
    return {
        "rounds": len(rounds),
        "fetches waited for, at most": max(n for n, _ in rounds),
        "other waits in a round, at most": max(len(lines) for _, lines in rounds),
        "at": sorted({line for _, lines in rounds for line in lines})[:12],
    }


@contextmanager
def reported_syncs(device: str) -> Iterator[list[str]]:
    """Collect the lines of source at which torch reports a sync inside the context."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    lines += [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchroniz" in str(w.message)]


def _sync(device: str) -> list[str]:
    """Sync once, and return what torch reports: the control."""
    with reported_syncs(device) as lines:
        bool(torch.ones(1, device=device).any())
    return lines
