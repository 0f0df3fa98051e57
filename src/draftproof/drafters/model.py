"""Draft with a smaller model, or with the target's first layers (`early_exit`).

The tokens are drawn, and the draft carries exactly the distribution they were drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import AsyncCopy, to_device
from draftproof.core.distribution import DraftVocab
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Draft
from draftproof.drafters.build import Guess, Spine, check_count, check_share, chosen
from draftproof.drafters.interface import Context
from draftproof.drafters.sample import Draws, penalty_history, with_drafted
from draftproof.models.extents import pages_for
from draftproof.models.interface import Model
from draftproof.models.pool import PoolFull, SavedRow
from draftproof.models.rows import PackedModel, PooledRows, Reading, RectangularRows, open_rows

if TYPE_CHECKING:
    from draftproof.drafters.device_draft import DeviceDrafting

ROOM: Final = 32
"""Tokens that a new row has room for after its text; it grows with it."""

UNMANAGED_TOKENS: Final = 2**16
"""Tokens in the pool of a drafter that is used without an engine."""


MOST_UNREAD: Final = 2
"""Tokens of a text that a draft model may have to read in a round that stays on the device."""


class ModelDrafter:
    """Drafter that draws from a model with the target's vocabulary.

    vocab_size   the target's vocabulary size, if one of the two is padded: tokens that the target does not have are
                 never drawn, tokens that the draft model does not have get probability 0
    temperature  the drafter's own temperature for requests that sample; None uses the request's. Any value is exact,
                 because the draft carries the distribution that was used
    confidence   end a draft after the token at which the probability of all its tokens falls below this. That token is
                 still submitted: dropping a drawn token would be a bias
    branches     candidates per node, for rule="tree": the drawn token, from which the draft continues, then the most
                 likely others, which are chosen
    """

    def __init__(
        self,
        model: Model,
        *,
        vocab_size: int | None = None,
        temperature: float | None = None,
        confidence: float = 0.0,
        branches: int = 1,
    ) -> None:
        check_count("branches", branches, 1)
        check_share("confidence", confidence)
        if temperature is not None:
            SamplingParams(temperature=temperature)  # refuses an invalid temperature
        V, R = vocab_size or model.vocab_size, model.vocab_size
        if branches > min(V, R):
            raise ValueError(f"branches={branches}, but drafter and target have only {min(V, R)} tokens in common")
        self._V = V
        self._vocab = DraftVocab.of(torch.arange(R, device=model.device), V) if R < V else None
        self._temperature, self._confidence, self._branches = temperature, confidence, branches
        self._max_length = model.max_length
        self._model = model
        self._reader = Reader(model)

    def kv_bytes(self) -> int:
        """Return the bytes that a token takes in the draft model's pool."""
        packed = isinstance(self._model, PackedModel) and self._model.packing_refusal is None
        return sum(shape.bytes for shape in self._model.kv_shapes()) if packed else 0  # type: ignore[attr-defined]

    def open_pool(self, pages: int) -> None:
        self._reader.open(pages)

    def follow(self, context: Context, length: int) -> bool:
        self._reader.follow(context, self._readable(length))
        return True

    def adopt(self, context: Context, holder: int, length: int) -> bool:
        return self._reader.adopt(context, holder, self._readable(length))

    def suspend(self, request: int) -> None:
        self._reader.suspend(request)

    def rest(self, request: int) -> None:
        self._reader.rest(request)

    def forget(self, requests: Sequence[int]) -> None:
        self._reader.drop(requests)

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] tokens for each row, or k[b] slots of a tree; see `Drafter`."""
        slots = [self._room(context, most) for context, most in zip(contexts, k, strict=True)]
        if not any(slots) or not self._reader.enter(contexts):
            return chosen([Guess([], [])] * len(contexts), rng.seeds.device, tree=self._branches > 1)
        samplings = [self._sampling(context.sampling) for context in contexts]
        histories = [penalty_history(context, rng.seeds.device) for context in contexts]
        logits = self._reader.catch_up(contexts, [most > 0 for most in slots])
        spine = Spine(self._branches, to_device(slots, logits.device))
        draws = Draws(samplings, rng, self._vocab)
        for start in range(0, max(slots), self._branches):
            if start:
                logits = self._reader.step(spine.tokens[-1], [start < most for most in slots])
            # Slicing the logits masks the tokens that the target does not have.
            spine.add(*draws(logits[:, : self._V], with_drafted(histories, samplings, spine.tokens), start))
            if self._confidence and spine.end_after_weak(self._confidence):
                break
        steps = [-(-most // self._branches) - 1 for most in slots]
        self._reader.record_drafted(spine.rows(), [max(0, min(n, len(spine.tokens) - 1)) for n in steps])
        return spine.draft(shared_rng=rng.shared)

    def device_drafting(self, rows: int) -> "DeviceDrafting | str":
        """Return this drafter's part of rounds that stay on the device, or why it has none."""
        from draftproof.models.device_rows import DeviceRows

        held = self._reader.rows
        if not isinstance(held, DeviceRows):
            return "the draft model's rows are not in a pool on a GPU"
        if self._branches > 1:
            return "a drafter with branches makes trees"
        from draftproof.drafters.device_draft import DeviceDrafting

        sizes = self._model.vocab_size, self._V
        return DeviceDrafting(rows, held, lambda: self._reader.rows, sizes, self._vocab, self._confidence)

    def device_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return how tokens are drawn for a request."""
        return self._sampling(sampling)

    def device_places(self, contexts: Sequence[Context], tokens: Sequence[int]) -> list[tuple[int, int]] | None:
        """Bring rows up to date; return each one's first slot, and how many tokens (1 or 2) it has still to read.

        tokens  those that each row needs room for. None if there is no room, or if the model has too few positions
        """
        if self._max_length is not None and max(tokens) > self._max_length:
            return None
        return self._reader.places(contexts, tokens)

    def device_fits(self, request: int, tokens: int) -> bool:
        """Return whether a request's row has room for so many tokens where it is."""
        return self._reader.fits(request, tokens)

    def device_recorded(self, request: int, read: int) -> None:
        """Note that of a request's text the first `read` tokens were read."""
        self._reader.record_read(request, read)

    def _readable(self, length: int) -> int:
        """Limit a prefix to the positions that the model has: a target's context may be longer."""
        return length if self._max_length is None else min(length, self._max_length)

    def truncate(self, request: int, length: int) -> None:
        """Forget what was read of a request after its first `length` tokens: the others have changed.

        A context of the engine only grows. One that is encoded again in another vocabulary may end differently.
        """
        self._reader.truncate(request, length)

    def _room(self, context: Context, most: int) -> int:
        """Limit the slots to the positions that the model has left; an empty text gets none."""
        if not context.tokens:
            return 0
        return most if self._max_length is None else max(0, min(most, self._max_length - len(context.tokens)))

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        if self._temperature is None or sampling.temperature == 0:
            return sampling
        return replace(sampling, temperature=self._temperature)


@runtime_checkable
class Layered(Protocol):
    """A model that can be cut after a layer."""

    def first_layers(self, count: int) -> Model: ...


def early_exit(target: Model, layers: int, *, confidence: float = 0.0, branches: int = 1) -> ModelDrafter:
    """Make a drafter from the target's first `layers` layers."""
    if not isinstance(target, Layered):
        raise ValueError(
            f"early-exit:{layers} needs a target with layers to leave early (first_layers), and a "
            f"{type(target).__name__} has none: use another drafter"
        )
    return ModelDrafter(
        target.first_layers(layers), vocab_size=target.vocab_size, confidence=confidence, branches=branches
    )


class Reader:
    """The draft model's rows, one for each request.

    Until a pool is opened by an engine, rows of requests that are not among the contexts are dropped.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._rows: PooledRows | RectangularRows | None = None
        self._is_managed = False
        self._known: dict[int, Row] = {}
        self._saved: dict[int, SavedRow] = {}
        self._names: list[int] = []
        self._pending: tuple[AsyncCopy, Sequence[int]] | None = None
        self._to_read: list[Reading] = []
        """Chunks of prompts that are read before anything else, all in one pass."""

    def open(self, pages: int) -> None:
        """Allocate a pool; from then on rows stay until they are dropped."""
        self._rows, self._is_managed = open_rows(self._model, pages), True
        self._known.clear()
        self._saved.clear()
        self._to_read.clear()
        self._pending = None

    @property
    def rows(self) -> "PooledRows | RectangularRows":
        if self._rows is None:
            self._rows = open_rows(self._model, pages_for(UNMANAGED_TOKENS))
        return self._rows

    def catch_up(self, contexts: Sequence[Context], wanted: Sequence[bool]) -> Float[Tensor, "B R"]:
        """Read the contexts' new tokens and return the logits after each last one; unwanted rows are undefined."""
        self._settle()
        self._names = [context.id for context in contexts]
        rows = [self._known[name] for name in self._names]
        known = [row.common_prefix(context.tokens) for row, context in zip(rows, contexts, strict=True)]
        self.rows.truncate(self._names, known)
        rest = [self._valid(c.tokens[n:]) if want else [] for c, n, want in zip(contexts, known, wanted, strict=True)]
        for row, n, tokens in zip(rows, known, rest, strict=True):
            row.read, row.drafted = n + len(tokens), []
        return self.rows.read_on(self._names, rest)

    def enter(self, contexts: Sequence[Context]) -> bool:
        """Give every context a row; return False if the pool has no room for one of them."""
        self._settle()
        if not self._is_managed:
            names = {context.id for context in contexts}
            self.drop([name for name in self._known if name not in names])
        try:
            for context in contexts:
                self._enter(context)
        except PoolFull:
            return False
        return True

    def step(self, tokens: Int[Tensor, " B"], wanted: Sequence[bool]) -> Float[Tensor, "B R"]:
        """Read one more drafted token per row and return the logits after it; unwanted rows do not keep theirs."""
        return self.rows.step(self._names, tokens, wanted)

    def truncate(self, request: int, length: int) -> None:
        """Forget a request's tokens after the first `length`; see `ModelDrafter.truncate`."""
        self._settle()
        row = self._known.get(request)
        if row is not None and length < row.read:
            row.read, row.drafted = length, []

    def record_drafted(self, drawn: AsyncCopy, kept: Sequence[int]) -> None:
        """Record the drawn tokens, of which the cache holds the first kept[b].

        The copy is read when the next round begins, so that no step needs a synchronisation.
        """
        self._pending = drawn, kept

    def places(self, contexts: Sequence[Context], tokens: Sequence[int]) -> list[tuple[int, int]] | None:
        """Bring rows up to date, and say where they are; see `ModelDrafter.device_places`."""
        if not self.enter(contexts):
            return None
        rows: Any = self.rows
        for context in contexts:
            row, length = self._known[context.id], len(context.tokens)
            row.read, row.drafted = row.common_prefix(context.tokens), []
            rows.truncate([context.id], [row.read])
            if length - row.read > MOST_UNREAD:
                self.follow(context, length - 1)
        self._settle()
        try:
            for context, most in zip(contexts, tokens, strict=True):
                rows.ensure(context.id, most)
        except PoolFull:
            return None
        return [(rows.start(c.id), len(c.tokens) - self._known[c.id].read) for c in contexts]

    def fits(self, name: int, tokens: int) -> bool:
        rows: Any = self.rows
        return name in self._known and bool(rows.fits(name, tokens))

    def record_read(self, name: int, read: int) -> None:
        """Note how much of a request's text its row holds after a round that the host did not follow."""
        row = self._known.get(name)
        if row is not None and isinstance(self.rows, PooledRows):
            row.read, row.drafted = read, []
            self.rows.pool.rows[name].length = read

    def follow(self, context: Context, length: int) -> None:
        """Read a prompt's tokens up to this length, in chunks as the target does, with the prompts of other rows."""
        if not isinstance(self.rows, PooledRows):
            return  # a rectangular cache reads new rows together, in one pass
        self._receive_drafted()
        try:
            self._enter(context)
        except PoolFull:
            return
        row = self._known[context.id]
        if row.read < length:
            self._to_read.append(Reading(context.id, self._valid(context.tokens[row.read : length])))
            row.read = length

    def adopt(self, context: Context, holder: int, length: int) -> bool:
        """Take over a prefix that another request's row holds."""
        self._settle()
        held = self._known.get(holder)
        if held is None or held.read < length or not isinstance(self.rows, PooledRows) or holder in self._saved:
            return False
        try:
            self._enter(context)
        except PoolFull:
            return False
        self.rows.pool.share(holder, context.id, length)
        self._known[context.id].read = length
        return True

    def suspend(self, name: int) -> None:
        """Copy a row out of the pool until its request is back."""
        self._settle()
        if name in self._known and name not in self._saved and isinstance(self.rows, PooledRows):
            self._saved[name] = self.rows.save(name)

    def rest(self, name: int) -> None:
        """Free the room after a row's text; drafted tokens are dropped."""
        self._settle()
        row = self._known.get(name)
        if row is not None and name not in self._saved and isinstance(self.rows, PooledRows):
            row.drafted = []
            self.rows.truncate([name], [min(row.read, self.rows.length(name))])
            self.rows.pool.trim(name)

    def drop(self, names: Sequence[int]) -> None:
        """Forget the rows of these requests."""
        self._settle()
        for name in names:
            if self._known.pop(name, None) is not None and self._saved.pop(name, None) is None:
                self.rows.leave(name)

    def _enter(self, context: Context) -> None:
        if context.id in self._saved and isinstance(self.rows, PooledRows):
            self.rows.restore(context.id, self._saved[context.id])
            del self._saved[context.id]
        if context.id not in self._known:
            self.rows.enter(context.id, len(context.tokens) + ROOM)
            self._known[context.id] = Row()

    def _settle(self) -> None:
        """Bring the rows up to date: with what was drafted, and with the chunks of prompts that are to be read."""
        self._receive_drafted()
        rows = self._rows
        if not self._to_read or not isinstance(rows, PooledRows):
            return
        chunks, self._to_read = self._to_read, []
        try:
            rows.score([], reading=chunks)
        except Exception:
            for chunk in chunks:  # they hold what they held before, and read the rest when they draft
                self._known[chunk.row].read = rows.length(chunk.row)
            raise

    def _receive_drafted(self) -> None:
        if self._pending is None:
            return
        drawn, kept = self._pending
        for name, tokens, n in zip(self._names, drawn.read().tolist(), kept, strict=True):
            if name in self._known:
                self._known[name].drafted = tokens[:n]
        self._pending = None

    def _valid(self, tokens: Sequence[int]) -> list[int]:
        """Replace tokens that the draft model does not have by 0, which only worsens the guess."""
        R = self._model.vocab_size
        return [token if token < R else 0 for token in tokens]


@dataclass(slots=True)
class Row:
    """Tokens of one request in the cache: the first `read` of its context, then drafted ones that may be rejected."""

    read: int = 0
    drafted: list[int] = field(default_factory=list)

    def common_prefix(self, tokens: Sequence[int]) -> int:
        """Count the cached tokens that agree with the context, without its last token, whose logits are needed."""
        most = max(len(tokens) - 1, 0)
        n = min(self.read, most)
        for token in self.drafted[: most - n]:
            if token != tokens[n]:
                break
            n += 1
        return n
