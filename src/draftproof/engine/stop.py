"""Where a text ends: end-of-text tokens, stop strings, budgets. Cuts after verification, never inside it."""

from collections.abc import Collection, Sequence

from draftproof.engine.request import FinishReason, Session
from draftproof.models.tokenizer import TextStream


def cut(
    session: Session,
    tokens: Sequence[int],
    eos: Collection[int],
    stream: TextStream | None,
    longest: int | None,
) -> tuple[list[int], str, FinishReason | None]:
    """How much of what a round emitted the request gets: its tokens, the text that is safe to show, and why it ends.

    What a round emits has the target's distribution; leaving off its end changes nothing before the end. `longest` is how many
    tokens the model has positions for.
    """
    reason: FinishReason | None = None
    room = session.room if longest is None else min(session.room, longest - len(session.tokens))
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
