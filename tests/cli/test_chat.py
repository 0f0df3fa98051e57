"""`chat` in a real terminal: typed at, watched, interrupted."""

import re
import sys

import pytest

pexpect = pytest.importorskip("pexpect")

PROMPT = "you ›"
START = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); " + (
    "from draftproof.cli.main import main; main(sys.argv[1:])"
)


@pytest.fixture
def terminal(model, tmp_path):
    """A chat with a tiny model, ready for input."""
    arguments = ["-c", START, "chat", "--target", model, "--max-tokens", "16", "--seed", "3"]
    environment = {
        "TERM": "xterm-256color",
        "XDG_CACHE_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    child = pexpect.spawn(
        sys.executable, arguments, encoding="utf-8", codec_errors="replace", timeout=180, dimensions=(40, 160),
        env=environment, cwd=str(tmp_path),
    )  # fmt: skip
    child.expect(PROMPT)
    yield child
    child.close(force=True)


def type_in(child, line):
    child.send(line + "\r")


def test_a_conversation(terminal, tmp_path):
    type_in(terminal, "the quick brown fox")
    terminal.expect(r"tokens in [\d.]+ s \([\d.]+ a second\)")
    type_in(terminal, "/help")
    terminal.expect("/compare")
    type_in(terminal, "/rule token")
    terminal.expect("rule token")
    type_in(terminal, "/rounds on")
    terminal.expect("rounds are shown")
    type_in(terminal, "the fox")
    terminal.expect("kept guess")
    terminal.expect("   1  ")
    type_in(terminal, "/save talk.json")
    terminal.expect("saved 4 messages")
    assert (tmp_path / "talk.json").exists()
    type_in(terminal, "/nonsense")
    terminal.expect("there is no /nonsense")
    type_in(terminal, "/quit")
    terminal.expect(pexpect.EOF)


def test_one_prompt_three_ways(terminal):
    type_in(terminal, "/compare on")
    terminal.expect("comparison on")
    type_in(terminal, "the fox")
    terminal.expect("tokens a pass")
    shown = ""
    for name in ("plain", "early-exit:1", "ngram"):
        terminal.expect(rf"{name}\s+[\d.]+\s+[\d.]+×\s+[\d.]+ s")
        shown += terminal.after
    assert len(re.findall("×", shown)) == 3
    terminal.expect(PROMPT)
    terminal.sendeof()
    terminal.expect(pexpect.EOF)


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(terminal):
    type_in(terminal, "/load missing.json")
    terminal.expect("missing.json")
    type_in(terminal, "the fox")
    terminal.sendintr()
    terminal.expect(PROMPT)
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
