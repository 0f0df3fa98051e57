"""A client that goes away frees its place between two rounds, in streams and in plain requests."""

import asyncio
import json
import socket
import threading
import time

import pytest

from draftproof.core.sampling import SamplingParams
from draftproof.serve.middleware import BodyLimit
from draftproof.serve.streaming import ClientGoneError, EventStream, unless_gone
from serve.running import TEXT, WAIT, wait_for

LONG = TEXT | {"max_tokens": 3000}
"""Takes many times longer than the tests wait."""


def send(server, body):
    """Send a request by hand, and return its socket."""
    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)), WAIT)
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(content)}", "", ""))
    opened.sendall(head.encode() + content)
    return opened


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(endless, stream):
    expected = endless.engine.generate(TEXT["prompt"], SamplingParams(seed=9), max_tokens=12, chat=False).text
    emitted = endless.state.metrics.totals.emitted
    opened = send(endless, LONG | {"stream": stream, "seed": 1})
    wait_for(lambda: endless.state.metrics.totals.emitted > emitted + 3)
    opened.close()
    wait_for(endless.is_idle)
    assert endless.state.metrics.totals.emitted < emitted + 2900, "it was cancelled, and did not run to its end"
    assert endless.complete(seed=9)["choices"][0]["text"] == expected, "nothing of it in another's text (mlx-lm 965)"


def test_a_client_that_leaves_the_queue_is_not_served(endless):
    openeds = [send(endless, LONG | {"n": 8}), send(endless, LONG | {"n": 8})]
    wait_for(lambda: endless.state.service.waiting > 0)
    for opened in openeds:
        opened.close()
    wait_for(endless.is_idle)


def test_a_client_that_sends_half_a_body_leaves_nothing(endless):
    opened = send(endless, LONG)
    opened.close()
    host, port = endless.url.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)), WAIT)
    opened.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    opened.close()
    wait_for(endless.is_idle)
    assert endless.complete()


def test_a_body_that_stops_halfway_is_a_408():
    sent = []

    async def receive():
        if not sent:
            sent.append("half")
            return {"type": "http.request", "body": b"{", "more_body": True}
        await asyncio.sleep(WAIT)

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        raise AssertionError("the app is not reached")

    scope = {"type": "http", "method": "POST", "headers": []}
    asyncio.run(BodyLimit(app, most=100, seconds=0.05)(scope, receive, send))
    assert sent[1]["status"] == 408
    assert json.loads(sent[2]["body"])["error"]["code"] == "body_timeout"


def test_a_slow_reader_gets_all_of_its_text(endless):
    opened = send(endless, TEXT | {"max_tokens": 300, "stream": True, "seed": 3})
    time.sleep(0.2)
    received = b""
    while not received.endswith(b"\r\n0\r\n\r\n"):  # the last chunk of a chunked body has length 0
        received += opened.recv(256)
    opened.close()
    lines = [line for line in received.decode().splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)
    assert text == endless.complete(max_tokens=300, seed=3)["choices"][0]["text"]


# --------------------------------------------------------------------------------------------- without a server


def test_work_is_cancelled_when_the_client_goes():
    seen = []

    async def receive():
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def work():
        try:
            await asyncio.sleep(WAIT)
        finally:
            seen.append("ended")

    with pytest.raises(ClientGoneError):
        asyncio.run(unless_gone(receive, work()))
    assert seen == ["ended"]


def test_a_stream_that_never_started_is_closed_too():
    closed = []

    async def events():
        yield "data: 1\n\n"

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        raise OSError("gone before the headers")

    with pytest.raises(OSError, match="gone"):
        asyncio.run(EventStream(events(), lambda: closed.append(1))({}, receive, send))
    assert closed == [1]


def test_neighbours_that_come_and_go_do_not_change_a_seeded_text(endless):
    """The tokens are the same (vLLM 51226); this model's log-probabilities are up to the rounding of float32."""
    fields = {"seed": 5, "max_tokens": 40, "logprobs": 2, "return_token_ids": True}
    [alone] = endless.complete(**fields)["choices"]
    sockets = [send(endless, LONG | {"seed": i, "rule": rule}) for i, rule in enumerate(("coupled", "token", "tree"))]
    wait_for(lambda: endless.state.service.running == 3)
    threading.Timer(0.02, sockets[0].close).start()
    [beside] = endless.complete(**fields)["choices"]
    for opened in sockets:
        opened.close()
    wait_for(endless.is_idle)
    rounded = [choice.pop("logprobs")["token_logprobs"] for choice in (beside, alone)]
    assert beside == alone
    assert rounded[0] == pytest.approx(rounded[1], abs=1e-5)


def test_what_is_submitted_for_a_client_that_is_gone_is_cancelled(endless):
    """The client leaves while its prompt is still being read on the other thread."""
    endless.state.preparing.submit(time.sleep, 0.3)
    opened = send(endless, LONG | {"seed": 4})
    time.sleep(0.1)
    opened.close()
    time.sleep(0.3)
    wait_for(endless.is_idle)
