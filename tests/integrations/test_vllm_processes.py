"""The plug-in where vLLM uses several processes: an engine core, tensor parallel ranks, the OpenAI server."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from auditor.vllm_models import saved

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
SCRIPT = Path(__file__).parent / "vllm_texts.py"
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.9, "top_p": 0.9}]
SPECULATION = """{"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 4,
    "draftproof": {"rule": "block"}}"""


def run(folder: Path, options: dict, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, str(folder), json.dumps(options), json.dumps(SAMPLINGS)]
    env = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=1200)


def result(done: subprocess.CompletedProcess) -> dict:
    found = re.search(r"RESULT (.*)", done.stdout)
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(found[1])


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("vllm"))[0]


@pytest.fixture(scope="module")
def alone(target) -> dict:
    """The texts of an engine in one process."""
    return result(run(target, {}, VLLM_ENABLE_V1_MULTIPROCESSING="0"))


def test_an_engine_core_in_a_child_process_gives_the_same_texts(target, alone):
    child = result(run(target, {}, VLLM_ENABLE_V1_MULTIPROCESSING="1"))
    assert child["rules"] == ["block"]
    assert child["texts"][:2] == alone["texts"][:2]


def test_tensor_parallel_ranks_agree_with_and_without_seeds(target, alone):
    """Each rank draws by itself, so that what each has sampled is compared. The control is seeded apart.

    Texts without a seed are not compared with those of one process: their numbers come from one generator for all
    requests, and how many requests a step has depends on when they arrive in the engine's process.
    """
    both = result(run(target, {"tensor_parallel_size": 2, "num_gpu_blocks_override": 64}))
    assert both["rules"] == ["block", "block"]
    assert both["texts"][:2] == alone["texts"][:2]
    first, second = both["sampled"]
    assert first == second
    assert sum(token >= 0 for step in first for row in step for token in row) >= 3 * 8 * 24
    assert both["seeded_apart"][0] != both["seeded_apart"][1]


ASKED = {"speculation": {"draftproof": {"rule": "block"}}, "additional_config": {}}


def test_the_setting_is_served_from_the_speculative_config(target, alone):
    there = result(run(target, ASKED, VLLM_ENABLE_V1_MULTIPROCESSING="1"))
    assert there["rules"] == ["block"]
    assert there["texts"][:2] == alone["texts"][:2]


def test_an_engine_does_not_start_where_the_plug_in_is_not_loaded(target):
    done = run(target, ASKED, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_PLUGINS="another")
    assert done.returncode != 0
    assert re.search(r"ValidationError: 1 validation error for SpeculativeConfig\ndraftproof\n", done.stderr)


@pytest.mark.parametrize(
    ("additional", "words"),
    [
        ({"draftproof": {"rule": "blok"}}, "the rule of draftproof must be one of"),
        ({"draftproof": {"rules": "block"}}, "draftproof has the settings"),
        ({"draftproof": "block"}, "the setting 'draftproof' must be a dict"),
        ({"draft-proof": {}}, "did you mean 'draftproof'"),
    ],
)
def test_a_wrong_setting_stops_the_start(target, additional, words):
    assert words in refusal(run(target, {"additional_config": additional}, VLLM_ENABLE_V1_MULTIPROCESSING="0"))


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ({"draftproof": {"rule": "block"}}, "is given twice"),
        ({"rejection_sample_method": "block"}, "contradicts the setting 'draftproof'"),
    ],
)
def test_settings_that_contradict_each_other_stop_the_start(target, speculation, words):
    assert words in refusal(run(target, {"speculation": speculation}, VLLM_ENABLE_V1_MULTIPROCESSING="0"))


def refusal(done: subprocess.CompletedProcess) -> str:
    """Return the sentence by which draftproof refused to start: the last line of a traceback."""
    assert done.returncode != 0
    found = re.search(r"RefusedError: (.*)\s*$", done.stderr)
    assert found, done.stderr[-2000:]
    return found[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from draftproof.models import bundled

    log = tmp_path_factory.mktemp("server") / "log.txt"
    port = 18_000 + os.getpid() % 1000
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(bundled.fetch())]
    command += ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--port", str(port), "--speculative-config", SPECULATION]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"})
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield port, log
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    for _ in range(300):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except OSError:
            time.sleep(1)
    pytest.fail("the server did not start: " + log.read_text()[-4000:])


def ask(port: int, **fields) -> dict:
    messages = [{"role": "user", "content": "Say: one two three one two three one two three"}]
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 32, **fields}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
    return json.loads(urllib.request.urlopen(request, timeout=300).read())


def test_the_openai_server_serves_all_kinds_of_requests_together(server):
    port, log = server
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["n"],
    }
    grammar = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    asked = [
        {"min_p": 0.1, "temperature": 1.0},
        {"logit_bias": {"28": 5}, "temperature": 0.7},
        {"seed": 3, "temperature": 0.8},
        {"seed": 3, "temperature": 0.8},
        {"logprobs": True, "top_logprobs": 2, "temperature": 0.6, "top_k": 20},
        {"response_format": grammar, "temperature": 1.0},
        {"n": 3, "temperature": 1.0, "presence_penalty": 0.5},
        {"stop": ["three"], "temperature": 0.0},
        {"bad_words": ["two"], "temperature": 0.5},
        {"structured_outputs": {"choice": ["yes yes yes", "no no no"]}, "temperature": 1.0},
        {"structured_outputs": {"regex": "[a-d]{8,30}"}, "temperature": 1.0, "min_tokens": 20, "logprobs": True},
        {"allowed_token_ids": list(range(0, 49_152, 2)), "temperature": 1.0, "top_p": 0.9, "return_token_ids": True},
        {"prompt_logprobs": 1, "min_tokens": 32, "repetition_penalty": 1.1, "min_p": 0.05, "top_p": 0.9},
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda fields: ask(port, **fields), asked))
    texts = [[choice["message"]["content"] for choice in answer["choices"]] for answer in answers]
    assert texts[2] == texts[3]
    assert len(answers[4]["choices"][0]["logprobs"]["content"]) == answers[4]["usage"]["completion_tokens"]
    assert isinstance(json.loads(texts[5][0])["n"], int)
    assert len(texts[6]) == 3
    assert "three" not in texts[7][0]
    assert "two" not in texts[8][0]
    assert texts[9][0] in ("yes yes yes", "no no no")
    assert re.fullmatch("[a-d]{8,30}", texts[10][0])
    assert not any(token % 2 for token in answers[11]["choices"][0]["token_ids"])
    assert len(answers[12]["prompt_logprobs"]) == answers[12]["usage"]["prompt_tokens"]
    assert answers[12]["usage"]["completion_tokens"] == 32
    assert "verifies drafts by the rule 'block'" in log.read_text()


def test_the_server_reports_accepted_tokens(server):
    port, _ = server
    ask(port, temperature=0.0)
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    accepted = re.search(r"^vllm:spec_decode_num_accepted_tokens_total.* ([\d.e+]+)$", metrics, re.MULTILINE)
    assert accepted
    assert float(accepted[1]) > 0
