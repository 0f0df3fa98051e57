"""Cut a round's tokens at the end of a text: an end-of-text token, a stop string, or the budget.

The cut comes after verification and never changes it.
"""

from collections.abc import Collection, Sequence

from draftproof.engine.request import FinishReason, Session
from draftproof.models.tokenizer import TextStream


def cut(
    session: Session,
    tokens: Sequence[int],
    eos: Collection[int],
    stream: TextStream | None,
    max_length: int | None,
) -> tuple[list[int], str, FinishReason | None]:
    """Return the tokens that the request keeps, the text that is safe to show, and why it ends; None: it continues.

    A round's tokens have the target's distribution, and dropping the end changes nothing before it. `max_length` is the
    number of tokens that the model has positions for.
    """
    reason: FinishReason | None = None
    room = session.room if max_length is None else min(session.room, max_length - len(session.tokens))
    kept = list(tokens[:room])
    end = next((i for i, token in enumerate(kept) if token in eos), None)
    if end is not None:
        kept, reason = kept[: end + 1], "stop"
    elif len(kept) == room:
        reason = "length"
    if stream is None:
        return kept, "", reason
    before = stream.consumed
    text = stream.feed(kept)
    if stream.stopped is None and reason is not None:
        text += stream.flush()
    if stream.stopped is not None:
        kept, reason = kept[: stream.consumed - before], "stop"
    return kept, text, reason
