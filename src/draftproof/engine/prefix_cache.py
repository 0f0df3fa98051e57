"""Reuse prefixes: finished rows stay in the pool until their pages are needed, and new rows take over what they share.

A prefix is shared chunk by chunk. The keys and values of a token depend, in their last bits, on the width of the pass
that computed them. So a seeded request takes over whole chunks of prompts only, which are always read alike; other
requests also take over generated tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from draftproof.engine.request import Session
from draftproof.models.extents import PAGE
from draftproof.models.rows import Rows

MOST_IDLE: Final = 256
"""Idle prefixes that are kept: a new prompt is compared with each of them."""


class IdlePrefix(NamedTuple):
    """The tokens of a finished row, and how many of them were read in whole chunks of a prompt."""

    tokens: list[int]
    whole_chunks: int


class Found(NamedTuple):
    """A row that holds the first `length` tokens of a prompt."""

    holder: int
    length: int
    whole_chunks: int


@dataclass(slots=True)
class PrefixCache:
    """The idle prefixes by row, least recently used first."""

    idle: OrderedDict[int, IdlePrefix] = field(default_factory=OrderedDict)
    enabled: bool = True
    """False: no row stays as an idle prefix, and no prefix is taken over."""

    def add(self, session: Session, length: int) -> None:
        """Keep a finished row's first `length` tokens."""
        self.idle[session.id] = IdlePrefix(session.tokens[:length], min(session.whole_chunks, length))

    def touch(self, row: int) -> None:
        """Note that a prefix was used."""
        if row in self.idle:
            self.idle.move_to_end(row)

    def pop_oldest(self) -> int | None:
        """Remove the prefix that was used least recently; return its row, or None if there is no prefix."""
        return self.idle.popitem(last=False)[0] if self.idle else None

    def longest(self, session: Session, active: Sequence[Session], rows: Rows) -> Found | None:
        """Return the row that holds most of the prompt in whole chunks; None if none holds a chunk."""
        if not self._may_reuse(session, rows):
            return None
        held = [
            (row, prefix.tokens, len(prefix.tokens), prefix.whole_chunks) for row, prefix in reversed(self.idle.items())
        ]
        assert rows.pool is not None
        held += [(s.id, s.tokens, rows.pool.rows[s.id].length, s.whole_chunks) for s in active if s is not session]
        best: Found | None = None
        for row, tokens, length, whole in held:
            usable = min(length, whole) if session.request.seeded else length
            shared = _whole(min(_shared_pages(session.request.prompt, tokens), usable), session, rows)
            if shared > (best.length if best is not None else 0):
                best = Found(row, shared, whole)
        return best

    def most_shared(self, session: Session, others: Sequence[Session], rows: Rows) -> int:
        """Return how many tokens of the prompt, in whole chunks, one of these prompts begins with."""
        own = session.request.prompt
        if not self._may_reuse(session, rows):
            return 0
        most = max((_shared_pages(own, s.request.prompt) for s in others if s is not session), default=0)
        return _whole(most, session, rows)

    def _may_reuse(self, session: Session, rows: Rows) -> bool:
        """Return whether a prompt is long enough, and not read in full because its log-probabilities are asked for."""
        if not self.enabled or not rows.shares_prefixes or session.request.prompt_logprobs is not None:
            return False
        return len(session.request.prompt) - 2 >= PAGE


def _whole(tokens: int, session: Session, rows: Rows) -> int:
    """Round down to what a request may take over: whole chunks if it is seeded, otherwise whole pages."""
    return rows.chunk_around(tokens)[0] if session.request.seeded else tokens // PAGE * PAGE


def _shared_pages(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Count the tokens of the pages that both texts begin with, followed by at least one token that they share.

    A drafter's state at a token may depend on the token after it. The prompt's last token is never read, and the one
    before it always is: a drafter may need the target's states there.
    """
    most = min(len(prompt) - 2, len(tokens) - 1)
    at = 0
    while at + PAGE <= most and list(prompt[at : at + PAGE]) == list(tokens[at : at + PAGE]):
        at += PAGE
    if at and prompt[at] != tokens[at]:
        at -= PAGE
    return at
