"""Check the engine on a device: greedy texts and distributions. Parts of engine_gpu.py.

Each part is a generator of (name, result), so that a result is written to the file before the next check starts.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

import draftproof as dp
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.engine.request import Request
from draftproof.models.hf import HFModel
from engine_models import Scale, drafters, first_layers, head, llama, numbers, small_target

Found = Iterator[tuple[str, Any]]

K = 3
"""Draft length of all checks: kernels are then compiled for drafts of 0, 1 and up to 3 tokens, and no other lengths."""

VOCAB, TEMPERATURE = 6, 0.8
"""Vocabulary and temperature of the distribution test: the joint distribution of three tokens has 216 cells."""


def greedy(scale: Scale) -> Found:
    """Count rows that differ from transformers' greedy generation, with the margin between the two best tokens."""
    model = small_target(scale)
    V, count = model.config.vocab_size, scale.of(96, 12)
    small = first_layers(model, 2, 0.3)
    prompts = [numbers(n, n, V) for n in (3, 40, 17, 90)]
    wanted = [_greedily(model, prompt, count) for prompt in prompts]
    for graphs in (True, False):
        how = "replayed" if graphs else "launched"
        for name, make in drafters(model, small, graphs=graphs).items():
            engine = dp.load(model, make(), num_draft_tokens=K, graphs=graphs)
            outputs = engine.generate(prompts, temperature=0, max_tokens=count)
            pairs = zip(prompts, outputs, wanted, strict=True)
            parted = [_margin(model, p, o.tokens, w) for p, o, w in pairs if o.tokens != w]
            refusal = engine.model.graph_cache.refusal  # type: ignore[attr-defined]
            yield f"{name}, {how}", {"parted": len(parted), "margins": parted, "recording refused": refusal}


def _greedily(model: Any, prompt: list[int], count: int) -> list[int]:
    """Generate greedily with transformers."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def _margin(model: Any, prompt: list[int], made: list[int], wanted: list[int]) -> float:
    """Return the margin between the two largest logits where the texts differ: below 1e-4 rounding may decide."""
    n = next((i for i, (a, b) in enumerate(zip(made, wanted, strict=False)) if a != b), min(len(made), len(wanted)))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + wanted[:n]], device=model.device)).logits[0, -1]
    best = logits.float().topk(2).values
    return float(best[0] - best[1])


def dists(scale: Scale) -> Found:
    """Compute p-values of the joint distribution of three tokens: below 1e-6 is a bias, and the control must be below.

    12 000 texts over 216 cells: a total variation of 0.07 is detected.
    """
    texts = scale.of(12_000, 300)
    model, small = llama(scale, 1, VOCAB, 32, 2), llama(scale, 2, VOCAB, 32, 1)
    prompt = [1, 2, 3, 1, 2]
    dist = joint(model, prompt, TEMPERATURE)
    made = {
        "token model": ("token", lambda: ModelDrafter(HFModel(small), vocab_size=VOCAB)),
        "block model": ("block", lambda: ModelDrafter(HFModel(small), vocab_size=VOCAB)),
        "block head": ("block", lambda: HeadDrafter(head(model, 5))),
        "coupled model": ("coupled", lambda: ModelDrafter(HFModel(small), vocab_size=VOCAB)),
        "block ngram": ("block", lambda: "ngram"),
        "tree model": ("tree", lambda: ModelDrafter(HFModel(small), vocab_size=VOCAB, branches=2)),
        "plain": ("block", lambda: None),
    }
    for name, (rule, make) in made.items():
        seen = counts(dp.load(model, make(), rule=rule, num_draft_tokens=2, max_batch=texts), prompt, texts)
        yield name, g_test(seen, dist)
        if name == "token model":
            yield "control: another temperature", g_test(seen, joint(model, prompt, TEMPERATURE * 1.1))


def counts(engine: Any, prompt: list[int], texts: int) -> torch.Tensor:
    """Count the texts of three tokens. Requests ask for more tokens, so that no draft is shorter than the others: each
    length would need a kernel of its own."""
    requests = [
        Request(tuple(prompt), dp.SamplingParams(temperature=TEMPERATURE, seed=n), 16, seeded=True)
        for n in range(texts)
    ]
    emissions = [engine._emission(request) for request in requests]
    batch, by_id = engine._batch(emissions), {e.session.id: e for e in emissions}
    while any(len(e.session.output) < 3 for e in emissions):
        engine._step(batch, by_id)
    places = torch.tensor([e.session.output[:3] for e in emissions]) @ torch.tensor([VOCAB**2, VOCAB, 1])
    return torch.bincount(places, minlength=VOCAB**3)


def joint(model: Any, prompt: list[int], temperature: float) -> torch.Tensor:
    """Compute the distribution of three tokens from plain forward passes."""
    dist, texts = torch.ones(1, dtype=torch.float64), torch.tensor([prompt])
    for _ in range(3):
        with torch.no_grad():
            p = (model(texts.to(model.device)).logits[:, -1].double() / temperature).softmax(-1).cpu()
        dist = (dist[:, None] * p).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1)
    return dist


def g_test(seen: torch.Tensor, dist: torch.Tensor) -> float:
    """Return the p-value of a G-test, by the Wilson-Hilferty approximation of the chi-square tail: no scipy needed."""
    expected = dist.double().cpu() * seen.sum()
    small = expected < 5
    s = torch.cat([seen[~small].double(), seen[small].sum()[None].double()])
    e = torch.cat([expected[~small], expected[small].sum()[None]])
    s, e = s[e > 0], e[e > 0]
    g, k = float(2 * torch.special.xlogy(s, s / e).sum()), len(s) - 1
    z = ((g / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))
