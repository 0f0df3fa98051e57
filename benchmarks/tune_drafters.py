"""Drafters and pace without the model: what they would have saved on greedy texts that were recorded once.

    python benchmarks/tune_drafters.py [--texts texts.json] [--prompts mine.jsonl] [--max-tokens 96] [--busy 0.2]

A greedy text does not depend on the drafter. So it is recorded once, with plain decoding, and drafters are replayed
over it in seconds: which guesses stand is known, what passes cost is assumed (PASSES). The figures are modelled, but
they are the same on every machine and however busy it is; `benchmarks/engine_cpu.py` measures. `--busy` disturbs the
clock that the pace sees, by that much in either direction.
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
from draftproof.engine.draft_length import AutoLength, DraftLengthPolicy, FixedLength
from draftproof.engine.request import Request, Session

PASSES = {1: 1.0, 2: 1.02, 3: 1.03, 5: 1.06, 8: 1.13, 13: 1.32, 17: 1.45}
"""What a pass over n tokens costs in passes over one: packed weights, two cores."""

ROUND, DRAFT = 0.03, 0.004
"""What a round costs outside the model, and drafting in it."""

PASS_SECONDS = 0.045

CONTENDERS: dict[str, tuple[Callable[[], Drafter], Callable[[], DraftLengthPolicy]]] = {
    "ngram": (NGram, AutoLength),
    "suffix": (Suffix, AutoLength),
    "prompt-lookup": (PromptLookup, AutoLength),
    "ngram, 4 tokens": (NGram, lambda: FixedLength(4)),
    "ngram, 8 tokens": (NGram, lambda: FixedLength(8)),
    "suffix, 8 tokens": (Suffix, lambda: FixedLength(8)),
}


@dataclass(frozen=True, slots=True)
class Text:
    kind: str
    prompt: list[int]
    output: list[int]


def recorded(file: Path, prompts: Path | None, max_tokens: int) -> list[Text]:
    """The texts of the file, which is made if there is none."""
    if not file.exists():
        engine = dp.load(drafter=None)
        words = engine.tokenizer
        texts = []
        for prompt in read(prompts):
            turn = [{"role": "user", "content": prompt.prompt}]
            tokens = words.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
            output = engine.generate(list(tokens), temperature=0, max_tokens=max_tokens)
            texts.append({"kind": prompt.kind, "prompt": tokens, "output": output.tokens})
            print(f"recorded {prompt.id}", flush=True)
        file.write_text(json.dumps(texts))
    return [Text(**text) for text in json.loads(file.read_text())]


def pass_cost(width: int) -> float:
    below = max(n for n in PASSES if n <= width)
    above = min((n for n in PASSES if n >= width), default=below)
    share = (width - below) / (above - below) if above > below else 0.0
    return PASSES[below] + share * (PASSES[above] - PASSES[below])


def replay(
    text: Text, drafter: Drafter, pace: DraftLengthPolicy, max_tokens: int, busy: float, clock: random.Random
) -> float:
    """How many times faster than plain decoding, the prompt not counted."""
    output = text.output[:max_tokens]
    session = Session.start(Request(tuple(text.prompt), SamplingParams(temperature=0.0, seed=0), len(output)))
    cost = 0.0
    while session.room:
        [asked] = pace.lengths([session])
        rng = Philox(torch.tensor([0]), torch.tensor([len(session.tokens)]))
        draft = drafter.propose([session], [max(0, min(asked, session.room - 1))], rng)
        guess, rest = draft.tokens[0].tolist(), output[len(output) - session.room :]
        stood = next((i for i, (g, r) in enumerate(zip(guess, rest, strict=False)) if g != r), len(guess))
        width = len(guess) + 1
        cost += pass_cost(width) + ROUND + (DRAFT if asked else 0.0)
        seconds = PASS_SECONDS * (pass_cost(width) + ROUND) * clock.lognormvariate(0, busy)
        pace.timed({"score": seconds, "draft": PASS_SECONDS * DRAFT}, width, len(guess))
        pace.observe(session, len(guess), stood)
        session.tokens += rest[: stood + 1]
    return len(output) * (1 + ROUND) / cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=Path, default=Path("texts.json"), help="recorded there, or read from there")
    parser.add_argument("--prompts", type=Path, help="prompts to record instead of our own")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--busy", type=float, default=0.0)
    options = parser.parse_args()
    texts = recorded(options.texts, options.prompts, options.max_tokens)
    for name, (drafter, pace) in CONTENDERS.items():
        clock, kinds = random.Random(0), defaultdict(list)
        for text in texts:
            kinds[text.kind].append(replay(text, drafter(), pace(), options.max_tokens, options.busy, clock))
        print(name)
        for kind, speeds in kinds.items():
            print(f"  {kind:<20} {statistics.median(speeds):5.2f}x plain  ({min(speeds):.2f} to {max(speeds):.2f})")
        print(f"  {'geometric mean':<20} {statistics.geometric_mean(map(statistics.median, kinds.values())):5.2f}x")


if __name__ == "__main__":
    main()
