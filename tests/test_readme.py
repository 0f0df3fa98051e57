"""The README is short, its Python runs as typed, and every local link of the documentation leads somewhere."""

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import draftproof

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
MOST_LINES = 150

HEADINGS = re.compile(r"^#+ (.+)$", re.MULTILINE)
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def sections() -> dict[str, str]:
    """Return the Python of each section, by the section's heading."""
    found: dict[str, str] = {}
    for part in re.split(r"^## ", README, flags=re.MULTILINE)[1:]:
        for code in BLOCK.findall(part):
            found[part.splitlines()[0]] = code
    return found


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links of a page that name no file, or no heading of a file."""
    found = []
    for link in LINK.findall(FENCED.sub("", text)):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        goal = page if not path else page.parent / path
        if not goal.is_file() or (anchor and anchor not in anchors(goal.read_text(encoding="utf-8"))):
            found.append(link)
    return found


def anchors(text: str) -> set[str]:
    headings = HEADINGS.findall(FENCED.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_readme_is_read_in_two_minutes():
    assert len(README.splitlines()) < MOST_LINES


def test_every_python_block_is_run_below():
    assert len(sections()) == len(BLOCK.findall(README)), "one Python block per section: the tests below name them"
    assert set(sections()) == {"Quickstart", "Inside transformers", "Inside your engine", "Is a decoder biased?"}


def test_the_quickstart_runs_as_typed(smollm2, capsys):
    names: dict[str, object] = {}
    exec(sections()["Quickstart"], names)
    text, rate, *_ = capsys.readouterr().out.splitlines()
    assert len(text) > 20
    assert float(rate.split()[0]) > 1.2, f"the shipped head should draft: {rate}"
    assert isinstance(names["outputs"], list)


@pytest.mark.filterwarnings("default")  # of transformers' own
def test_the_transformers_example_runs_as_typed(smollm2, capsys):
    exec(sections()["Inside transformers"], {})
    assert capsys.readouterr().out.startswith("red, green, blue; red, green,")


def test_the_engine_builders_example_runs_as_typed():
    names: dict[str, object] = {}
    exec(sections()["Inside your engine"], names)
    new_tokens = names["new_tokens"]
    assert isinstance(new_tokens, list)
    assert all(0 <= token < 32000 for row in new_tokens for token in row)


def test_the_audits_example_finds_the_bias(capsys):
    exec(sections()["Is a decoder biased?"], {})
    assert capsys.readouterr().out.startswith("biased - the bet ")


def test_the_kernels_page_has_an_example_that_runs_on_a_cpu(capsys):
    page = (ROOT / "docs" / "calling-the-kernel.md").read_text(encoding="utf-8")
    _, on_a_cpu = BLOCK.findall(page)
    exec(on_a_cpu, {})
    assert "tensor" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_local_links_lead_somewhere(page):
    assert not broken_links(page, page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("link", ["docs/nowhere.md", "README.md#no-such-heading", "#no-such-heading"])
def test_the_link_test_can_fail(link):
    assert broken_links(ROOT / "README.md", f"[a link]({link})") == [link]


@pytest.mark.parametrize("name", draftproof.__all__)
def test_every_public_name_is_in_the_api_reference(name):
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = [line.split()[1] for line in page.splitlines() if line.startswith(":::")]
    value = getattr(draftproof, name)
    if isinstance(value, ModuleType):
        assert f"`dp.{name}`" in page
    elif hasattr(value, "__module__"):
        assert f"{value.__module__}.{name}" in documented
    else:  # a constant does not know where it is defined
        assert any(path.endswith(f".{name}") for path in documented)


def test_the_readme_names_the_versions_that_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package in ("torch", "transformers"):
        asked = next(line for line in project["dependencies"] if line.startswith(f"{package}>="))
        assert asked.replace(">=", " ≥ ") in README
