"""Audit every mutant and write the tables of docs/reading-a-certificate.md: `make audit-mutants`.

With names as arguments only those are run; with `--smollm2` the mutants of the bundled model, or those of them that are
named; with `--examples` the two certificates that the page shows. A mutant's total variation does not depend on the
audit: it is measured if none is saved, and with `--measure` for all that are run.
"""

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from auditor.mutants import MUTANTS
from auditor.mutants.bundled import bundled_mutants
from auditor.mutants.mutant import REPETITIVE, Mutant
from auditor.mutants.variation import total_variation
from auditor.mutants.world import World
from draftproof.auditor.certificate import Certificate

ROOT = Path(__file__).parents[3]
DOC = ROOT / "docs" / "reading-a-certificate.md"
SAVED = ROOT / "benchmarks" / "results" / "mutants.json"
SMOLLM2 = "smollm2:"
HEADS = {
    "found": ("mutant", "what it does wrong", "TV", "vocabulary", "tokens", "found by"),
    "unfound": ("mutant", "what it does wrong", "TV", "tokens", "why not"),
    "smollm2": ("mutant", "tokens", "found by"),
}


def row(mutant: Mutant, tv: str | None) -> dict[str, Any]:
    """Audit one mutant, and measure its total variation unless that is known."""
    start = time.perf_counter()
    certificate = mutant.examined()
    if tv is None:
        written_out = mutant.sampling.temperature > 0 and type(mutant.world) is World
        tv = str(total_variation(mutant)) if written_out else "–"
    return {
        "says": mutant.says,
        "family": mutant.family,
        "vocabulary": mutant.world.hf.config.vocab_size,
        "tv": tv,
        "verdict": certificate.verdict,
        "tokens": _tokens(certificate),
        "by": _by(certificate),
        "because": mutant.because,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _tokens(certificate: Certificate) -> int:
    if certificate.found_at is not None:
        return certificate.found_at
    if certificate.impossible is not None:  # a greedy audit: count the tokens up to the wrong one
        return certificate.impossible.text * certificate.asked["length"] + certificate.impossible.position + 1
    return certificate.tokens


def _by(certificate: Certificate) -> str:
    if certificate.impossible is not None:
        greedy = certificate.method.startswith("equality")
        return "not the likeliest token" if greedy else f"impossible token ({certificate.impossible.parameter})"
    return certificate.found_by or ""


def table(kind: str, rows: Iterable[tuple[Any, ...]]) -> str:
    head = HEADS[kind]
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def tables(saved: dict[str, Any]) -> dict[str, str]:
    tiny = {name: r for name, r in saved.items() if not name.startswith(SMOLLM2)}
    found = [
        (f"`{n}`", r["says"], r["tv"], r["vocabulary"], f"{r['tokens']:,}", r["by"])
        for n, r in tiny.items()
        if r["verdict"] == "biased"
    ]
    unfound = [
        (f"`{n}`", r["says"], r["tv"], f"{r['tokens']:,}", r["because"])
        for n, r in tiny.items()
        if r["verdict"] != "biased"
    ]
    real = [
        (f"`{n.removeprefix(SMOLLM2)}`", f"{r['tokens']:,}", r["by"] or f"**not found**: {r['verdict']}")
        for n, r in saved.items()
        if n.startswith(SMOLLM2)
    ]
    return {"found": table("found", found), "unfound": table("unfound", unfound), "smollm2": table("smollm2", real)}


def write(saved: dict[str, Any]) -> None:
    """Save the rows as JSON, and write the tables between their marks in the documentation."""
    order = {name: i for i, name in enumerate([*MUTANTS, *(f"{SMOLLM2}{n}" for n in MUTANTS)])}
    saved = {name: saved[name] for name in sorted(saved, key=lambda name: order.get(name, len(order)))}
    SAVED.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fill({f"mutants {kind}": made for kind, made in tables(saved).items()})


def fill(pieces: dict[str, str]) -> None:
    """Write these pieces between their marks in the documentation."""
    text = DOC.read_text(encoding="utf-8")
    for name, made in pieces.items():
        before, mark, rest = text.partition(f"<!-- {name} -->")
        _, end, after = rest.partition("<!-- end -->")
        if not mark or not end:
            raise ValueError(f"{DOC.name} has no place for {name!r}: <!-- {name} --> … <!-- end -->")
        text = f"{before}{mark}\n\n{made}\n\n{end}{after}"
    DOC.write_text(text, encoding="utf-8")


def examples() -> dict[str, str]:
    """Audit a wrong engine and the right one, and return their certificates as Markdown."""
    right = Mutant(
        lambda world: world.engine(rule="block", drafter=world.lookup()), "none", "lookup", REPETITIVE, 40_000
    )
    shown = {"example biased": (MUTANTS["residual_skipped"], 6), "example clean": (right, 4)}
    return {name: f"```text\n{_short(str(m.examined()), bets)}\n```" for name, (m, bets) in shown.items()}


def _short(text: str, bets: int) -> str:
    """Shorten a certificate to its first few bets."""
    head, title, rest = text.partition("evidence by bet")
    lines, blank, foot = rest.partition("\n\n")
    return head + title + "\n".join([*lines.split("\n")[: bets + 1], "        …"]) + blank + foot


def saved_rows() -> dict[str, Any]:
    return dict(json.loads(SAVED.read_text(encoding="utf-8"))) if SAVED.exists() else {}


def selected(names: list[str]) -> dict[str, Mutant]:
    if "--smollm2" in names:
        from draftproof.models import bundled

        made = bundled_mutants(*bundled.load())
        return {f"{SMOLLM2}{name}": made[name] for name in [name for name in names if name in made] or made}
    return {name: MUTANTS[name] for name in names or MUTANTS}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    measure = "--measure" in names
    names = [name for name in names if name != "--measure"]
    if not names or "--examples" in names:
        fill(examples())
    wanted = {} if "--examples" in names else selected(names)
    for name, mutant in wanted.items():
        known = None if measure else saved_rows().get(name, {}).get("tv")
        result = row(mutant, "–" if name.startswith(SMOLLM2) else known)
        print(f"{name:45} {result['verdict']:20} {result['tokens']:>8,} {result['tv']:>7}  {result['by']}", flush=True)
        write({**saved_rows(), name: result})


if __name__ == "__main__":
    main(sys.argv[1:])
