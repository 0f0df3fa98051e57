"""Render a certificate as one self-contained HTML page, without scripts and without network access."""

import math
from html import escape
from importlib.resources import files
from typing import Final

from draftproof.auditor.bets import hint
from draftproof.auditor.certificate import Certificate, defects_seen, drafts_line, number

WIDTH, HEIGHT, LEFT, BOTTOM = 760, 260, 56, 30
"""Size and margins of the evidence curve, in SVG units."""
VERDICT_CLASS: Final = {"no bias found": "clean", "biased": "biased", "not enough evidence": "open"}


def page(certificate: Certificate) -> str:
    """Return the whole document."""
    html = (files("draftproof.auditor") / "certificate.html").read_text(encoding="utf-8")
    parts = {
        "<!--VERDICT-->": escape(certificate.verdict),
        "<!--KIND-->": VERDICT_CLASS[certificate.verdict],
        "<!--REASON-->": escape(certificate.reason),
        "<!--FIGURES-->": _pairs(_figures(certificate)),
        "<!--CURVE-->": _curve(certificate),
        "<!--BETS-->": _bets(certificate),
        "<!--TESTED-->": _pairs(
            {**certificate.tested, "alpha": f"{certificate.alpha:g}", "bias": f"{certificate.bias:g}"}
        ),
        "<!--UNTESTED-->": "".join(f"<li>{escape(line)}</li>" for line in certificate.untested),
    }
    for mark, part in parts.items():
        html = html.replace(mark, part)
    return html


def _figures(c: Certificate) -> dict[str, str]:
    figures = {
        "tokens seen": f"{c.tokens:,} in {c.texts:,} texts",
        "method": c.method,
        "drafts": drafts_line(c.coverage),
    }
    if c.bets:
        figures["evidence"] = f"{number(c.log_evidence)}; {number(c.threshold)} decides"
    if c.smallest_bias is not None:
        figures["smallest bias that would have been seen"] = f"{c.smallest_bias:.3g}"
    if c.decisive:
        figures["defects that would have been seen"] = "; ".join(defects_seen(c))
    if c.more_tokens:
        figures["more tokens to settle it"] = f"about {c.more_tokens:,}"
    if c.unbet or c.near_ties:
        figures["within rounding"] = f"{c.unbet:,} positions not bet on, {c.near_ties:,} near ties"
    return figures | {name: f"p = {value:.3g}" for name, value in c.p_values.items()}


def _pairs(pairs: dict[str, str]) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs.items())


def _bets(c: Certificate) -> str:
    rows = []
    for name, log_e in sorted(c.bets.items(), key=lambda item: -item[1]):
        seen = c.visible.get(name)
        won = ' class="won"' if log_e >= c.threshold else ""
        cells = (number(log_e), "–" if seen is None else f"{seen:.3g}", name, hint(name))
        rows.append(f"<tr{won}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return "".join(rows) or '<tr><td colspan="4">This audit compares tokens and places no bets.</td></tr>'


def _curve(c: Certificate) -> str:
    """Draw log₁₀ of the evidence over tokens, and the threshold that decides."""
    if not c.curve:
        return ""
    tens = math.log(10)
    points = [(0, 0.0), *((n, e / tens) for n, e in c.curve)]
    decides = c.threshold / tens
    top = max(decides * 1.15, *(e for _, e in points))
    low = min(-1.0, *(e for _, e in points))
    last = max(n for n, _ in points)

    def x(n: int) -> float:
        return LEFT + (WIDTH - LEFT - 10) * n / max(last, 1)

    def y(e: float) -> float:
        return 10 + (HEIGHT - BOTTOM - 10) * (top - e) / (top - low)

    path = " ".join(f"{x(n):.1f},{y(e):.1f}" for n, e in points)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Evidence against the decoder over tokens">'
        f'<line class="axis" x1="{LEFT}" y1="{y(0.0):.1f}" x2="{WIDTH - 10}" y2="{y(0.0):.1f}"/>'
        f'<line class="decides" x1="{LEFT}" y1="{y(decides):.1f}" x2="{WIDTH - 10}" y2="{y(decides):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{y(0.0) + 4:.1f}" class="end">1</text>'
        f'<text x="{LEFT - 8}" y="{y(decides) + 4:.1f}" class="end">{number(c.threshold)}</text>'
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 8}" class="end">{last:,} tokens</text>'
        f'<polyline points="{path}"/></svg>'
    )
