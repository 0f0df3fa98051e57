"""Extend mkdocs: pages made from README, CHANGELOG and CONTRIBUTING, and docstrings that Markdown can show."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files at the root of the repository, and the pages they become."""

ARGUMENT = re.compile(r"(\S+(?:, \S+)*) {2,}(\S.*)")
"""A line of an aligned table: one name or several with commas, at least two spaces, what it means."""


def on_files(files: Files, config: Any) -> Files:
    """Add the files of the repository's root as pages, with their links as seen from docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, its_page in PAGES.items():
            text = text.replace(f"]({other}", f"]({its_page}")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links from docs/ to files at the root of the repository to their pages."""
    for name, page in PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}")
    return markdown


class Docstrings(griffe.Extension):
    """Turn a docstring's aligned tables into Markdown tables, and its doctests into code blocks."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Return a docstring as Markdown, paragraph by paragraph."""
    return "\n\n".join(_paragraph(paragraph) for paragraph in docstring.split("\n\n"))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if lines and lines[0].startswith(">>>"):
        code = [line[4:] for line in lines if line.startswith((">>>", "..."))]
        return "\n".join(["```python", *(re.sub(r" +# doctest: .*", "", line) for line in code), "```"])
    at = next((i for i, line in enumerate(lines) if ARGUMENT.fullmatch(line)), None)
    if at is None or any(not line.startswith(" ") and not ARGUMENT.fullmatch(line) for line in lines[at:]):
        return text
    return "\n".join([*lines[:at], "", "| | |", "|---|---|", *_rows(lines[at:])])


def _rows(lines: list[str]) -> list[str]:
    """Write a row for each argument; indented lines continue the one before."""
    rows: list[list[str]] = []
    for line in lines:
        argument = ARGUMENT.fullmatch(line)
        if argument:
            rows.append([f"`{argument[1]}`", argument[2]])
        else:
            rows[-1].append(line.strip())
    return [f"| {name} | {' '.join(meaning).replace('|', '&#124;')} |" for name, *meaning in rows]
