"""The package's prompts: enough of each kind, of realistic lengths, and replaceable by a file."""

import re

import pytest

from draftproof.bench.prompts import pick, read

KINDS = ["chat", "translation", "summarising", "question-answering", "mathematics", "code-editing"]


def of(kind):
    return [prompt.prompt for prompt in read() if prompt.kind == kind]


def test_there_are_six_kinds_of_eight():
    assert list(dict.fromkeys(p.kind for p in read())) == KINDS
    assert all(len(of(kind)) >= 8 for kind in KINDS)


def test_passages_to_summarise_are_pages_not_lines():
    assert all(150 <= len(prompt.split("\n\n", 1)[1].split()) <= 300 for prompt in of("summarising"))


def test_summaries_are_asked_for_in_several_ways():
    asked = {prompt.split("\n\n", 1)[0] for prompt in of("summarising")}
    assert len(asked) >= 3


def test_files_to_edit_are_whole_python_files():
    for prompt in of("code-editing"):
        code = re.search(r"```python\n(.*)```", prompt, re.S)[1]
        compile(code, "edited.py", "exec")
        assert 25 <= len(code.splitlines()) <= 50
        assert "Give back the full file" in prompt


def test_prompts_are_picked_by_kind_and_number():
    assert [p.kind for p in pick(read(), ["chat", "mathematics"], 2)] == ["chat"] * 2 + ["mathematics"] * 2
    with pytest.raises(ValueError, match="kinds are chat"):
        pick(read(), ["poetry"])


@pytest.mark.parametrize("text", ["", '{"id": "a", "prompt": "x"}', "fox", '{"id":"a","kind":"b","prompt":"c"}\n' * 2])
def test_a_wrong_file_is_refused(tmp_path, text):
    file = tmp_path / "mine.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"mine\.jsonl"):
        read(file)


@pytest.mark.parametrize("prompt", [b'"caf\xe9"', rb'"caf\ud800"', b"5"])
def test_a_prompt_that_is_no_valid_text_is_refused_with_its_line(tmp_path, prompt):
    file = tmp_path / "prompts.jsonl"
    good = '{"id": "1", "kind": "chat", "prompt": "one\u2028two"}'.encode()
    file.write_bytes(good + b'\n{"id": "2", "kind": "chat", "prompt": ' + prompt + b"}\n")
    with pytest.raises(ValueError, match=r"line 2: wanted .* in valid UTF-8"):
        read(file)
    file.write_bytes(good + b"\n")
    assert read(file)[0].prompt == "one\u2028two"
