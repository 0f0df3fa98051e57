"""`draftproof chat` in a pseudo-terminal: input, answers, interrupts."""

import io
import json
import re
import sys

import pytest

from cli.tiny import save_model

pexpect = pytest.importorskip("pexpect")

PROMPT = "you ›"
LINE_TAKEN = "\x1b[?2004l"  # prompt_toolkit has accepted the line; an answer follows
START = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); " + (
    "from draftproof.cli.main import main; main(sys.argv[1:])"
)


@pytest.fixture
def chat(tmp_path):
    """Return a function that starts a chat with a model and waits for its prompt."""
    environment = {
        "TERM": "xterm-256color",
        "XDG_CACHE_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    children = []

    def start(model, most):
        arguments = ["-c", START, "chat", "--target", str(model), "--max-tokens", str(most), "--seed", "3"]
        child = pexpect.spawn(
            sys.executable, arguments, encoding="utf-8", codec_errors="replace", timeout=180, dimensions=(40, 160),
            env=environment, cwd=str(tmp_path),
        )  # fmt: skip
        children.append(child)
        child.expect(PROMPT)
        return child

    yield start
    for child in children:
        child.close(force=True)


@pytest.fixture
def terminal(chat, model):
    return chat(model, 16)


def type_in(child, line):
    child.send(line + "\r")


def test_a_conversation_whose_first_message_has_two_lines(terminal, tmp_path):
    type_in(terminal, "the quick\x1b\rbrown fox")  # Alt-Enter, which begins a new line
    terminal.expect(r"tokens in [\d.]+ s \([\d.]+ tokens/s\)")
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
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert messages[0]["content"] == "the quick\nbrown fox"
    type_in(terminal, "/nonsense")
    terminal.expect("there is no command /nonsense")
    type_in(terminal, "/quit")
    terminal.expect(pexpect.EOF)


def test_one_prompt_with_three_drafters(terminal):
    type_in(terminal, "/compare on")
    terminal.expect("comparison on")
    type_in(terminal, "the fox")
    terminal.expect("tokens per pass")
    shown = ""
    for name in ("plain", "early-exit:1", "ngram"):
        terminal.expect(rf"{name}\s+[\d.]+\s+[\d.]+×\s+[\d.]+ s")
        shown += terminal.after
    assert len(re.findall("×", shown)) == 3
    terminal.expect("a different random draw")
    terminal.expect(PROMPT)
    terminal.sendeof()
    terminal.expect(pexpect.EOF)


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(chat, tmp_path):
    """Each key is sent only once the prompt, or an answer, is there to receive it."""
    terminal = chat(save_model(tmp_path / "endless", endless=True), 8000)
    type_in(terminal, "/load missing.json")
    terminal.expect("No such file")
    terminal.expect(PROMPT)
    type_in(terminal, "the fox")
    terminal.expect_exact("the fox")
    terminal.expect_exact(LINE_TAKEN)
    terminal.expect(r"\S{20}")
    terminal.sendintr()
    terminal.expect_exact("(stopped)")
    terminal.expect(PROMPT)
    terminal.sendeof()
    terminal.expect(pexpect.EOF)


def test_a_chat_on_a_pipe_names_the_line_that_is_not_utf_8(run, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"/seed 1\ncaf\xe9\n")))
    said = run("chat", "--target", model, "--max-tokens", "4")
    assert said.status == 2
    assert "seed 1" in said.out
    assert "stdin, line 2: not valid UTF-8 (byte 0xe9 at offset 3)" in said.err
