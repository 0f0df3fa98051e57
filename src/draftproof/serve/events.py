"""Feed the page with the server's load: one sample a second."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Final

from draftproof.serve.metrics import Totals
from draftproof.serve.state import State
from draftproof.serve.streaming import event

PERIOD: Final = 1.0
"""Seconds between two samples."""

STEP: Final = 0.1
"""Seconds after which a feed notices that the server shuts down."""


async def load_samples(state: State, period: float = PERIOD) -> AsyncGenerator[str, None]:
    """Yield a sample of the load as an event about once a second, until the server shuts down."""
    before, at = replace(state.metrics.totals), time.perf_counter()
    yield event(sample(state, before, before, 0.0))
    while not state.draining:
        waited = 0.0
        while waited < period and not state.draining:
            await asyncio.sleep(min(STEP, period))
            waited = time.perf_counter() - at
        now = replace(state.metrics.totals)
        yield event(sample(state, before, now, waited))
        before, at = now, time.perf_counter()


def sample(state: State, before: Totals, now: Totals, seconds: float) -> dict[str, Any]:
    """Return the load: what runs and waits now, and the rates since the last sample; None where nothing happened."""
    drafted, rounds = now.drafted - before.drafted, now.rounds - before.rounds
    emitted = now.emitted - before.emitted
    return {
        "running": state.service.running,
        "waiting": state.service.waiting,
        "kv": state.service.kv_usage,
        "tokens_per_second": emitted / seconds if seconds else 0.0,
        "acceptance": (now.accepted - before.accepted) / drafted if drafted else None,
        "tokens_per_pass": emitted / rounds if rounds else None,
    }
