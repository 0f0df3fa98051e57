"""Show rounds on a terminal: kept, rejected and drawn tokens in colour, with p, q, the ratio and the coin."""

from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftproof.explain.explanation import origin, visible
from draftproof.explain.recorder import Round, Slot
from draftproof.explain.story import number

STYLES: Final = {
    "kept": "green",
    "rejected": "red strike",
    "dropped": "bright_black strike",
    "residual": "dark_orange",
    "bonus": "cyan",
    "plain": "default",
}
LEGEND: Final = (
    ("kept", "kept guess"),
    ("rejected", "rejected guess"),
    ("dropped", "dropped without a test"),
    ("residual", "drawn in place of a rejected one"),
    ("bonus", "free token after a full draft"),
    ("plain", "no guess was made"),
)
Label = Callable[[int], str]
"""Returns the text of a token."""


def legend() -> Text:
    """Return a line that explains the colours."""
    line = Text()
    for style, meaning in LEGEND:
        line.append(meaning, STYLES[style])
        line.append("   ")
    return line


def ribbon(round_: Round, label: Label) -> Text:
    """Return the tokens of a round as one line."""
    line = Text()
    for i, slot in enumerate(round_.slots):
        line.append(visible(label(slot.token)), STYLES[round_.fate(i)])
        line.append("·", "bright_black")
    line.append(visible(label(round_.closing.token)), STYLES[origin(round_)] + " bold")
    return line


def show_round(console: Console, number_: int, round_: Round, label: Label) -> None:
    """Print a round, with a table of its numbers if anything was drafted."""
    title = Text(f"Round {number_:>3}  ", "bold")
    console.print(Text.assemble(title, ribbon(round_, label), _summary(round_)), soft_wrap=True)
    if round_.slots:
        console.print(_table(round_, label))


def _summary(round_: Round) -> Text:
    if not round_.slots:
        return Text("   no guess", "bright_black")
    return Text(f"   kept {round_.kept} of {len(round_.slots)}", "bright_black")


def _table(round_: Round, label: Label) -> Table:
    threshold = "chance" if round_.as_block else "p/q"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", pad_edge=False)
    for column in ("", "token", "p", "q", *(("p/q",) if round_.as_block else ()), threshold, "coin", ""):
        table.add_column(column, justify="left" if column in ("", "token") else "right", no_wrap=True)
    for i, slot in enumerate(round_.slots):
        fate = round_.fate(i)
        ratio = [number(slot.ratio)] if round_.as_block else []
        numbers = [number(slot.p), number(slot.q), *ratio, number(slot.chance if round_.as_block else slot.ratio)]
        token = Text(visible(label(slot.token)), STYLES[fate])
        table.add_row(" " * 10, token, *numbers, _coin(slot), Text(_decision(round_, i), STYLES[fate].split()[0]))
    closing = round_.closing
    token = Text(visible(label(closing.token)), STYLES[origin(round_)] + " bold")
    blanks = [""] * (3 if round_.as_block else 2)
    table.add_row("", token, number(closing.p), *blanks, "", Text(_drawn_from(round_), "bright_black"))
    return table


def _coin(slot: Slot) -> str:
    return number(slot.coin) if slot.judged else "–"


def _decision(round_: Round, i: int) -> str:
    slot = round_.slots[i]
    if not slot.judged:
        return round_.fate(i)
    sign = "<" if slot.coin < slot.chance else "≥"
    return f"{round_.fate(i)}: {number(slot.coin)} {sign} {number(slot.chance)}"


def _drawn_from(round_: Round) -> str:
    if not round_.slots:
        return "drawn from p"
    if not round_.closing.after_rejection:
        return "free: drawn from p"
    return "drawn from max(0, p − q)" if round_.closing.weight == 1 else "drawn from max(0, w·p − q)"
