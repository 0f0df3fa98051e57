"""Count and time requests for Prometheus, under the names that vLLM's metrics have."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftproof.engine.request import Stats
from draftproof.engine.service import Service

TTFT_BUCKETS: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
"""Seconds; a prompt takes milliseconds on a GPU, and minutes in a full queue."""

ITL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5)
E2E_BUCKETS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


@dataclass(slots=True)
class Totals:
    """Sums over all requests since the start, for the load feed."""

    emitted: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, prefix: str, model: str, service: Service) -> None:
        self.registry, self.totals = CollectorRegistry(), Totals()
        self._prefix, self._model = prefix, model
        self._gauge("num_requests_running", "Requests that have a place in the KV pool.", lambda: service.running)
        self._gauge("num_requests_waiting", "Requests that wait for a place.", lambda: service.waiting)
        self._gauge("kv_cache_usage_perc", "Share of the KV pool in use, 1 is all of it.", lambda: service.kv_usage)
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds with a draft.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._accepted_at = Counter(
            f"{prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft.",
            ["model_name", "position"],
            registry=self.registry,
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Tokens of prompts that were not read again.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._preemptions = self._counter("num_preemptions", "Times a request gave up its place in the pool.")
        self._success = Counter(
            f"{prefix}:request_success", "Texts that ended.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to the first token.", TTFT_BUCKETS)
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Time between tokens; a round's time is shared by its tokens.", ITL_BUCKETS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Time from request to last token.", E2E_BUCKETS)
        self._queue = self._histogram("request_queue_time_seconds", "Time before a place in the pool.", E2E_BUCKETS)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def record_round(self, before: Stats | None, after: Stats, seconds: float | None, is_first: bool) -> None:
        """Count one round of one request: the counters before and after it, and the time since the chunk before it."""
        old = before or Stats()
        new = after.emitted - old.emitted
        self._drafts.inc(after.drafts - old.drafts)
        self._draft_tokens.inc(after.drafted - old.drafted)
        self._accepted_tokens.inc(after.accepted - old.accepted)
        self._generation_tokens.inc(new)
        earlier = old.accepted_at + [0] * (len(after.accepted_at) - len(old.accepted_at))
        for position, (was, now) in enumerate(zip(earlier, after.accepted_at, strict=True)):
            if now > was:
                self._accepted_at.labels(self._model, str(position)).inc(now - was)
        self.totals.emitted += new
        self.totals.rounds += after.rounds - old.rounds
        self.totals.drafted += after.drafted - old.drafted
        self.totals.accepted += after.accepted - old.accepted
        if seconds is not None and new > 0:
            if is_first:
                self._ttft.observe(seconds)
            else:
                for _ in range(new):
                    self._itl.observe(seconds / new)

    def record_end(self, reason: str, prompt_tokens: int, stats: Stats, seconds: float) -> None:
        """Count a text that ended."""
        self._success.labels(self._model, reason).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(stats.cached_tokens)
        self._preemptions.inc(stats.preemptions)
        self._queue.observe(stats.queue_seconds)
        self._e2e.observe(seconds)

    def _counter(self, name: str, words: str) -> Any:
        counter = Counter(f"{self._prefix}:{name}", words, ["model_name"], registry=self.registry)
        return counter.labels(self._model)

    def _histogram(self, name: str, words: str, buckets: Sequence[float | int]) -> Any:
        made = Histogram(f"{self._prefix}:{name}", words, ["model_name"], registry=self.registry, buckets=buckets)
        return made.labels(self._model)

    def _gauge(self, name: str, words: str, read: Any) -> None:
        gauge = Gauge(f"{self._prefix}:{name}", words, ["model_name"], registry=self.registry)
        gauge.labels(self._model).set_function(read)
