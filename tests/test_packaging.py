"""The package installs into an empty environment, its command works there, and its wheel holds all that it needs."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "draftproof"
DATA = sorted(
    f.relative_to(SOURCE.parent)
    for f in SOURCE.rglob("*")
    if f.is_file() and f.suffix != ".py" and f.parent.name != "__pycache__"
)


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the working tree, built with the test environment's own hatchling: no network."""
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    [made] = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """An environment without draftproof that borrows torch, transformers and the rest from the test environment.

    A line in a .pth file adds a folder without running the .pth files in it, so an editable installation of draftproof
    in the test environment is not borrowed.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def test_it_installs_into_an_empty_environment_and_its_command_works(environment, tmp_path):
    python = environment / "bin" / "python"
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    run(python, "-m", "pip", "install", *options, ROOT, cwd=tmp_path)
    assert "generate" in run(environment / "bin" / "draftproof", "--help", cwd=tmp_path)
    code = (
        "import draftproof as dp, draftproof.models.head.attach as attach\n"
        "print(dp.__file__, dp.__version__, attach.SHIPPED.is_dir(), sep='\\n')"
    )
    file, version, has_head = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(environment), "the installed package, not the working tree"
    assert version == re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert has_head == "True", "the shipped head is where the code looks for it"


def test_the_package_index_would_accept_the_wheel(wheel, tmp_path):
    assert "PASSED" in run(sys.executable, "-m", "twine", "check", "--strict", wheel, cwd=tmp_path)


def test_the_wheel_holds_the_data_files(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f.suffix for f in DATA} >= {".safetensors", ".json", ".jsonl", ".html", ".css", ".js", ".typed"}
    assert not [str(f) for f in DATA if str(f) not in names]


def test_the_wheel_holds_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if not name.startswith(("draftproof/", "draftproof-")) or name.endswith(".pyc")]
