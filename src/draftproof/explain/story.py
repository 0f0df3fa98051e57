"""Describe in words what happened to a token and why the distribution stays exact, for a first-time reader."""

from collections.abc import Callable
from typing import NamedTuple

from draftproof.explain.recorder import Closing, Round, Slot

Name = Callable[[int], str]
"""Returns a token as it is quoted in a sentence."""


class Story(NamedTuple):
    """The account of what happened to a token, and of why the distribution stays exact."""

    happened: str
    why: str


BY_TOKEN = (
    "Kept guesses contribute the part min(p, q) of the target's distribution. The token drawn in place of a rejected "
    "guess contributes the missing part, max(0, p − q). The two add up to exactly p, token by token."
)
BY_BLOCK = (
    "The block rule chooses its chances so that the kept tokens and the token drawn after them together have exactly "
    "the distribution p. On average it keeps at least as many tokens as the rule that decides token by token."
)
FROM_P = "A token drawn from p has the distribution p: nothing has to be corrected."
NOT_EMITTED = (
    "A token that is not emitted cannot change the distribution: the text continues from the token drawn in place of "
    "the rejected one."
)


def number(x: float) -> str:
    """Format a number with three decimals, and a tiny one by its order of magnitude."""
    if x == 0 or x >= 0.001:
        return f"{x:.3f}".rstrip("0").rstrip(".")
    return f"{x:.0e}"


def about_slot(round_: Round, i: int, name: Name) -> Story:
    """Tell the story of draft token i."""
    slot = round_.slots[i]
    if round_.fate(i) == "dropped":
        return Story(
            f"{name(slot.token)} was guessed to follow a token that was rejected. It would continue a text that does "
            "not exist, so its coin is not used: dropped.",
            NOT_EMITTED,
        )
    if round_.as_block:
        return Story(f"{_guessed(slot, name)} {_in_a_block(slot)}", BY_BLOCK)
    return Story(f"{_guessed(slot, name)} {_by_token(slot)}", BY_TOKEN)


def about_closing(round_: Round, name: Name) -> Story:
    """Tell the story of a round's last token."""
    closing: Closing = round_.closing
    if not round_.slots:
        return Story(
            f"Nothing was guessed here, so the target's own draw is the only token: {name(closing.token)}, drawn from "
            f"p, where it has p = {number(closing.p)}.",
            FROM_P,
        )
    if not closing.after_rejection:
        return Story(
            f"Every guess was kept, and the same pass has already scored the position after them: "
            f"{name(closing.token)} is a free token, drawn from p itself, where it has p = {number(closing.p)}.",
            FROM_P,
        )
    scaled = "max(0, p − q)" if closing.weight == 1 else f"max(0, w·p − q) with w = {number(closing.weight)}"
    return Story(
        f"After the rejection one token is drawn from the part of the target's distribution that the drafter left "
        f"out, {scaled}: it is {name(closing.token)}, with a chance of {number(closing.chance)} there and "
        f"p = {number(closing.p)}.",
        BY_BLOCK if round_.as_block else BY_TOKEN,
    )


def _guessed(slot: Slot, name: Name) -> str:
    if slot.drawn:
        return f"The drafter drew {name(slot.token)} from its own distribution, where it has q = {number(slot.q)}."
    return f"The drafter chose {name(slot.token)} outright: nothing was drawn, so q is 1 on it and 0 on all others."


def _by_token(slot: Slot) -> str:
    if slot.ratio >= 1:
        return f"To the target it is at least as likely, p = {number(slot.p)}: it is kept whatever the coin shows."
    chance = f"The target gives it p = {number(slot.p)}, so it is kept with probability p/q = {number(slot.ratio)}."
    if slot.kept:
        return f"{chance} The coin shows {number(slot.coin)}, below that: kept."
    return (
        f"{chance} The coin shows {number(slot.coin)}, not below: rejected. In its place comes a token that is more "
        "likely under the target than under the drafter."
    )


def _in_a_block(slot: Slot) -> str:
    ratio = f"The target gives it p = {number(slot.p)}, a ratio p/q of {number(slot.ratio)}."
    if not slot.judged:
        return (
            f"{ratio} The block rule starts from the end of the draft, and a longer part of it was kept: kept without "
            "using its coin."
        )
    coin = f"coin {number(slot.coin)} against a chance of {number(slot.chance)}"
    if slot.kept:
        return f"{ratio} From the end of the draft, the part up to here was the first to be kept ({coin}): kept."
    return (
        f"{ratio} From the end of the draft, the part up to here was not kept ({coin}): rejected, and a shorter part "
        "is tried."
    )
