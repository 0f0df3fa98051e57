"""Run the app: bind a socket, serve, and drain at the first signal."""

import logging
import os
import socket
import sys
from collections.abc import Callable
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

KERNELS_KEPT: Final = 256
"""Kernels that oneDNN keeps, each for one number of rows, of 0.6 MB and compiled in 0.6 ms; it would keep 1024."""


class DrainingServer(uvicorn.Server):
    """A server that ends gently at the first SIGTERM or SIGINT and at once at the second, with exit status 0.

    uvicorn's own would raise the signal again after it has shut down, and exit with its status.
    """

    def __init__(self, config: uvicorn.Config, state: State, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._state, self._on_started = state, on_started

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = self._state.draining = True

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


def limit_kernel_cache() -> None:
    """Bound the memory of compiled products, unless the environment does; to be called before the first one."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS_KEPT))


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
    """Serve until a signal comes and the requests that run have ended."""
    try:
        server_for(state, on_started).run(sockets=[bound])
    finally:
        state.close()


def set_up_logs(log_format: str) -> None:
    """Write the server's log to stderr: one line for each request, as text or as JSON."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    text: Any = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLogs() if log_format == "json" else text)
    for name, level in (("draftproof.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
