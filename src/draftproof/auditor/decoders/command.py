"""Run any program as a decoder: it reads requests and writes answers in the same order, one JSON object per line.

A request is {"prompt": [ids], "sampling": {…}, "max_tokens": n, "seed": s}; an answer is {"tokens": [ids]}, and may
have "rounds": [[drafted, accepted], …].
"""

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final

from draftproof.auditor.interface import Decoded
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round

EXCERPT: Final = 400
"""Characters of a malformed line, or of the end of stderr, that an error message shows."""


def command(argv: Sequence[str], *, timeout: float = 600.0) -> "Command":
    """Make a decoder that starts this program once and asks it for every text; `timeout` is in seconds per answer."""
    return Command(tuple(argv), timeout)


@dataclass(slots=True)
class Command:
    """A decoder whose program starts with the first request and keeps running: loading a model may take minutes."""

    argv: tuple[str, ...]
    timeout: float
    name: str = "command"
    description: dict[str, str] = field(default_factory=dict)
    _running: "_Running | None" = None

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError(
                "command must be a program and its arguments, such as ['python', 'decoder.py']; got nothing"
            )
        self.description = {"command": " ".join(self.argv)}

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> list[Decoded]:
        """Continue each prompt; see `Decoder`."""
        if self._running is None:
            self._running = _Running(self.argv, self.timeout)
        program, parameters = self._running, _parameters(sampling)
        for prompt, seed in zip(prompts, seeds, strict=True):
            program.ask({"prompt": list(prompt), "sampling": parameters, "max_tokens": max_tokens, "seed": seed})
        return [_parse(program.answer(), program) for _ in prompts]

    def close(self) -> None:
        """End the program: close its stdin, and kill it if it does not exit."""
        if self._running is not None:
            self._running.close()
            self._running = None


class _Running:
    """The running program. A thread reads its stdout, so that neither side blocks on a full pipe."""

    def __init__(self, argv: tuple[str, ...], timeout: float) -> None:
        self._argv, self._timeout = argv, timeout
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, encoding="utf-8"
            )
        except OSError as error:
            self._errors.close()
            raise ValueError(f"command {argv[0]!r} cannot be started: {error.strerror}") from error
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self.failure("ended before it had read all requests") from None

    def answer(self) -> str:
        try:
            line = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            raise self.failure(f"wrote no line within {self._timeout:g} seconds") from None
        if line is None:
            raise self.failure("ended without an answer to every request")
        return line

    def failure(self, what: str) -> RuntimeError:
        """End the program, whose answers no longer match requests, and return an error with the end of its stderr."""
        self._end()
        self._errors.seek(0)
        stderr = self._errors.read().strip()[-EXCERPT:]
        status = self._process.returncode
        wrote = f"; it wrote: {stderr}" if stderr else ""
        return RuntimeError(f"command {self._argv[0]!r} {what} (exit status {status}){wrote}")

    def close(self) -> None:
        self._end()
        self._errors.close()

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        deadline = time.monotonic() + 2.0
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


def _parameters(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters by name, without the seed, which a request has of its own."""
    plain = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__ if name != "seed"}
    return plain | {"logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()}}


def _parse(line: str, program: _Running) -> Decoded:
    try:
        answer = json.loads(line)
        tokens = tuple(_whole(token) for token in answer["tokens"])
        rounds = answer.get("rounds")
        if rounds is not None:
            rounds = tuple(Round(_whole(drafted), _whole(accepted)) for drafted, accepted in rounds)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shown = line.strip()[:EXCERPT]
        raise program.failure(
            f"wrote a line that is not an answer ({type(error).__name__}: {error}): {shown!r}; it should be "
            '{"tokens": [ids]}, with "rounds": [[drafted, accepted], …] if they are known'
        ) from error
    return Decoded(tokens, rounds)


def _whole(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{number!r} is not a whole number")
    return number
