"""Keys, limits, ids, origins, the other routes, and the metrics."""

import json
import logging

import httpx
import pytest

from draftproof.serve.middleware import JsonLogs
from serve.running import CHAT, WAIT, load, serving, wait_for

CHATS = "/v1/chat/completions"


def test_a_key_is_asked_for_everywhere_but_for_health_and_the_page(folder):
    with serving(load(folder), api_keys=("secret", "other")) as locked:
        for key in (None, "wrong", "secre", "secret2", "é"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
            answer = locked.post(CHATS, CHAT, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/events", "/v1/health"):
            assert locked.client.get(path).status_code == 401, path
        assert locked.client.get("/health").status_code == 200
        assert locked.client.get("/").status_code in (200, 404)
        for key in ("secret", "other"):
            assert locked.post(CHATS, CHAT, headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_a_body_that_is_too_large_is_a_413(folder):
    with serving(load(folder), max_body=2000) as small:
        big = CHAT | {"user": "x" * 2000}
        answer = small.post(CHATS, big)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"

        def pieces():
            yield json.dumps(big).encode()

        answer = small.client.post(CHATS, content=pieces(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413, "also without a Content-Length"
        assert small.chat()


def test_other_origins_are_let_in_when_they_are_named(folder):
    preflight = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    with serving(load(folder), cors_origins=("http://a.example",), api_keys=("k",)) as open_server:
        answer = open_server.client.options(CHATS, headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "http://a.example"
        refused = open_server.client.options(CHATS, headers=preflight | {"Origin": "http://b.example"})
        assert "access-control-allow-origin" not in refused.headers


def test_every_request_has_an_id(server):
    answer = server.post(CHATS, CHAT, headers={"X-Request-Id": "my-id.7"})
    assert answer.headers["x-request-id"] == "my-id.7"
    assert answer.json()["id"] == "chatcmpl-my-id.7"
    for bad in ("a b", "x" * 200):
        own = server.post(CHATS, CHAT, headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert own != bad
        assert len(own) == 32
    assert server.client.get("/nothing").headers["x-request-id"]


def test_the_log_names_the_request(server, caplog):
    with caplog.at_level(logging.INFO, "draftproof.serve"):
        server.post(CHATS, CHAT, headers={"X-Request-Id": "find-me"})
    [record] = [record for record in caplog.records if "find-me" in record.getMessage()]
    entry = json.loads(JsonLogs().format(record))
    assert entry["request_id"] == "find-me"
    assert (entry["status"], entry["path"]) == (200, CHATS)


def test_models_version_and_tokens(server):
    [model] = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["max_model_len"] == server.state.max_length
    assert server.client.get("/models").json()["data"] == [model]
    assert set(server.client.get("/version").json()) == {"version"}
    text = "the quick größe 日本"
    tokens = server.engine.tokenizer.encode(text)
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert (answer["tokens"], answer["count"]) == (tokens, len(tokens))
    assert len(answer["token_strs"]) == len(tokens)
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    chat = server.post("/v1/tokenize", {"messages": CHAT["messages"]}).json()["tokens"]
    assert chat == server.chat(return_token_ids=True)["prompt_token_ids"]
    for wrong in ({}, {"prompt": "a", "messages": CHAT["messages"]}):
        assert server.post("/tokenize", wrong).status_code == 400
    assert server.post("/detokenize", {"tokens": [10**6]}).status_code == 400


def test_content_may_come_in_parts_and_a_last_message_may_be_continued(server):
    parts = [{"type": "text", "text": "the quick"}, {"type": "text", "text": "fox"}]
    asked = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick\nfox"}]
    assert server.chat(messages=asked, seed=1)["choices"] == server.chat(messages=plain, seed=1)["choices"]
    begun = [*plain, {"role": "assistant", "content": "the lazy"}]
    continued = server.chat(messages=begun, continue_final_message=True, return_token_ids=True)["prompt_token_ids"]
    assert server.engine.tokenizer.decode(continued).endswith("assistant\nthe lazy")
    opened = server.chat(messages=begun, return_token_ids=True)["prompt_token_ids"]
    assert server.engine.tokenizer.decode(opened).endswith("the lazy<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_of_the_servers_own_and_its_variables(folder):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood | default('calm') }}"
    with serving(load(folder), chat_template=template) as styled:
        decode = styled.engine.tokenizer.decode
        first = styled.chat(messages=[{"role": "user", "content": "fox"}], return_token_ids=True)
        assert decode(first["prompt_token_ids"]) == "[fox]calm"
        fields = {"messages": [{"role": "user", "content": "fox"}], "chat_template_kwargs": {"mood": "wild"}}
        assert decode(styled.chat(**fields, return_token_ids=True)["prompt_token_ids"]) == "[fox]wild"


# ------------------------------------------------------------------------------------------------------------- metrics


def value_of(text, name):
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("prefix", ["draftproof", "vllm"])
def test_metrics_count_what_happened(endless_folder, prefix):
    with serving(load(endless_folder), metrics_prefix=prefix) as counted:
        answer = counted.complete(prompt=[5, 6, 7, 8] * 20, max_tokens=30, temperature=0, num_draft_tokens=4)
        wait_for(counted.is_idle)  # the row leaves after its last chunk
        text = counted.client.get("/metrics").text
        speculation = answer["metrics"]["speculative_decoding"]
        for name, expected in {
            "spec_decode_num_drafts_total": speculation["num_spec_steps"],
            "spec_decode_num_draft_tokens_total": speculation["num_draft_tokens"],
            "spec_decode_num_accepted_tokens_total": speculation["num_accepted_draft_tokens"],
            "spec_decode_num_accepted_tokens_per_pos_total": speculation["num_accepted_draft_tokens"],
            "generation_tokens_total": 30,
            "prompt_tokens_total": answer["usage"]["prompt_tokens"],
            "time_to_first_token_seconds_count": 1,
            "e2e_request_latency_seconds_count": 1,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
        }.items():
            assert value_of(text, f"{prefix}:{name}") == expected, name
        assert 0 < value_of(text, f"{prefix}:kv_cache_usage_perc") < 1, "an idle prefix is in the pool"
        gaps = value_of(text, f"{prefix}:inter_token_latency_seconds_count")
        assert 0 < gaps < 30
        assert value_of(text, f"{prefix}:request_success_total") == 1


def test_the_feed_tells_the_load(server):
    with httpx.stream("GET", f"{server.url}/events", timeout=WAIT) as feed:
        lines = (line for line in feed.iter_lines() if line)
        assert feed.headers["content-type"].startswith("text/event-stream")
        first = json.loads(next(lines).removeprefix("data: "))
        server.complete(seed=1, num_draft_tokens=2)
        second = json.loads(next(lines).removeprefix("data: "))
    assert set(first) == {"running", "waiting", "kv", "tokens_per_second", "acceptance", "tokens_per_pass"}
    assert (first["tokens_per_second"], first["tokens_per_pass"]) == (0.0, None)
    assert second["tokens_per_second"] > 0
    assert second["tokens_per_pass"] >= 1
    assert 0 <= second["kv"] <= 1
