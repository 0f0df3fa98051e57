"""Rows that come and go: the cached texts of one model, scored together in every round.

`PooledRows` packs the tokens of all rows into one pass over a KV pool. `RectangularRows` serves models that cannot be
packed: it pads rows to one width, and copies its cache when rows enter or leave. Rows of hybrid models are rectangular,
and keep keys and values in a pool (hybrid_rows.py).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu, to_device
from draftproof.models.extents import PAGE
from draftproof.models.interface import Cache, Forward, Model
from draftproof.models.packed import PackedPass, Span
from draftproof.models.pool import KVPool, LayerShape, SavedRow
from draftproof.models.prompt_chunks import chunk_around, reading_cost


class Block(NamedTuple):
    """Rows to score: each row's tokens after its cached ones, padded on the right.

    widths   tokens of each row that count; None if only a GPU knows them, and all are computed
    parents  for trees: tokens[:, 0] is the root, and parents[:, i] the parent of slot i (-1: the root)
    """

    rows: Sequence[int]
    tokens: Int[Tensor, "b T"]
    widths: Sequence[int] | None = None
    parents: Int[Tensor, "b K"] | None = None


class Group(NamedTuple):
    """The scores of rows of a block that have one width. `members` says which of its rows they are."""

    members: list[int]
    forward: Forward


class Reading(NamedTuple):
    """Tokens that a row reads and keeps; `scored` asks for the logits after each of them."""

    row: int
    tokens: Sequence[int]
    scored: bool = False


class Read(NamedTuple):
    """The target's states, and logits if asked for, at the tokens that a row read."""

    hidden: tuple[Float[Tensor, "n H"], ...]
    logits: Float[Tensor, "n V"] | None


class Scores(NamedTuple):
    """The groups of every block, and what was read, in the order of the request."""

    groups: list[list[Group]]
    read: list[Read]


@runtime_checkable
class Rows(Protocol):
    """The cached texts of a model, by name. What not all kinds of rows can do is said by three properties."""

    @property
    def pool(self) -> KVPool | None:
        """Return the pool of keys and values, whose pages may run out; None: memory grows as rows are written to."""

    @property
    def chunk(self) -> int | None:
        """Return how many tokens of a prompt are read at a time at most, beside rows that decode.

        None: a prompt is read as a whole, before the round in which its row decodes.
        """

    @property
    def shares_prefixes(self) -> bool:
        """Return whether a row can take over the first tokens of another one."""

    def chunk_around(self, position: int) -> tuple[int, int]:
        """Return where the chunk of a prompt that holds this position begins, and where the next one does."""

    def reading_cost(self, start: int, end: int) -> float:
        """Return how long reading a prompt's tokens from start to end takes: as long as so many first tokens."""

    def enter(self, row: int, tokens: int, source: Sequence[int] | None = None) -> None:
        """Add an empty row with room for this many tokens; `source` is an encoder's input."""

    def leave(self, row: int) -> None:
        """Remove a row."""

    def ensure(self, row: int, tokens: int) -> None:
        """Make room for this many tokens in a row."""

    def save(self, row: int) -> Any:
        """Take a row out, and return a copy of it."""

    def restore(self, row: int, saved: Any) -> None:
        """Bring back a row that was saved."""

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Shorten rows to these lengths."""

    def score(self, blocks: Sequence[Block], *, layers: Sequence[int] = (), reading: Sequence[Reading] = ()) -> Scores:
        """Score the blocks' tokens, which are not kept yet, and read the tokens of `reading`, which are."""

    def keep(self, rows: Sequence[int], counts: Sequence[int], path: Int[Tensor, "b K"] | None = None) -> None:
        """Lengthen rows by so many tokens of the last pass; after a tree these are the root and the path's slots."""

    def read_on(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Float[Tensor, "b V"]:
        """Read and keep these tokens; return the logits after each row's last (undefined where there are none)."""

    def step(self, rows: Sequence[int], tokens: Int[Tensor, " b"], wanted: Sequence[bool]) -> Float[Tensor, "b V"]:
        """Read and keep one token in each wanted row; return the logits after it (undefined in the other rows)."""


@runtime_checkable
class PackedModel(Protocol):
    """A model whose passes can be packed."""

    @property
    def packing_refusal(self) -> str | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def kv_shapes(self) -> tuple[LayerShape, ...]: ...

    def packed_pass(self, tokens: Int[Tensor, " N"], spans: Sequence[Span]) -> PackedPass: ...

    def packed(
        self,
        this: PackedPass,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        scored: int | Int[Tensor, " J"],
        layers: Sequence[int] = (),
    ) -> tuple[Float[Tensor, "J V"], tuple[Float[Tensor, "N H"], ...]]: ...


@runtime_checkable
class ModelWithRows(Protocol):
    """A model that brings rows of its own."""

    @property
    def pool_refusal(self) -> str | None:
        """Return why its keys and values are not in a pool; None if they are."""

    def kv_shapes(self) -> tuple[LayerShape, ...]: ...

    def open_rows(self, pages: int) -> "RectangularRows": ...


def pooled_shapes(model: object) -> tuple[LayerShape, ...]:
    """Return the sizes of the keys and values that a model keeps in a pool; none if it uses no pool."""
    if isinstance(model, PackedModel):
        return model.kv_shapes() if model.packing_refusal is None else ()
    return model.kv_shapes() if isinstance(model, ModelWithRows) and model.pool_refusal is None else ()


def open_rows(model: Model, pages: int) -> "PooledRows | RectangularRows":
    """Return the rows of a model: over a pool of so many pages if it can use one."""
    if isinstance(model, PackedModel) and model.packing_refusal is None:
        if is_cpu(model.device):
            return PooledRows(model, pages)
        from draftproof.models.device_rows import DeviceRows

        return DeviceRows(model, pages)
    return model.open_rows(pages) if isinstance(model, ModelWithRows) else RectangularRows(model)


class PooledRows:
    """Rows over a KV pool, scored in packed passes."""

    chunk: int | None = PAGE
    shares_prefixes = True

    def __init__(self, model: PackedModel, pages: int, spare: int = 0) -> None:
        self._model = model
        self.pool = KVPool(model.kv_shapes(), pages, model.device, spare)

    def length(self, row: int) -> int:
        return self.pool.rows[row].length

    def chunk_around(self, position: int) -> tuple[int, int]:
        return chunk_around(position)

    def reading_cost(self, start: int, end: int) -> float:
        return reading_cost(start, end)

    def enter(self, row: int, tokens: int, source: Sequence[int] | None = None) -> None:
        self.pool.enter(row, tokens)

    def leave(self, row: int) -> None:
        self.pool.leave(row)

    def ensure(self, row: int, tokens: int) -> None:
        self.pool.ensure(row, tokens)

    def save(self, row: int) -> SavedRow:
        return self.pool.save(row)

    def restore(self, row: int, saved: SavedRow) -> None:
        self.pool.restore(row, saved)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            here = self.pool.rows[row]
            if length > here.length:
                raise ValueError(f"row {row} holds {here.length} tokens and cannot be shortened to {length}")
            here.length = length

    def score(self, blocks: Sequence[Block], *, layers: Sequence[int] = (), reading: Sequence[Reading] = ()) -> Scores:
        """Score and read in one pass; rows of a block that have one width lie side by side and make a group."""
        order = sorted((i for i, each in enumerate(reading) if len(each.tokens)), key=lambda i: reading[i].scored)
        spans = self._reading_spans([reading[i] for i in order])
        tokens = [to_device(list(reading[i].tokens), self._model.device) for i in order]
        unscored = sum(len(reading[i].tokens) for i in order if not reading[i].scored)
        plans = [_by_width(block) for block in blocks]
        for block, plan in zip(blocks, plans, strict=True):
            for width, index in plan:
                parents = None if block.parents is None else block.parents[:, : width - 1]
                spans += [self._span(block.rows[b], width, None if parents is None else parents[b]) for b in index]
                every = len(index) == len(block.tokens)  # on a GPU indexing by a list is a sync
                tokens.append((block.tokens if every else block.tokens[index])[:, :width].flatten())
        if not tokens:
            return Scores([[] for _ in blocks], [Read((), None) for _ in reading])
        packed = self._model.packed_pass(torch.cat(tokens), spans)
        N = len(packed.tokens)
        logits, hidden = self._model.packed(
            packed, self.pool.keys, self.pool.values, scored=max(1, N - unscored), layers=layers
        )
        read = [Read((), None) for _ in reading]
        at = 0
        for i in order:
            stop = at + len(reading[i].tokens)
            scores = logits[at - unscored : stop - unscored] if reading[i].scored else None
            read[i] = Read(tuple(states[at:stop] for states in hidden), scores)
            self.pool.rows[reading[i].row].length += stop - at
            at = stop
        groups = []
        for plan in plans:
            made = []
            for width, index in plan:
                stop, shape = at + width * len(index), (len(index), width, -1)
                states = tuple(each[at:stop].view(shape) for each in hidden)
                made.append(Group(index, Forward(logits[at - unscored : stop - unscored].view(shape), states)))
                at = stop
            groups.append(made)
        return Scores(groups, read)

    def _reading_spans(self, reading: Sequence[Reading]) -> list[Span]:
        """Return the spans of what is read; a row's chunks follow each other, also within one pass."""
        most: dict[int, int] = {}
        for each in reading:
            most[each.row] = most.get(each.row, self.length(each.row)) + len(each.tokens)
        for row, tokens in most.items():
            self.pool.ensure(row, tokens)  # before the first span: a row must not move between its chunks
        spans, at = [], {row: self.length(row) for row in most}
        for each in reading:
            spans.append(Span(self.pool.rows[each.row].extent.start, at[each.row], len(each.tokens)))
            at[each.row] += len(each.tokens)
        return spans

    def _span(self, row: int, width: int, parents: Int[Tensor, " K"] | None = None) -> Span:
        here = self.pool.rows[row]
        if here.length + width > here.extent.slots:
            self.pool.ensure(row, here.length + width)
        return Span(here.extent.start, here.length, width, parents)

    def keep(self, rows: Sequence[int], counts: Sequence[int], path: Int[Tensor, "b K"] | None = None) -> None:
        paths = None if path is None else path.tolist()
        for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if paths is not None and count > 1:
                self.pool.move_path(row, paths[b][: count - 1])
            self.pool.rows[row].length += count

    def read_on(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Float[Tensor, "b V"]:
        read = [(row, text) for row, text in zip(rows, texts, strict=True) if text]
        if not read:
            return torch.zeros((len(rows), self._model.vocab_size))
        spans = [self._span(row, len(text)) for row, text in read]
        packed = self._model.packed_pass(torch.tensor([token for _, text in read for token in text]), spans)
        last = torch.tensor([len(text) for _, text in read]).cumsum(0) - 1
        scored: int | Tensor = len(read) if int(last[0]) == 0 and len(read) == len(packed.tokens) else last
        logits, _ = self._model.packed(packed, self.pool.keys, self.pool.values, scored=scored)
        for row, text in read:
            self.pool.rows[row].length += len(text)
        if len(read) == len(rows):
            return logits
        every = logits.new_zeros((len(rows), logits.shape[-1]))
        every[torch.tensor([bool(text) for text in texts])] = logits
        return every

    def step(self, rows: Sequence[int], tokens: Int[Tensor, " b"], wanted: Sequence[bool]) -> Float[Tensor, "b V"]:
        each = zip(tokens.tolist(), wanted, strict=True)
        return self.read_on(rows, [[token] if want else [] for token, want in each])


def _by_width(block: Block) -> list[tuple[int, list[int]]]:
    """Return the widths that occur in a block, and the rows of each."""
    widths = block.widths if block.widths is not None else [block.tokens.shape[1]] * len(block.rows)
    return [(width, [b for b, own in enumerate(widths) if own == width]) for width in sorted(set(widths))]


class RectangularRows:
    """Rows in one rectangular cache, which is copied when rows enter or leave."""

    pool: KVPool | None = None
    chunk: int | None = None
    shares_prefixes = False

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cache: Cache | None = None
        self._rows: list[int] = []
        self._entering: dict[int, Sequence[int] | None] = {}
        self._left: set[int] = set()

    def chunk_around(self, position: int) -> tuple[int, int]:
        return 0, WHOLE

    def reading_cost(self, start: int, end: int) -> float:
        return end - start

    def enter(self, row: int, tokens: int, source: Sequence[int] | None = None) -> None:
        self._entering[row] = source

    def leave(self, row: int) -> None:
        if self._entering.pop(row, self) is self:
            self._left.add(row)  # removed before the next pass, so that rows that leave together are copied once

    def ensure(self, row: int, tokens: int) -> None:
        """Do nothing: a slot cache grows when it is written to."""

    def save(self, row: int) -> Any:
        cache = self._settled()
        assert cache is not None
        saved = cache.take([self._rows.index(row)])
        self._left.add(row)
        self._settled()  # at once: it may be back before the next pass
        return saved

    def restore(self, row: int, saved: Any) -> None:
        cache = self._settled()
        self._cache = saved if cache is None else cache.join(saved)
        self._rows.append(row)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        cache = self._settled()
        wanted = {row: length for row, length in zip(rows, lengths, strict=True) if row not in self._entering}
        if cache is None or not wanted:
            return
        if list(wanted) == self._rows:
            cache.lengths = torch.tensor(list(wanted.values()))  # caches keep their lengths on the CPU
            return
        device = cache.lengths.device
        index = to_device([self._rows.index(row) for row in wanted], device)
        cache.lengths = cache.lengths.index_copy(0, index, to_device(list(wanted.values()), device))

    def score(self, blocks: Sequence[Block], *, layers: Sequence[int] = (), reading: Sequence[Reading] = ()) -> Scores:
        cache = self._settled()
        forward = self._pass(cache, blocks, layers) if blocks and cache is not None else None
        groups = []
        for block in blocks:
            assert forward is not None
            index = [self._rows.index(row) for row in block.rows]
            T = block.tokens.shape[1]
            groups.append([Group(list(range(len(index))), _rows_of(forward, index, T, len(self._rows)))])
        return Scores(groups, self._read(reading, layers))

    def _pass(self, cache: Cache, blocks: Sequence[Block], layers: Sequence[int]) -> Forward:
        """Score all rows in one rectangle; a row in none of the blocks scores padding, which is not kept."""
        if len(blocks) == 1 and list(blocks[0].rows) == self._rows:
            return self._model(blocks[0].tokens, cache, parents=blocks[0].parents, layers=layers)
        T = max(block.tokens.shape[1] for block in blocks)
        tokens = torch.zeros((len(self._rows), T), dtype=torch.long, device=self._model.device)
        trees = any(block.parents is not None for block in blocks)
        chain = torch.arange(-1, T - 2 + 1, device=tokens.device)[: T - 1]
        parents = chain.expand(len(self._rows), T - 1).clone() if trees else None
        for block in blocks:
            index = to_device([self._rows.index(row) for row in block.rows], tokens.device)
            width = block.tokens.shape[1]
            tokens[index[:, None], torch.arange(width, device=tokens.device)] = block.tokens
            if parents is not None and block.parents is not None:
                parents[index[:, None], torch.arange(width - 1, device=tokens.device)] = block.parents
        return self._model(tokens, cache, parents=parents, layers=layers)

    def keep(self, rows: Sequence[int], counts: Sequence[int], path: Int[Tensor, "b K"] | None = None) -> None:
        cache = self._cache
        assert cache is not None
        if list(rows) == self._rows:
            cache.keep(torch.tensor(list(counts), dtype=torch.long), path)
            return
        every = [0] * len(self._rows)
        for row, count in zip(rows, counts, strict=True):
            every[self._rows.index(row)] = count
        paths = None
        if path is not None:
            paths = path.new_full((len(self._rows), path.shape[1]), -1)
            paths[to_device([self._rows.index(row) for row in rows], path.device)] = path
        cache.keep(torch.tensor(every, dtype=torch.long), paths)

    def read_on(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Float[Tensor, "b V"]:
        by_row = dict(zip(rows, texts, strict=True))
        # New rows are read apart, up to their last tokens: in a joint pass the others would be mostly padding.
        new = [row for row in rows if row in self._entering]
        self._settled()
        self._read([Reading(row, by_row[row][:-1]) for row in new], ())
        by_row |= {row: by_row[row][-1:] for row in new}
        cache = self._cache
        assert cache is not None
        rest = [list(by_row.get(row, ())) for row in self._rows]
        if max(map(len, rest)) > MAX_SCORED:
            self._model(self._padded([text[:-1] for text in rest]), cache, scored=1)
            cache.keep(torch.tensor([max(len(text) - 1, 0) for text in rest]))
            rest = [text[-1:] for text in rest]
        logits = self._model(self._padded(rest), cache).logits
        counts = torch.tensor([len(text) for text in rest])
        cache.keep(counts)
        last = (counts - 1).clamp_min(0).to(logits.device, non_blocking=True)
        every = logits[torch.arange(len(rest), device=logits.device), last]
        if list(rows) == self._rows:
            return every
        return every[to_device([self._rows.index(row) for row in rows], every.device)]

    def step(self, rows: Sequence[int], tokens: Int[Tensor, " b"], wanted: Sequence[bool]) -> Float[Tensor, "b V"]:
        cache = self._settled()
        assert cache is not None
        if list(rows) == self._rows:
            logits = self._model(tokens[:, None], cache).logits[:, 0]
            cache.keep(torch.tensor(list(wanted)).long())
            return logits
        index = to_device([self._rows.index(row) for row in rows], tokens.device)
        every = tokens.new_zeros(len(self._rows)).index_copy(0, index, tokens)
        logits = self._model(every[:, None], cache).logits[:, 0]
        kept = dict(zip(rows, wanted, strict=True))
        cache.keep(torch.tensor([int(kept.get(row, False)) for row in self._rows]))
        return logits[index]

    def _read(self, reading: Sequence[Reading], layers: Sequence[int]) -> list[Read]:
        """Read whole prompts of entering rows in one padded pass, and add the rows to the cache."""
        if not reading:
            return []
        texts = [list(each.tokens) for each in reading]
        cache = self._new_cache([each.row for each in reading], max(map(len, texts)))
        read = [Read((), None) for _ in reading]
        if any(texts):
            scored = None if any(each.scored for each in reading) else 1
            forward = self._model(self._padded(texts), cache, scored=scored, layers=layers)
            cache.keep(torch.tensor([len(text) for text in texts]))
            read = [
                Read(tuple(states[b, : len(text)] for states in forward.hidden), forward.logits[b, : len(text)])
                for b, text in enumerate(texts)
            ]
        self._cache = cache if self._cache is None else self._cache.join(cache)
        self._rows += [each.row for each in reading]
        return read

    def _new_cache(self, rows: Sequence[int], capacity: int) -> Cache:
        sources = [self._entering.pop(row) for row in rows]
        if any(source is not None for source in sources):
            encoder: Any = self._model
            cache: Cache = encoder.encode([source or () for source in sources])
            return cache
        return self._model.new_cache(len(rows), capacity + MAX_SCORED)

    def _settled(self) -> Cache | None:
        """Return the cache without the rows that have left; None if there are no others."""
        if self._left and self._cache is not None:
            staying = [i for i, row in enumerate(self._rows) if row not in self._left]
            self._cache = self._cache.take(staying) if staying else None
            self._rows = [self._rows[i] for i in staying]
            self._left.clear()
        return self._cache

    def _padded(self, texts: Sequence[Sequence[int]]) -> Int[Tensor, "B T"]:
        width = max(1, *map(len, texts)) if texts else 1
        return to_device([[*text, *[0] * (width - len(text))] for text in texts], self._model.device)


WHOLE = 2**62
"""Where the first chunk of a prompt ends that is read as a whole."""

MAX_SCORED = 8
"""Tokens up to which a rectangular pass scores every position; above that the last token is read in a pass of its own,
because the logits of a whole prompt could be larger than the model."""


def _rows_of(forward: Forward, index: list[int], T: int, rows: int) -> Forward:
    """Return the scores of some rows, up to T tokens each."""
    if index == list(range(rows)) and forward.logits.shape[1] == T:
        return forward
    at = index if is_cpu(forward.logits.device) else to_device(index, forward.logits.device)
    return Forward(forward.logits[at, :T], tuple(states[at, :T] for states in forward.hidden))
