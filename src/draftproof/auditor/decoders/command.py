"""Any program as a decoder: it reads requests and writes answers, one JSON object a line, in the same order.

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

SHOWN: Final = 400
"""Characters of a bad line, or of a program's last words, that an error shows."""


def command(argv: Sequence[str], *, timeout: float = 600.0) -> "Command":
    """Run this program once and ask it for every text. `timeout`: seconds to wait for each line."""
    return Command(tuple(argv), timeout)


@dataclass(slots=True)
class Command:
    """A program that is started with the first request and kept: loading a model may take it minutes."""

    argv: tuple[str, ...]
    timeout: float
    name: str = "command"
    description: dict[str, str] = field(default_factory=dict)
    _running: "_Running | None" = None

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError("command wants a program and its arguments, as in ['python', 'decoder.py']; got nothing")
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
        return [_said(program.answer(), program) for _ in prompts]

    def close(self) -> None:
        """End the program: its input ends, and if that does not do, it is killed."""
        if self._running is not None:
            self._running.close()
            self._running = None


class _Running:
    """The program under way. A thread of its own reads what it writes: neither side waits for a full pipe."""

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
        """An error with the program's own last words. The program is ended: what it would say next answers nothing."""
        self._end()
        self._errors.seek(0)
        words = self._errors.read().strip()[-SHOWN:]
        status = self._process.returncode
        said = f"; it wrote: {words}" if words else ""
        return RuntimeError(f"command {self._argv[0]!r} {what} (exit status {status}){said}")

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
    """The fields of `SamplingParams` by name; the seed travels beside them."""
    plain = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__ if name != "seed"}
    return plain | {"logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()}}


def _said(line: str, program: _Running) -> Decoded:
    try:
        answer = json.loads(line)
        tokens = tuple(_whole(token) for token in answer["tokens"])
        rounds = answer.get("rounds")
        if rounds is not None:
            rounds = tuple(Round(_whole(drafted), _whole(accepted)) for drafted, accepted in rounds)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shown = line.strip()[:SHOWN]
        raise program.failure(
            f'wrote a line that is no answer ({type(error).__name__}: {error}): {shown!r}; it should be {{"tokens": '
            '[ids]}, with "rounds": [[drafted, accepted], …] if they are known'
        ) from error
    return Decoded(tokens, rounds)


def _whole(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{number!r} is no whole number")
    return number
