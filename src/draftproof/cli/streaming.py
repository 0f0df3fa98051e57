"""One prompt answered: the text as it comes, then how it went."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from draftproof.cli.main import INTERRUPTED
from draftproof.cli.waiting import waiting
from draftproof.engine.engine import Engine
from draftproof.engine.request import Stats


@dataclass(slots=True)
class Answer:
    """What has come so far, and when. Whole or cut short, it can be shown."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"
    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0
    first_token: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "stats": {
                **stats_dict(self.stats),
                "wall_seconds": self.seconds,
                "first_token_seconds": self.first_token,
                "tokens_per_second": self.tokens_per_second,
            },
        }


def stats_dict(stats: Stats) -> dict[str, Any]:
    return {
        "rounds": stats.rounds,
        "drafts": stats.drafts,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "emitted": stats.emitted,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "tokens_per_pass": stats.tokens_per_pass,
        "acceptance_by_position": stats.rates_by_position,
        "seconds": stats.seconds,
    }


def streamed(engine: Engine, prompt: Any, options: dict[str, Any], into: Answer) -> Iterator[str]:
    """A piece of text a round, also an empty one; `into` is filled meanwhile, so an interrupt finds all there is."""
    start = time.perf_counter()
    for chunk in engine.stream(prompt, **options):
        into.seconds = time.perf_counter() - start
        into.first_token = into.seconds if into.first_token is None else into.first_token
        into.text += chunk.text
        into.tokens += chunk.tokens
        into.stats = chunk.stats
        into.finish_reason = chunk.finish_reason or into.finish_reason
        yield chunk.text


def answer(engine: Engine, prompt: str, options: dict[str, Any], *, stats: bool, as_json: bool) -> int:
    """Say it on stdout; the status to leave with."""
    made = Answer()
    status = 0
    try:
        if options["num_beams"] > 1:
            _searched(engine, prompt, options, made)
            if not as_json:
                sys.stdout.write(made.text)
        else:
            del options["num_beams"]
            with _quietly_if(as_json):
                for piece in streamed(engine, prompt, options, made):
                    if not as_json:
                        sys.stdout.write(piece)
                        sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.stdout.write(json.dumps(made.as_dict(), ensure_ascii=False) + "\n" if as_json else "\n")
    sys.stdout.flush()
    if stats:
        print(in_words(made), file=sys.stderr)
    return status


@contextmanager
def _quietly_if(as_json: bool) -> Iterator[None]:
    """Where no text shows that something happens, say so."""
    if not as_json:
        yield
        return
    with waiting("Generating"):
        yield


def _searched(engine: Engine, prompt: str, options: dict[str, Any], into: Answer) -> None:
    start = time.perf_counter()
    with waiting(f"Searching with {options['num_beams']} beams"):
        output = engine.generate(prompt, **options)
    assert not isinstance(output, list)
    into.text, into.tokens, into.finish_reason = output.text, output.tokens, output.finish_reason
    into.stats, into.seconds = output.stats, time.perf_counter() - start


def in_words(made: Answer) -> str:
    """Speed, first token, and what came of the drafts, in one line."""
    parts = [f"{len(made.tokens)} tokens in {made.seconds:.1f} s ({made.tokens_per_second:.1f} a second)"]
    if made.first_token is not None:
        parts.append(f"first after {made.first_token:.2f} s")
    stats = made.stats
    if stats.drafted:
        kept = f"kept {stats.accepted} of {stats.drafted} drafted ({stats.acceptance_rate:.0%})"
        parts += [kept, f"mean acceptance length {stats.mean_acceptance_length:.2f}"]
    if stats.rounds:
        parts.append(f"{stats.tokens_per_pass:.2f} tokens a pass")
    return " · ".join(parts)
