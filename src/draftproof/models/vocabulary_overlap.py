"""Match the tokens of two vocabularies that spell the same bytes.

The match is one to one: TLI (drafters/tli.py) draws from it, and a token that could be drawn in two ways would have
another probability than the declared one. Special tokens are matched by their roles, and otherwise by their text.
"""

from dataclasses import dataclass
from typing import Any

from draftproof.models.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class VocabularyOverlap:
    """Two vocabularies, and the tokens that they share.

    partner   the draft model's token for each shared token of the target
    share     the fraction of the target's tokens that are shared
    """

    target: TokenBytes
    draft: TokenBytes
    partner: dict[int, int]

    @classmethod
    def of(cls, tokenizer: Any, draft_tokenizer: Any, *, vocab_size: int, draft_vocab_size: int) -> "VocabularyOverlap":
        """Match the vocabularies of these tokenizers; the sizes are the numbers of the models' logits."""
        target, draft = TokenBytes(tokenizer, vocab_size), TokenBytes(draft_tokenizer, draft_vocab_size)
        return cls(target, draft, _same_bytes(target, draft) | _same_roles(target, draft))

    @property
    def share(self) -> float:
        known = len(self.target.spelled) + len(self.target.special)
        return len(self.partner) / known if known else 0.0

    def __str__(self) -> str:
        known = len(self.target.spelled) + len(self.target.special)
        return f"{100 * self.share:.1f} % of the target's tokens ({len(self.partner):,} of {known:,})"


def _same_bytes(target: TokenBytes, draft: TokenBytes) -> dict[int, int]:
    """Match ordinary tokens by their bytes."""
    own, other = _by_bytes(target), _by_bytes(draft)
    return {i: other[data] for data, i in own.items() if data in other}


def _by_bytes(vocabulary: TokenBytes) -> dict[bytes, int]:
    """Return the token of each spelling. Of several, as "A" and "<0x41>", the one that the tokenizer uses is taken."""
    tokens: dict[bytes, int] = {}
    repeated = set()
    for i, data in sorted(vocabulary.spelled.items()):
        if data in tokens:
            repeated.add(data)
        tokens.setdefault(data, i)
    for data in repeated:
        used = vocabulary.encode(data)
        tokens[data] = used[0] if len(used) == 1 and vocabulary.spelled.get(used[0]) == data else tokens[data]
    return tokens


def _same_roles(target: TokenBytes, draft: TokenBytes) -> dict[int, int]:
    """Match special tokens by role; those without a role by their text."""
    matched: dict[int, int] = {}
    for role, i in target.roles.items():
        if role in draft.roles and i not in matched and draft.roles[role] not in matched.values():
            matched[i] = draft.roles[role]
    taken = {*target.roles.values(), *matched}, {*draft.roles.values(), *matched.values()}
    by_text = {text: i for i, text in draft.special.items() if i not in taken[1]}
    return matched | {i: by_text[text] for i, text in target.special.items() if i not in taken[0] and text in by_text}
