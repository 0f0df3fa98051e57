"""`draftproof serve` as a process: its banner, an answer, and its end at a signal."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import httpx
import pytest

from cli.conftest import run  # noqa: F401  (a fixture)
from draftproof.cli.serve import Size, banner
from draftproof.serve.server import bind, server_for
from draftproof.serve.settings import Settings
from draftproof.serve.state import State
from serve.running import CHAT, WAIT, load, wait_for


def start(folder, *options):
    command = [sys.executable, "-m", "draftproof.cli", "serve", folder, "--drafter", "ngram", "--port", "0", *options]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    lines = [process.stdout.readline() for _ in range(4)]
    url = re.search(r"http://127\.0\.0\.1:\d+", lines[1])
    assert url, "".join(lines) + process.stderr.read()
    return process, url[0], lines


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=WAIT)


def test_it_serves_drains_at_the_first_signal_and_exits_0(endless_folder):
    process, url, lines = start(endless_folder, "--log-format", "json", "--served-model-name", "mine")
    try:
        assert "Serving mine" in lines[0]
        assert f"curl {url}/v1/chat/completions" in lines[3]
        answer = json.load(post(f"{url}/v1/chat/completions", CHAT))
        assert answer["model"] == "mine"
        stream = post(f"{url}/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 150, "ignore_eos": True})
        first = stream.readline()
        feed = urllib.request.urlopen(f"{url}/events", timeout=WAIT)
        process.send_signal(signal.SIGTERM)
        rest = stream.read().decode()
        assert first.startswith(b"data: ")
        assert rest.rstrip().endswith("data: [DONE]"), "the stream that ran is completed"
        assert '"finish_reason":"length"' in rest
        feed.read()  # ends, too
        assert process.wait(WAIT) == 0
        log = [json.loads(line) for line in process.stderr.read().splitlines() if line.startswith("{")]
        assert {"path": "/v1/chat/completions", "status": 200}.items() <= log[0].items()
    finally:
        process.kill()
        process.communicate()


def test_a_signal_after_the_end_does_not_change_the_exit_status(endless_folder):
    process, _, _ = start(endless_folder)
    try:
        for _ in range(100):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        assert process.wait(WAIT) == 0
        assert process.stderr.read().replace("Loading weights", "").count("leak") == 0
    finally:
        process.kill()
        process.communicate()


def test_a_second_signal_stops_at_once(endless_folder):
    state, bound, started = State.open(load(endless_folder), Settings("tiny")), bind("127.0.0.1", 0), threading.Event()
    server = server_for(state, started.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        assert started.wait(WAIT)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1/chat/completions"
        long = CHAT | {"max_tokens": 3000, "drafter": False}
        stream, plain = post(url, long | {"stream": True}), []
        stream.readline()
        waiting = threading.Thread(target=lambda: plain.append(httpx.post(url, json=long, timeout=WAIT)))
        waiting.start()
        wait_for(lambda: state.service.running == 2)
        server.handle_exit(signal.SIGTERM, None)
        thread.join(0.5)
        assert thread.is_alive(), "the first lets the stream go on"
        server.handle_exit(signal.SIGTERM, None)
        thread.join(WAIT)
        assert not thread.is_alive()
        assert state.metrics.totals.emitted < 2900, "the texts were cancelled"
        last, done = stream.read().decode().rstrip().split("\n\n")[-2:]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
        assert done == "data: [DONE]"
        waiting.join(WAIT)
        assert plain[0].status_code == 503
        assert plain[0].json()["error"]["code"] == "engine_stopped"
    finally:
        server.force_exit = True
        state.close()


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(run):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", "no-such-model", "--port", str(taken.getsockname()[1]))
    assert result.status == 1
    assert "choose another --port" in result.err


def test_missing_packages_are_named_with_what_to_install(run, monkeypatch):  # noqa: F811
    from draftproof.cli import serve

    monkeypatch.setattr(serve, "PACKAGES", ("no_such_package_at_all",))
    result = run("serve")
    assert result.status == 1
    assert 'pip install "draftproof[serve]"' in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "value"), [("2GiB", 2**31), ("500M", 5 * 10**8), ("0.5", 0.5), ("1024", 1024), ("1.5 k", 1500)]
)
def test_sizes(text, value):
    assert Size(share=True).convert(text, None, None) == value


@pytest.mark.parametrize("text", ["", "two", "2TB", "-1", "0", "0.0"])
def test_sizes_that_are_none(run, text):  # noqa: F811
    result = run("serve", "--kv-memory", text)
    assert result.status == 2
    assert "--kv-memory" in result.err


def test_a_prefix_that_prometheus_would_refuse(run):  # noqa: F811
    assert "--metrics-prefix" in run("serve", "--metrics-prefix", "a b").err


def test_the_help_teaches(run):  # noqa: F811
    text = run("serve", "--help").out
    for word in ("curl", "--api-key", "base URL", "seed", "SIGTERM", "draftproof[serve]"):
        assert word in text


def test_the_banner_names_a_key_and_an_address_that_works():
    shown = banner("smollm2", "smollm2", "0.0.0.0", 8000, ("k",))
    assert "http://127.0.0.1:8000/v1" in shown
    assert "Bearer $KEY" in shown
    assert "http://[::1]:80/" in banner("a", "a", "::1", 80, ())


def test_a_free_port_is_bound():
    with bind("127.0.0.1", 0) as bound:
        assert bound.getsockname()[1] > 0
