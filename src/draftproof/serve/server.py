"""Run the app: bind a socket, serve, and drain at the first signal."""

import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable
from threading import Thread, Timer
from types import FrameType
from typing import Any, Final

import uvicorn

from draftproof.serve.app import create_app
from draftproof.serve.middleware import JsonLogs
from draftproof.serve.state import State

BACKLOG: Final = 2048
"""Connections that may wait to be accepted."""

KEEP_ALIVE_SECONDS: Final = 75
"""Time after which an idle connection is closed.

Longer than clients keep theirs (5 s in httpx and so in `openai`, 15 s in aiohttp, 60 s in most proxies): a request that
is sent while the server closes its connection gets no answer.
"""

STOP_SECONDS: Final = 1.0
"""Time that requests have to say that they were cancelled, after the second signal."""


class DrainingServer(uvicorn.Server):
    """A server that lets requests end at the first SIGTERM or SIGINT and cancels them at the second; its status is 0.

    uvicorn's own would cut connections off at the second signal, and raise the first one again at its end.
    """

    def __init__(self, config: uvicorn.Config, state: State, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._state, self._on_started = state, on_started

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._cancel_all()
        self.should_exit = self._state.draining = True

    def _cancel_all(self) -> None:
        """Let all requests end with an error, then cut off those that do not."""
        Thread(target=self._state.close, daemon=True).start()
        cut_off = Timer(STOP_SECONDS, lambda: setattr(self, "force_exit", True))
        cut_off.daemon = True
        cut_off.start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket, so that a port that is taken is reported before the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from error
    return bound


def server_for(state: State, on_started: Callable[[], None] = lambda: None) -> DrainingServer:
    """Return the server of a state, which does not run yet; `on_started` is called when it accepts requests."""
    config = uvicorn.Config(
        create_app(state),
        log_config=None,
        access_log=False,
        lifespan="on",
        backlog=BACKLOG,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    return DrainingServer(config, state, on_started)


def run(state: State, bound: socket.socket, on_started: Callable[[], None] = lambda: None) -> None:
    """Serve until a signal comes and the requests that run have ended.

    What was loaded lives as long as the process: without `freeze` every full garbage collection would look through it,
    and all streams wait. Signals that come after the end are ignored, so that they do not change the exit status.
    """
    server = server_for(state, on_started)
    set_signal_handlers(server.handle_exit)  # uvicorn restores them before its event loop is closed
    gc.freeze()
    try:
        server.run(sockets=[bound])
    finally:
        set_signal_handlers(signal.SIG_IGN)
        gc.unfreeze()  # extensions report what is left at the end of the process as leaks
        state.close()


def set_signal_handlers(handler: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def set_up_logs(log_format: str) -> None:
    """Write the server's log to stderr: one line for each request, as text or as JSON."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    text: Any = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLogs() if log_format == "json" else text)
    for name, level in (("draftproof.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
