"""How often a round waits for the device. A part of engine_gpu.py.

Waits are what torch itself reports as synchronisations inside a round, with the line that caused them, and reads of
fetched numbers that had not arrived yet.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import draftproof as dp
from draftproof.core.device import AsyncCopy
from draftproof.engine import batch as batches
from engine_checks import Found, K
from engine_models import Scale, drafters, first_layers, numbers, small_target, tree_drafters

S = dp.SamplingParams
WARM = [S(temperature=0.8, seed=1), S(temperature=0, seed=2)]
COLD = [S(temperature=0, seed=1)] * 2
PENALISED = [S(temperature=0.8, seed=1, repetition_penalty=1.1), S(temperature=0, seed=2, logit_bias={3: 1.0})]
FILTERED = [S(top_k=20, seed=3), S(top_p=0.9, min_p=0.02, seed=4)]


def waits(scale: Scale) -> Found:
    """The most waits in a round, and which lines torch says waited besides the fetch; with a control that waits."""
    made, asked = _asking(scale)
    yield "control: a look", _look(scale.device)
    for name in made:
        yield name, asked(name, WARM)
    yield "head, greedy", asked("head", COLD)
    yield "model, coupled", asked("model", WARM, "coupled")
    yield "model, token", asked("model", WARM, "token")
    yield "model, log-probabilities", asked("model", WARM, logprobs=True)
    yield "model, penalties", asked("model", PENALISED)
    yield "head, penalties", asked("head", PENALISED)


def trees(scale: Scale) -> Found:
    """The same under rule="tree": trees that are copied, drawn, and grown of the likeliest paths."""
    made, asked = _asking(scale, branches=2)
    for name in made:
        yield name, asked(name, WARM, "tree")
        yield f"{name}, greedy", asked(name, COLD, "tree")
    yield "model, log-probabilities", asked("model", WARM, "tree", logprobs=True)
    yield "head, penalties", asked("head", PENALISED, "tree")


def filtered(scale: Scale) -> Found:
    """The same with top-k, top-p and min-p, whose kernels take longest to compile."""
    _, asked = _asking(scale)
    yield "ngram", asked("ngram", FILTERED)
    yield "model", asked("model", FILTERED)
    yield "head", asked("head", FILTERED)


def _asking(scale: Scale, branches: int = 1) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    model = small_target(scale)
    small = first_layers(model, 2, 0.3)
    made = drafters(model, small) if branches == 1 else tree_drafters(model, small, branches)
    prompts = [numbers(9, 40, model.config.vocab_size)] * 2

    def asked(name: str, samplings: list[dp.SamplingParams], rule: str = "block", **more: Any) -> dict[str, Any]:
        engine = dp.load(model, made[name](), rule=rule, num_draft_tokens=K)
        engine.generate(prompts, samplings, max_tokens=20, **more)  # kernels are compiled: this waits
        return watched(lambda: engine.generate(prompts, samplings, max_tokens=20, **more), scale.device)

    return made, asked


def watched(call: Callable[[], Any], device: str) -> dict[str, Any]:
    """Run it and watch its rounds."""
    advance, read = batches.advance, AsyncCopy.read
    rounds: list[tuple[int, list[str]]] = []
    late: list[bool] = []

    def fetched(fetch: Any) -> Any:
        late.append(fetch._arrived is not None and not fetch._arrived.query())
        return read(fetch)

    def counted(*args: Any) -> Any:
        late.clear()
        with told(device) as lines:
            rows = advance(*args)
        rounds.append((sum(late), lines))
        return rows

    batches.advance, AsyncCopy.read = counted, fetched  # type: ignore[assignment, method-assign]
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
def told(device: str) -> Iterator[list[str]]:
    """torch's word on waits meanwhile, as lines of source."""
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


def _look(device: str) -> list[str]:
    """What torch says of a look that must be seen."""
    with told(device) as lines:
        bool(torch.ones(1, device=device).any())
    return lines
