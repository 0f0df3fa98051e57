"""What is wrong with a request is said in OpenAI's error object, with the status that clients expect."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serve.running import CHAT, TEXT, WAIT, load, serving, wait_for

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}
CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]}


def refused(server, path, body, status=400):
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHATS, {"temperature": -1}, "temperature"),
        (CHATS, {"temperature": "hot"}, "temperature"),
        (CHATS, {"top_p": 0}, "top_p"),
        (CHATS, {"n": 0}, "n"),
        (CHATS, {"n": 129}, "n"),
        (CHATS, {"seed": 2**63}, "seed"),
        (CHATS, {"seed": True}, "seed"),
        (CHATS, {"messages": []}, "messages"),
        (CHATS, {"messages": "hi"}, "messages"),
        (CHATS, {"messages": [{"content": "no role"}]}, "messages.0.role"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHATS, {"top_logprobs": 2}, "top_logprobs"),
        (CHATS, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHATS, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        (CHATS, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (CHATS, {"response_format": {"type": "xml"}}, "response_format"),
        (CHATS, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHATS, {"response_format": BAD_SCHEMA}, "response_format"),
        (CHATS, {"tool_choice": "required"}, "tool_choice"),
        (CHATS, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (CHATS, {"rule": "lossy"}, "rule"),
        (CHATS, {"num_draft_tokens": 65}, "num_draft_tokens"),
        (CHATS, {"drafter": 1}, "drafter"),
        (CHATS, {"stop": ["x"] * 33}, "stop"),
        (CHATS, {"stop": [""]}, "stop"),
        (CHATS, {"stop": 5}, "stop"),
        (CHATS, {"logit_bias": {"a": 1}}, "logit_bias"),
        (CHATS, {"logit_bias": {"999999": 1}}, "logit_bias"),
        (CHATS, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        (CHATS, {"stop_token_ids": [999999]}, "stop_token_ids"),
        (CHATS, {"tool_choice": "some"}, "tool_choice"),
        (CHATS, {"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content"),
        (CHATS, {"messages": [CALLING]}, "messages"),
        (CHATS, {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format"),
        (TEXTS, {"prompt": 5}, "prompt"),
        (TEXTS, {"prompt": ["a", [1]]}, "prompt"),
        (TEXTS, {"prompt": [-1]}, "prompt"),
        (TEXTS, {"prompt": [999999]}, "prompt"),
        (TEXTS, {"prompt": [10**30]}, "prompt"),
        (TEXTS, {"prompt": ["a"] * 129}, "prompt"),
        (TEXTS, {"logprobs": 21}, "logprobs"),
        (TEXTS, {"max_tokens": -1}, "max_tokens"),
        (TEXTS, {"max_tokens": 1.5}, "max_tokens"),
        # fields that would change the text
        (CHATS, {"functions": [{"name": "f"}]}, "functions"),
        (CHATS, {"reasoning_effort": "low"}, "reasoning_effort"),
        (CHATS, {"temprature": 0}, "temprature"),
        (TEXTS, {"best_of": 2}, "best_of"),
        (TEXTS, {"suffix": "end"}, "suffix"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(server, path, fields, param):
    error = refused(server, path, (CHAT if path == CHATS else TEXT) | fields)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split(".")[-1] in error["message"] or "prompt" in error["message"] or "texts" in error["message"]


def test_harmless_fields_are_ignored(server):
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "suffix": None}
    assert server.complete(seed=1, **harmless)["choices"] == server.complete(seed=1)["choices"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"messages": ' + b"[" * 5000, b"1" * 5000])
def test_a_body_that_is_no_object_is_a_400(server, body):
    answer = server.client.post(CHATS, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_without_its_content_type_says_what_is_missing(server):
    answer = server.client.post(CHATS, content=json.dumps(CHAT), headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_half_a_surrogate_pair_in_a_prompt_is_a_400(server):
    body = '{"prompt": "a \\ud800 b"}'
    answer = server.client.post(TEXTS, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "lone surrogate" in answer.json()["error"]["message"]


def test_half_a_surrogate_pair_in_a_name_does_not_break_the_answer(server):
    body = json.dumps(CHAT)[:-1] + ', "model": "\\ud800"}'
    answer = server.client.post(CHATS, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 404
    assert "not served here" in answer.json()["error"]["message"]


def test_another_model_is_a_404(server):
    assert refused(server, CHATS, CHAT | {"model": "gpt-9"}, 404)["code"] == "model_not_found"
    assert server.client.get("/v1/models/gpt-9").status_code == 404
    assert server.client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert server.chat(model="tiny")


def test_an_unknown_path_and_a_wrong_method(server):
    assert server.client.get("/v2/models").json()["error"]["type"] == "not_found_error"
    assert server.client.get(CHATS).status_code == 405


def test_a_template_that_refuses_is_a_400(folder):
    template = "{{ raise_exception('users must go first') }}"
    with serving(load(folder), chat_template=template) as strict:
        assert "users must go first" in refused(strict, CHATS, CHAT)["message"]


def test_a_prompt_that_is_too_long_is_refused(folder):
    with serving(load(folder, max_length=64), max_prompt=20) as small:
        error = refused(small, TEXTS, TEXT | {"prompt": [1] * 21})
        assert error["code"] == "context_length_exceeded"
        assert "21 tokens" in error["message"]
        assert small.complete(prompt=[1] * 20)
    with serving(load(folder, max_length=64)) as small:
        assert "at most 63" in refused(small, TEXTS, TEXT | {"prompt": [1] * 64})["message"]


def test_an_error_of_a_grammar_does_not_show_the_parsers_state(server):
    endless = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
    message = refused(server, TEXTS, TEXT | {"response_format": endless})["message"]
    assert "llguidance" in message
    assert len(message) < 200


def test_a_grammar_that_leaves_nothing_is_the_requests_fault(server):
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}
    error = refused(server, TEXTS, TEXT | {"response_format": schema, "min_tokens": 9, "max_tokens": 20})
    assert error["code"] == "generation_failed"
    events = server.stream_text(response_format=schema, min_tokens=9, max_tokens=20)
    assert events[-1]["error"]["code"] == "generation_failed"


# ------------------------------------------------------------------------------------------------------ load and ruin


def test_a_full_queue_is_a_429_and_room_comes_again(endless_folder):
    """The queue is bounded (vLLM 18826)."""
    with serving(load(endless_folder, max_batch=1), max_queue=2) as small:
        with httpx.Client(base_url=small.url, timeout=WAIT) as others:
            held = threading.Event()
            step = small.engine._loop.scheduler.parts
            small.engine._loop.scheduler.parts = lambda: (held.wait(WAIT), step())[1]
            threads = [
                threading.Thread(target=others.post, args=(TEXTS,), kwargs={"json": TEXT | {"max_tokens": 2}})
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            wait_for(lambda: small.state.service.waiting == 2)
            answer = small.post(TEXTS, TEXT)
            held.set()
            assert answer.status_code == 429
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
            for thread in threads:
                thread.join(WAIT)
        assert small.complete(max_tokens=2)
        assert "at most 2" in refused(small, TEXTS, TEXT | {"n": 3})["message"]


def test_prompts_that_wait_to_be_read_are_bounded_too(endless_folder):
    with serving(load(endless_folder), max_queue=3) as small:
        reading = threading.Event()
        small.state.preparing.submit(reading.wait, WAIT)
        with ThreadPoolExecutor(3) as others:
            answers = [others.submit(small.post, TEXTS, TEXT | {"max_tokens": 1}) for _ in range(3)]
            wait_for(lambda: small.state.in_preparation == 3)
            for path, body in ((TEXTS, TEXT), ("/tokenize", {"prompt": "fox"})):
                assert refused(small, path, body, 429)["code"] == "queue_full"
            reading.set()
            assert [answer.result().status_code for answer in answers] == [200] * 3
        assert small.state.in_preparation == 0
        assert small.complete(max_tokens=1)


def test_n_texts_are_taken_all_or_none(endless_folder):
    with serving(load(endless_folder, max_batch=1), max_queue=4) as small:
        held = threading.Event()
        step = small.engine._loop.scheduler.parts
        small.engine._loop.scheduler.parts = lambda: (held.wait(WAIT), step())[1]
        thread = threading.Thread(target=small.complete, kwargs={"max_tokens": 2, "n": 2})
        thread.start()
        wait_for(lambda: small.state.service.waiting == 2)
        assert small.post(TEXTS, TEXT | {"n": 4}).status_code == 429
        held.set()
        thread.join(WAIT)
        wait_for(small.is_idle)
        assert small.complete(max_tokens=2)


def test_a_dead_engine_is_told_everywhere(endless_folder):
    """The thread is dead while GETs could still answer (mlx-lm 1834)."""
    with serving(load(endless_folder)) as dying:
        assert dying.client.get("/health").json() == {"status": "ok"}
        answers = []
        thread = threading.Thread(target=lambda: answers.append(dying.post(TEXTS, TEXT | {"max_tokens": 3000})))
        thread.start()
        wait_for(lambda: dying.state.service.running > 0)

        def broken():
            raise RuntimeError("out of memory")

        dying.engine._loop.scheduler.parts = broken
        thread.join(WAIT)
        assert answers[0].status_code == 503
        assert "out of memory" in answers[0].json()["error"]["message"]
        health = dying.client.get("/health")
        assert health.status_code == 503
        assert "out of memory" in health.json()["status"]
        assert refused(dying, TEXTS, TEXT, 503)["code"] == "engine_stopped"


def test_a_round_that_hangs_is_told_by_health_until_it_ends(endless_folder):
    with serving(load(endless_folder), max_round=0.2) as slow:
        going_on = threading.Event()
        step = slow.engine._loop.scheduler.parts
        slow.engine._loop.scheduler.parts = lambda: (going_on.wait(WAIT), step())[1]
        assert slow.client.get("/health").status_code == 200, "nothing to do is no reason to complain"
        thread = threading.Thread(target=slow.complete, kwargs={"max_tokens": 2})
        thread.start()
        wait_for(lambda: slow.client.get("/health").status_code == 503)
        assert "hangs" in slow.client.get("/health").json()["status"]
        going_on.set()
        thread.join(WAIT)
        wait_for(lambda: slow.client.get("/health").status_code == 200)


def test_the_time_in_which_a_prompt_waits_to_be_read_counts(endless_folder):
    with serving(load(endless_folder), request_timeout=0.3) as hasty:
        hasty.state.preparing.submit(time.sleep, 0.5)
        assert refused(hasty, TEXTS, TEXT, 503)["code"] == "timeout"


def test_a_request_that_takes_too_long_ends(endless_folder):
    long = {"max_tokens": 4000, "num_draft_tokens": 0}  # drafted, a repeated text of 4000 tokens may end in time
    with serving(load(endless_folder), request_timeout=0.3) as hasty:
        error = refused(hasty, TEXTS, TEXT | long, 503)
        assert error["code"] == "timeout"
        events = hasty.stream_text(**long)
        assert events[-1]["error"]["code"] == "timeout"
        wait_for(hasty.is_idle)
        assert hasty.complete(max_tokens=1)
