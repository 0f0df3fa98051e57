"""Estimate the speedup of drafters and draft-length policies without a model, by replaying recorded greedy texts.

    python benchmarks/tune_drafters.py [--texts texts.json] [--prompts mine.jsonl] [--max-tokens 96] [--busy 0.2]

A greedy text does not depend on the drafter. So texts are recorded once, with plain decoding, and drafters are replayed
over them in seconds: which draft tokens are accepted is known, and the cost of a pass is assumed (PASSES). The figures
are modelled, but they are the same on every machine under any load; `benchmarks/engine_cpu.py` measures. `--busy` adds
log-normal jitter of this size to the times that the draft-length policy sees.
"""

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import draftproof as dp
from draftproof.bench.prompts import read
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.interface import Drafter
from draftproof.drafters.ngram import NGram
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.suffix import Suffix
from draftproof.engine.draft_length import DraftLengths
from draftproof.engine.request import Request, Session

PASSES = {1: 1.0, 2: 1.02, 3: 1.03, 5: 1.06, 8: 1.13, 13: 1.32, 17: 1.45}
"""Cost of a pass over n tokens, in passes over one token: packed weights, two cores."""

ROUND, DRAFT = 0.03, 0.004
"""Cost of a round outside the model, and of drafting, in passes over one token."""

PASS_SECONDS = 0.045
"""Seconds of a pass over one token."""

CANDIDATES: dict[str, tuple[Callable[[], Drafter], int | str]] = {
    "ngram": (NGram, "auto"),
    "suffix": (Suffix, "auto"),
    "prompt-lookup": (PromptLookup, "auto"),
    "ngram, 4 tokens": (NGram, 4),
    "ngram, 8 tokens": (NGram, 8),
    "suffix, 8 tokens": (Suffix, 8),
}
"""Drafters, and their draft lengths."""


@dataclass(frozen=True, slots=True)
class Text:
    """A recorded greedy text."""

    kind: str
    prompt: list[int]
    output: list[int]


def recorded(file: Path, prompts: Path | None, max_tokens: int) -> list[Text]:
    """Read the texts of the file; record them first if it does not exist."""
    if not file.exists():
        engine = dp.load(drafter=None, weights="float32")
        tokenizer = engine.tokenizer
        texts = []
        for prompt in read(prompts):
            turn = [{"role": "user", "content": prompt.prompt}]
            tokens = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
            output = engine.generate(list(tokens), temperature=0, max_tokens=max_tokens)
            texts.append({"kind": prompt.kind, "prompt": tokens, "output": output.tokens})
            print(f"recorded {prompt.id}", flush=True)
        file.write_text(json.dumps(texts))
    return [Text(**text) for text in json.loads(file.read_text())]


def pass_cost(width: float) -> float:
    """Interpolate the cost of a pass over this many tokens."""
    below = max(n for n in PASSES if n <= width)
    above = min((n for n in PASSES if n >= width), default=below)
    share = (width - below) / (above - below) if above > below else 0.0
    return PASSES[below] + share * (PASSES[above] - PASSES[below])


def replay(
    text: Text, drafter: Drafter, lengths: DraftLengths, max_tokens: int, busy: float, clock: random.Random
) -> float:
    """Return the modelled speedup over plain decoding, without the time for the prompt."""
    output = text.output[:max_tokens]
    session = Session.start(Request(tuple(text.prompt), SamplingParams(temperature=0.0, seed=0), len(output)))
    cost = 0.0
    while session.room:
        [wanted] = lengths.choose([session])
        rng = Philox(torch.tensor([0]), torch.tensor([len(session.tokens)]))
        draft = drafter.propose([session], [max(0, min(wanted, session.room - 1))], rng)
        drafted, rest = draft.tokens[0].tolist(), output[len(output) - session.room :]
        accepted = next((i for i, (d, r) in enumerate(zip(drafted, rest, strict=False)) if d != r), len(drafted))
        width = len(drafted) + 1
        cost += pass_cost(width) + ROUND + (DRAFT if wanted else 0.0)
        seconds = PASS_SECONDS * (pass_cost(width) + ROUND) * clock.lognormvariate(0, busy)
        lengths.record_time({"score": seconds, "draft": PASS_SECONDS * DRAFT}, [len(drafted)])
        lengths.record_draft(session, len(drafted), accepted)
        session.tokens += rest[: accepted + 1]
    return len(output) * (1 + ROUND) / cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--texts", type=Path, default=Path("texts.json"), help="read from this file, or recorded into it"
    )
    parser.add_argument("--prompts", type=Path, help="prompts to record instead of the package's")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--busy", type=float, default=0.0)
    options = parser.parse_args()
    texts = recorded(options.texts, options.prompts, options.max_tokens)
    for name, (drafter, length) in CANDIDATES.items():
        clock, kinds = random.Random(0), defaultdict(list)
        for text in texts:
            lengths = DraftLengths(length)
            kinds[text.kind].append(replay(text, drafter(), lengths, options.max_tokens, options.busy, clock))
        print(name)
        for kind, speeds in kinds.items():
            print(f"  {kind:<20} {statistics.median(speeds):5.2f}x plain  ({min(speeds):.2f} to {max(speeds):.2f})")
        print(f"  {'geometric mean':<20} {statistics.geometric_mean(map(statistics.median, kinds.values())):5.2f}x")


if __name__ == "__main__":
    main()
