"""Run a random schedule of requests through an engine, with checks of every page after every step."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st

from draftproof.core.sampling import SamplingParams
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NGram
from draftproof.engine.engine import Engine
from draftproof.engine.limits import Limits
from draftproof.engine.request import Session
from draftproof.models.extents import PAGE
from draftproof.models.head.network import FittedHead
from draftproof.models.hf import HFModel
from draftproof.models.hybrid import HybridModel
from draftproof.models.pool import KVPool
from draftproof.models.pooled_slots import PooledSlots
from engine.tiny import V, llama, neighbour
from engine.tiny_heads import IDS, trained
from models.hybrid_families import hybrid

MAX_STEPS = 3000
"""Steps after which a schedule that has not ended counts as starved."""


class FaultyModel(HFModel):
    """A model whose scores are NaN in the rows whose extents start at one of `broken()`.

    That is asked for in every pass: rows move within a round, and a sound one may enter where a broken one was.
    """

    broken: Callable[[], frozenset[int]] = frozenset

    def packed(self, this, keys, values, *, scored, layers=()):
        logits, hidden = super().packed(this, keys, values, scored=scored, layers=layers)
        if (broken := self.broken()) and isinstance(scored, int):
            logits, at = logits.clone(), len(logits) - len(this.tokens)
            for span in this.spans:
                if span.start in broken:
                    logits[max(0, at) : max(0, at + span.width)] = torch.nan
                at += span.width
        return logits, hidden


@cache
def target() -> HFModel:
    return FaultyModel(llama(max_length=512))


class FaultyHybrid(HybridModel):
    """A hybrid with the same fault."""

    broken: Callable[[], frozenset[int]] = frozenset

    def __call__(self, tokens, cache, **options):
        forward = super().__call__(tokens, cache, **options)
        if (broken := self.broken()) and isinstance(cache.slots, PooledSlots):
            forward.logits[[row.extent.start in broken for row in cache.slots._rows]] = torch.nan
        return forward


@cache
def hybrid_target() -> HybridModel:
    return FaultyHybrid(hybrid("lfm2"))


@cache
def draft_model() -> HFModel:
    model = llama.__wrapped__(max_length=512)
    with torch.no_grad():
        model.lm_head.weight.copy_(neighbour().lm_head.weight)  # often accepted, but not always
    return HFModel(model, drafter=True)


@cache
def head() -> FittedHead:
    return FittedHead.on(trained(), torch.tensor(IDS), llama(max_length=512), size=V)


class RaisingDrafter:
    """Passes everything on to a drafter, and raises for some requests: in `propose`, or while a prompt is read."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.bad, self.bad_prompts = inner, set(), set()
        if hasattr(inner, "features"):
            self.features = inner.features

    def propose(self, contexts, k, rng):
        if any(context.id in self.bad for context in contexts):
            raise RuntimeError("no draft for this one")
        return self.inner.propose(contexts, k, rng)


class RaisingCachingDrafter(RaisingDrafter):
    """The same for a drafter with a pool of its own."""

    def kv_bytes(self):
        return self.inner.kv_bytes()

    def open_pool(self, pages):
        self.inner.open_pool(pages)

    def follow(self, context, length):
        if context.id in self.bad_prompts:
            raise RuntimeError("cannot read this prompt")
        return self.inner.follow(context, length)

    def adopt(self, context, holder, length):
        return self.inner.adopt(context, holder, length)

    def suspend(self, request):
        self.inner.suspend(request)

    def rest(self, request):
        self.inner.rest(request)

    def forget(self, requests):
        self.inner.forget(requests)


DRAFTERS = {
    "none": lambda: None,
    "ngram": lambda: RaisingDrafter(NGram()),
    "model": lambda: RaisingCachingDrafter(ModelDrafter(draft_model())),
    "head": lambda: RaisingCachingDrafter(HeadDrafter(head())),
    "head-tree": lambda: RaisingCachingDrafter(HeadDrafter(head(), branches=2)),
}


def drafter_pools(drafter: Any) -> list[KVPool]:
    """Return the drafter's own KV pools."""
    inner = getattr(drafter, "inner", drafter)
    if isinstance(inner, ModelDrafter):
        return [inner._reader.rows.pool]
    return [inner._memory.pool.pool] if isinstance(inner, HeadDrafter) else []


def open_engine(kind: str, *, pages: int | None = None, max_batch: int = 4, drafter: Any = None) -> Engine:
    """Make an engine over the tiny models with a pool of so many pages; None: as many as it likes.

    kind  of drafter, or "hybrid": a target with recurrent layers, and n-grams
    """
    model, named = (hybrid_target(), "ngram") if kind == "hybrid" else (target(), kind)
    drafter = DRAFTERS[named]() if drafter is None else drafter
    own = 2 * drafter.kv_bytes() if hasattr(drafter, "kv_bytes") else 0
    bytes_per_token = sum(shape.bytes for shape in model.kv_shapes()) + own
    memory = 2**26 if pages is None else pages * PAGE * bytes_per_token
    rule = "tree" if kind == "head-tree" else "block"
    limits = Limits(max_batch, kv_memory=memory)
    return Engine(model, None, drafter, rule=rule, num_draft_tokens=3, limits=limits)


# ---------------------------------------------------------------------------------------------------------- requests

_NUMBERS = torch.Generator().manual_seed(11)
BASES = [torch.randint(V, (200,), generator=_NUMBERS).tolist() for _ in range(2)]
"""Texts that prompts begin with, so that they share prefixes."""

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=5),
    SamplingParams(top_p=0.9, frequency_penalty=0.3),
)


@dataclass(frozen=True)
class Wanted:
    """A request of a schedule, and what goes wrong with it."""

    base: int
    shared: int
    tail: tuple[int, ...]
    max_tokens: int
    sampling: int
    seed: int | None
    rule: str | None = None
    num_draft_tokens: int | str | None = None
    drafter: bool = True
    fault: str | None = None

    @property
    def prompt(self) -> list[int]:
        return [*BASES[self.base][: self.shared], *self.tail]

    def prepare(self, engine: Engine) -> Session:
        return engine.prepare(
            self.prompt,
            replace(SAMPLINGS[self.sampling], seed=self.seed),
            max_tokens=self.max_tokens,
            rule=self.rule,
            num_draft_tokens=self.num_draft_tokens,
            drafter=self.drafter,
            allowed=failing_grammar if self.fault == "grammar" else None,
        )


def failing_grammar(output: Sequence[int]) -> torch.Tensor:
    """Allow everything for two tokens, then raise."""
    if len(output) >= 2:
        raise KeyError("no such state")
    return torch.ones(V, dtype=torch.bool)


def requests(kind: str) -> st.SearchStrategy[Wanted]:
    """Return a strategy for requests that this kind of engine serves."""
    rules = [None] if kind == "head-tree" else [None, "token", "coupled", "block"]
    faults = [None] * 8 + ["grammar", "scores"]
    faults += [] if kind == "none" else ["drafter"]
    faults += ["prompt"] if kind in ("model", "head", "head-tree") else []
    return st.builds(
        Wanted,
        base=st.sampled_from([0, 0, 0, 1]),
        shared=st.sampled_from([0, 5, 63, 64, 66, 100, 128, 131, 190]),
        tail=st.lists(st.integers(0, V - 1), min_size=1, max_size=3).map(tuple),
        max_tokens=st.sampled_from([1, 4, 12, 30, 90]),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
        seed=st.one_of(st.integers(0, 50), st.integers(0, 50), st.none()),
        rule=st.sampled_from(rules),
        num_draft_tokens=st.sampled_from([None, None, "auto", 0, 2, 6]),
        drafter=st.sampled_from([True, True, True, False]),
        fault=st.sampled_from(faults),
    )


def growing_requests() -> st.SearchStrategy[Wanted]:
    """Return a strategy for seeded requests that enter with two pages at most and end with three.

    Two of them outgrow a pool of five pages, four of them one of eight: the younger ones are preempted.
    """
    return st.builds(
        Wanted,
        base=st.integers(0, 1),
        shared=st.sampled_from([50, 60, 66]),
        tail=st.lists(st.integers(0, V - 1), min_size=1, max_size=3).map(tuple),
        max_tokens=st.just(90),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
        seed=st.integers(0, 50),
    )


def operations(kind: str, *, crowds: bool = False) -> st.SearchStrategy[list[tuple[str, Any]]]:
    """Return a strategy for schedules: requests, cancellations and steps; with `crowds` also requests that grow."""
    submit = st.tuples(st.just("submit"), requests(kind))
    cancel = st.tuples(st.just("cancel"), st.integers(0, 20))
    steps = st.tuples(st.just("step"), st.integers(1, 12))
    kinds = [submit, submit, steps, cancel]
    if crowds:
        kinds.append(st.tuples(st.just("crowd"), st.lists(growing_requests(), min_size=4, max_size=4)))
    return st.lists(st.one_of(kinds), min_size=6, max_size=16)


# --------------------------------------------------------------------------------------------------------- schedules


@dataclass
class Schedule:
    """An engine under a schedule, and the requests so far. `seen` counts what happened."""

    engine: Engine
    seen: Counter[str] = field(default_factory=Counter)
    submitted: list[tuple[Wanted, Session]] = field(default_factory=list)
    steps: int = 0

    @property
    def scheduler(self) -> Any:
        return self.engine._loop.scheduler

    def submit(self, wanted: Wanted) -> Session:
        session = wanted.prepare(self.engine)
        if wanted.fault == "drafter":
            self.engine.drafter.bad.add(session.id)
        if wanted.fault == "prompt":
            self.engine.drafter.bad_prompts.add(session.id)
        self.submitted.append((wanted, session))
        self.engine._loop.submit([session])
        return session

    def cancel(self, which: int) -> None:
        if self.submitted:
            self.engine._loop.cancel([self.submitted[which % len(self.submitted)][1]])

    def step(self) -> None:
        rows, model = self.scheduler.rows.pool.rows, self.engine.model
        ids = [session.id for wanted, session in self.submitted if wanted.fault == "scores"]
        model.broken = lambda: frozenset(rows[name].extent.start for name in ids if name in rows)
        try:
            self.engine._loop.step()
        finally:
            model.broken = frozenset
        self.steps += 1
        self.check_pages()

    def run(self, operations: Sequence[tuple[str, Any]]) -> "Schedule":
        for operation, argument in operations:
            if operation == "submit":
                self.submit(argument)
            elif operation == "crowd":
                for wanted in argument:
                    self.submit(wanted)
            elif operation == "cancel":
                self.cancel(argument)
            else:
                for _ in range(argument):
                    self.step()
        return self

    def finish(self) -> None:
        """Run until everything has ended, and check that nothing is left."""
        first = self.steps
        while not self.engine._loop.is_idle:
            self.step()
            assert self.steps - first < MAX_STEPS, "a request starves"
        pools = [self.scheduler.rows.pool, *drafter_pools(self.engine.drafter)]
        assert set(pools[0].rows) == set(self.scheduler.prefixes.idle), "pages owned by requests that have ended"
        self.scheduler.clear_prefixes()
        for pool in pools:
            assert not pool.rows
            assert [(run.first, run.pages) for run in pool.extents.free] == [(0, pool.pages)]
        assert not self.scheduler.lengths.auto.records

    def check_pages(self) -> None:
        """Check that every page is free, or owned by one row: a request's in the pool, or an idle prefix's."""
        scheduler = self.scheduler
        pool = scheduler.rows.pool
        present = {session.id for session in (*scheduler.running, *scheduler.reading)}
        idle = set(scheduler.prefixes.idle)
        assert not present & idle
        assert set(pool.rows) == present | idle, "a row in the pool belongs to a request or an idle prefix"
        for each in (pool, *drafter_pools(self.engine.drafter)):
            owned = [page for row in each.rows.values() for page in range(row.extent.first, row.extent.end)]
            free = [page for run in each.extents.free for page in range(run.first, run.end)]
            assert sorted(owned + free) == list(range(each.pages)), "a page is lost or owned twice"
            assert set(each.rows) <= present | idle
        for session in scheduler.running:
            assert pool.rows[session.id].length == len(session.tokens) - 1
        for session in scheduler.reading:
            assert pool.rows[session.id].length == session.read

    def check_texts(self, kind: str) -> None:
        """Compare every seeded text with the same request alone, and every fault with what should have failed."""
        for wanted, session in self.submitted:
            assert session.finish_reason is not None
            self.seen["preempted"] += session.stats.preemptions
            self.seen["cached"] += session.stats.cached_tokens > 0
            self.seen[session.finish_reason] += 1
            if session.finish_reason == "error":
                assert expects_error(wanted), session.error
                self.seen[f"fault: {wanted.fault}"] += 1
                continue
            if wanted.seed is None:
                assert session.finish_reason == "cancelled" or len(session.output) == wanted.max_tokens
                continue
            alone = text_alone(kind, wanted)
            if session.finish_reason == "cancelled":
                assert session.output == alone[: len(session.output)]
            else:
                assert session.output == alone, f"{wanted} differs from itself alone"
                self.seen["compared"] += 1
                self.seen["compared after preemption"] += session.stats.preemptions > 0
                self.seen["compared with a reused prefix"] += session.stats.cached_tokens > 0


def expects_error(wanted: Wanted) -> bool:
    if wanted.fault in ("drafter", "prompt") and not wanted.drafter:
        return False
    return wanted.fault is not None


_ALONE: dict[tuple[str, Wanted], list[int]] = {}


def text_alone(kind: str, wanted: Wanted) -> list[int]:
    """Return the text of a request in a fresh engine that serves nothing else; nothing goes wrong with it there."""
    sound = replace(wanted, fault=None)
    if (kind, sound) not in _ALONE:
        engine = open_engine(kind)
        session = sound.prepare(engine)
        engine._run([session], lambda: True)
        assert session.finish_reason == "length"
        _ALONE[kind, sound] = session.output
    return _ALONE[kind, sound]
