"""What happened to a token and why the distribution is kept, in words for someone who meets the method for the first time."""

from collections.abc import Callable
from typing import NamedTuple

from draftproof.explain.recorder import Closing, Round, Slot

Name = Callable[[int], str]
"""A token as it is written in a sentence."""


class Story(NamedTuple):
    """What happened, and why the distribution is kept by it."""

    happened: str
    why: str


BY_TOKEN = (
    "Kept guesses deliver the part min(p, q) of the target's distribution, and the token that takes the place of a rejected one "
    "delivers the missing part, max(0, p − q). The two add up to exactly p, token by token."
)
BY_BLOCK = (
    "The chances of the block rule are chosen such that what is kept and what closes it together have exactly the distribution "
    "p; on average it keeps more than a judgement token by token, and never less."
)
FROM_P = "A draw from p has the distribution p: there is nothing to make up for."
NOT_SAID = "What is not said cannot change the distribution: the text goes on from the token that took the rejected one's place."


def number(x: float) -> str:
    """Three places, and for the tiny ones their order of magnitude."""
    if x == 0 or x >= 0.001:
        return f"{x:.3f}".rstrip("0").rstrip(".")
    return f"{x:.0e}"


def about_slot(round_: Round, i: int, name: Name) -> Story:
    """The story of a drafted token."""
    slot = round_.slots[i]
    if round_.fate(i) == "dropped":
        return Story(
            f"{name(slot.token)} was guessed to follow a token that was rejected. It continues a text that was never "
            "said, so nobody looks at its coin: dropped.",
            NOT_SAID,
        )
    if round_.as_block:
        return Story(f"{_guessed(slot, name)} {_in_a_block(slot)}", BY_BLOCK)
    return Story(f"{_guessed(slot, name)} {_by_token(slot)}", BY_TOKEN)


def _guessed(slot: Slot, name: Name) -> str:
    if slot.drawn:
        return f"The drafter drew {name(slot.token)} from its own distribution, where it has q = {number(slot.q)}."
    return f"The drafter chose {name(slot.token)} outright: nothing was drawn, so q is 1 on it and 0 on all others."


def _by_token(slot: Slot) -> str:
    if slot.ratio >= 1:
        return f"The target finds it at least as likely, p = {number(slot.p)}: it is kept whatever the coin says."
    may = f"The target gives it p = {number(slot.p)}, so it may stay with probability p/q = {number(slot.ratio)}."
    if slot.kept:
        return f"{may} The coin fell at {number(slot.coin)}, below that: kept."
    return (
        f"{may} The coin fell at {number(slot.coin)}, not below: rejected. In its place comes a token that the target "
        "wants more than the drafter did."
    )


def _in_a_block(slot: Slot) -> str:
    begin = f"The target gives it p = {number(slot.p)}, a ratio p/q of {number(slot.ratio)}."
    if not slot.judged:
        return (
            f"{begin} The block was judged from its end, and a longer part of it stood: kept without a coin of its own."
        )
    held = f"coin {number(slot.coin)} against a chance of {number(slot.chance)}"
    if slot.kept:
        return f"{begin} Judged from the end, the draft up to here was the first part to stand ({held}): kept."
    return (
        f"{begin} Judged from the end, the draft up to here did not stand ({held}): rejected, and a shorter part tried."
    )


def about_closing(round_: Round, name: Name) -> Story:
    """The story of the token that ends a round."""
    closing: Closing = round_.closing
    if not round_.slots:
        return Story(
            f"Nothing was guessed here, so the target spoke for itself: {name(closing.token)} was drawn from p, "
            f"where it has p = {number(closing.p)}.",
            FROM_P,
        )
    if not closing.after_rejection:
        return Story(
            f"Every guess stood, and the same pass had already scored the position behind them: {name(closing.token)} "
            f"is a free token, drawn from p itself, where it has p = {number(closing.p)}.",
            FROM_P,
        )
    scaled = "max(0, p − q)" if closing.weight == 1 else f"max(0, w·p − q) with w = {number(closing.weight)}"
    return Story(
        f"After the rejection one token is drawn from what the target wants and the drafter did not deliver, {scaled}: "
        f"it is {name(closing.token)}, with a chance of {number(closing.chance)} there and p = {number(closing.p)}.",
        BY_BLOCK if round_.as_block else BY_TOKEN,
    )
