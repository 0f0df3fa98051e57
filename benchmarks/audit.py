"""Measure what an audit finds, after how many tokens, and at what cost: the bundled model on a CPU, and toy models.

    python benchmarks/audit.py [--out benchmarks/results/audit.json]

Skipped residual   the engine with `lossy.unadjusted` and an early-exit drafter, audited until bias is found.
Mixture            2 % of all tokens from the drafter, one far from the target and one near it. Decoding 150,000 tokens
                   takes more than an hour here, so tokens are drawn from (1 − ε)·p + ε·q at positions of real texts,
                   many at each position: the bets see the same distributions. Only the bet on the drafter's
                   distribution is placed, and all others count as lost: a lower bound of the evidence.
Cost               time of the reference pass and the bets over time of decoding, one prompt at a time, in alternation.
Toys               tokens per minute of a whole audit, decoding included, and of the audit alone.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import draftproof as dp
from draftproof.auditor.api import audit
from draftproof.auditor.bets import Bettor
from draftproof.auditor.betting import Betting
from draftproof.auditor.drafter import as_drafter, resolve_head
from draftproof.auditor.e_process import STRENGTHS
from draftproof.auditor.reference import ReferenceModel
from draftproof.auditor.settings import AuditRequest
from draftproof.auditor.texts import Positions, Text
from draftproof.bench import prompts
from draftproof.models.tokenizer import encode
from draftproof.models.toy import Toy

HERE = Path(__file__).parent
ALPHA = 1e-6
LAYERS = 28
"""Layers of the early-exit drafter, of the model's 30: accepted and rejected often enough for a defect to show."""
NOISE = 1.0
"""Standard deviation of the noise in the logits of a drafter near the target: two drafts in three are accepted."""
REPEATS = 200
"""Tokens drawn at each position of a text."""
WARM = dp.SamplingParams(temperature=0.8, top_p=0.95)


def benchmark_prompts(engine: dp.Engine, of_each_kind: int) -> list[list[int]]:
    return [encode(p.prompt, engine.tokenizer) for p in prompts.pick(prompts.read(), limit=of_each_kind)]


def show(c: dp.Certificate) -> None:
    print(f"  {c.tokens} tokens, log evidence {c.log_evidence:.1f} of {c.threshold:.1f}", flush=True)


def skipped_residual(plain: dp.Engine) -> dict[str, Any]:
    """Count the tokens until a skipped residual is found, at temperature 1."""
    wrong = dp.load(
        plain.hf, f"early-exit:{LAYERS}", rule=dp.lossy.unadjusted, num_draft_tokens=3, tokenizer=plain.tokenizer
    )
    drafter = plain.model.first_layers(LAYERS)
    options = {"sampling": dp.SamplingParams(), "drafter": drafter, "max_tokens": 4_000, "length": 32, "batch": 4}
    found = audit(wrong, plain.hf, benchmark_prompts(plain, 1), **options, watch=show)
    return {"verdict": found.verdict, "tokens": found.found_at, "found_by": found.found_by}


def mixtures(plain: dp.Engine, share: float, most: int) -> dict[str, Any]:
    """Count the tokens until a mixture with a drafter is found, by draws at positions of texts of the model."""
    reference, drafter = ReferenceModel(plain.hf), ReferenceModel(plain.model.first_layers(LAYERS))
    bettor = Bettor(dp.SamplingParams(), reference.tolerance(dp.SamplingParams()), drafter, traced=True)
    numbers = torch.Generator().manual_seed(0)
    ratios: dict[str, list[torch.Tensor]] = {
        f"early-exit:{LAYERS}": [],
        f"the target with noise {NOISE} in its logits": [],
    }
    bets = 0
    for i, prompt in enumerate(benchmark_prompts(plain, 2)):
        sample = plain.decode([prompt], dp.SamplingParams(), max_tokens=64, seeds=[i])[0]
        dists = reference.dists(
            Positions.of([Text(tuple(prompt), tuple(sample.tokens), sample.rounds)]), dp.SamplingParams()
        )
        drafted = bettor.drafted(dists)
        bets = bets or len(bettor.tickets(dists, drafted))
        near = (dists.log_p + NOISE * torch.randn(dists.log_p.shape, generator=numbers)).log_softmax(-1)
        for kept, dist in zip(ratios.values(), (drafted.log_q, near), strict=True):
            mixed = (1 - share) * dists.p + share * dist.exp()
            drawn = mixed.multinomial(REPEATS, replacement=True, generator=numbers)  # [T, REPEATS]
            kept.append((dist.gather(1, drawn) - dists.log_p.gather(1, drawn)).double().exp().flatten())
    made = {
        name: _tokens_until_found(torch.cat(kept), bets, bettor.tolerance, most, numbers)
        for name, kept in ratios.items()
    }
    return {"share": share, "simulated": True, "bets_counted": bets, "tokens": made}


def _tokens_until_found(
    ratio: torch.Tensor, bets: int, tolerance: float, most: int, numbers: torch.Generator
) -> int | None:
    """Count the draws, in random order, until one bet of `bets` has won."""
    ratio = ratio[torch.randperm(len(ratio), generator=numbers)[:most]]
    shares = torch.tensor(STRENGTHS, dtype=torch.float64)
    paths = (torch.log1p(shares * (ratio[:, None] - 1)) - torch.log1p(shares * tolerance)).cumsum(0)
    evidence = paths.logsumexp(-1) - math.log(bets * len(STRENGTHS))
    over = (evidence >= -math.log(ALPHA)).nonzero()
    return int(over[0]) + 1 if len(over) else None


def cost(plain: dp.Engine, name: str, drafter: str, sampling: dp.SamplingParams, texts: int) -> dict[str, float]:
    """Measure the time of the audit over the time of decoding, text by text."""
    engine = dp.load(plain.hf, drafter, tokenizer=plain.tokenizer)
    reference = ReferenceModel(plain.hf)
    dist = as_drafter(
        plain.model.first_layers(LAYERS) if drafter.startswith("early") else resolve_head(drafter, plain.hf)
    )
    request = AuditRequest(((0,),), sampling, ALPHA, 0.02, 1, 64, 1, 0, "bets")
    betting = Betting(reference, Bettor(sampling, reference.tolerance(sampling), dist), request, ALPHA)
    ratios, decoding = [], []
    for i, prompt in enumerate(benchmark_prompts(plain, 1)[:texts]):
        start = time.perf_counter()
        sample = engine.decode([prompt], sampling, max_tokens=64, seeds=[i])[0]
        middle = time.perf_counter()
        betting.update([Text(tuple(prompt), tuple(sample.tokens), sample.rounds)])
        ratios.append((time.perf_counter() - middle) / (middle - start))
        decoding.append((middle - start) / len(sample.tokens))
    made = {
        "audit_over_decoding": statistics.median(ratios),
        "highest": max(ratios),
        "decoding_ms_a_token": 1e3 * statistics.median(decoding),
    }
    print(f"  {name}: {made['audit_over_decoding']:.2f} (at most {made['highest']:.2f})", flush=True)
    return made


class Replay:
    """A decoder that decodes each batch of seeds once and then replays it, to time the audit alone."""

    def __init__(self, engine: dp.Engine, different: int) -> None:
        self.engine, self.different, self.kept = engine, different, {}

    def decode(self, prompts: Any, sampling: dp.SamplingParams, *, max_tokens: int, seeds: Any) -> Any:
        key = seeds[0] % self.different
        if key not in self.kept:
            self.kept[key] = self.engine.decode(prompts, sampling, max_tokens=max_tokens, seeds=seeds)
        return self.kept[key]


def toys() -> dict[str, float]:
    """Measure tokens per minute with a vocabulary of 8, a model drafter and block verification."""
    target = Toy.random(8, order=2, seed=1)
    noise = torch.randn(target.table.shape, generator=torch.Generator().manual_seed(2))
    draft = Toy(target.table + 0.8 * noise)
    engine = dp.load(target, dp.load(draft, None).model, num_draft_tokens=3, max_batch=4096)
    options = {"sampling": dp.SamplingParams(), "drafter": draft, "batch": 4096, "length": 16, "bias": 0.005}
    speeds = {}
    for name, decoder, most in (
        ("with decoding", engine, 300_000),
        ("audit alone", Replay(engine, 4096), 1_000_000),
    ):
        audit(decoder, target, [[0, 1]], **options, max_tokens=1)  # warm up
        start = time.perf_counter()
        found = audit(decoder, target, [[0, 1]], **options, max_tokens=most)
        speeds[f"tokens a minute, {name}"] = 60 * found.tokens / (time.perf_counter() - start)
        print(f"  {name}: {speeds[f'tokens a minute, {name}']:,.0f} tokens a minute", flush=True)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "audit.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/audit.py",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
        "alpha": ALPHA,
    }
    print("toys", flush=True)
    result["toys"] = toys()
    plain = dp.load(drafter=None, weights="float32")
    print("cost of the audit over decoding, one prompt at a time", flush=True)
    result["cost"] = {
        "ngram, temperature 0.8, top-p 0.95": cost(plain, "ngram, warm", "ngram", WARM, 6),
        "ngram, temperature 1": cost(plain, "ngram, plain", "ngram", dp.SamplingParams(), 6),
        "head, temperature 1": cost(plain, "head", "head", dp.SamplingParams(), 6),
        f"early-exit:{LAYERS}, temperature 1": cost(
            plain, "early exit", f"early-exit:{LAYERS}", dp.SamplingParams(), 3
        ),
    }
    print("skipped residual", flush=True)
    result["skipped_residual"] = skipped_residual(plain)
    print(" ", result["skipped_residual"], "\nmixture of 2 %", flush=True)
    result["mixture"] = mixtures(plain, 0.02, 150_000)
    print(" ", result["mixture"], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
