"""Chats and completions, whole and streamed: the same texts as the library's, in OpenAI's words."""

import json
import math

import pytest

from draftproof.core.sampling import SamplingParams
from serve.running import CHAT, TEXT

S = SamplingParams


def alone(server, prompt, seed=7, max_tokens=12, **options):
    sampling = S(seed=seed, **{k: options.pop(k) for k in ("temperature", "top_k", "top_p") if k in options})
    return server.engine.generate(prompt, sampling, max_tokens=max_tokens, **options)


def streamed_text(events):
    return "".join(choice["delta"].get("content") or "" for e in events for choice in e["choices"])


def test_a_chat_is_the_librarys_text(server):
    answer = server.chat(seed=7)
    expected = alone(server, CHAT["messages"])
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == expected.finish_reason
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(expected.tokens)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_streamed_chat_is_the_same_text(server):
    whole, events = server.chat(seed=7), server.stream_chat(seed=7)
    assert streamed_text(events) == whole["choices"][0]["message"]["content"]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * (len(events) - 1) + [
        whole["choices"][0]["finish_reason"]
    ]
    assert len({e["id"] for e in events}) == 1
    assert {e["object"] for e in events} == {"chat.completion.chunk"}


@pytest.mark.parametrize("path", ["/v1/completions", "/completions"])
def test_a_completion_is_the_librarys_text(server, path):
    answer = server.post(path, TEXT | {"seed": 7}).json()
    expected = alone(server, TEXT["prompt"], chat=False)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": expected.text, "logprobs": None, "finish_reason": expected.finish_reason}
    ]


def test_a_streamed_completion_is_the_same_text(server):
    whole = server.complete(seed=7)["choices"][0]
    events = server.stream_text(seed=7)
    assert "".join(e["choices"][0]["text"] for e in events) == whole["text"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_token_ids_and_lists_of_prompts(server):
    tokens = server.engine.tokenizer.encode(TEXT["prompt"])
    one = server.complete(seed=7)["choices"][0]["text"]
    assert server.complete(seed=7, prompt=tokens)["choices"][0]["text"] == one
    for prompts in ([TEXT["prompt"], "the fox"], [tokens, server.engine.tokenizer.encode("the fox")]):
        answer = server.complete(seed=7, prompt=prompts)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["choices"][0]["text"] == one
        assert answer["choices"][1]["text"] == alone(server, "the fox", chat=False).text
        assert answer["usage"]["prompt_tokens"] == len(tokens) + len(server.engine.tokenizer.encode("the fox"))


def test_every_sampling_field_reaches_the_engine(server):
    fields = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "seed": 3,
    }  # fmt: skip
    expected = server.engine.generate(TEXT["prompt"], S(**fields, logit_bias={70: 4.0}), max_tokens=12, chat=False)
    answer = server.complete(**fields, logit_bias={"70": 4.0}, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected.tokens
    without = server.complete(**fields, return_token_ids=True)
    assert without["choices"][0]["token_ids"] != expected.tokens, "the bias must matter, or nothing is shown"


@pytest.mark.parametrize("off", [0, -1])
def test_a_top_k_of_zero_or_minus_one_is_off(server, off):
    assert server.complete(seed=3, top_k=off)["choices"] == server.complete(seed=3)["choices"]


def test_the_default_temperature_is_one(server):
    assert server.complete(seed=3)["choices"] == server.complete(seed=3, temperature=1.0)["choices"]
    assert server.state.default_sampling == S()


def test_each_request_has_its_own_rule_drafter_and_draft_length(server):
    prompt = TEXT["prompt"]
    plain = alone(server, prompt, chat=False, drafter=False).text
    for fields in ({"drafter": False}, {"drafter": "off"}, {"num_draft_tokens": 0, "rule": "coupled"}):
        answer = server.complete(seed=7, **fields)
        assert answer["choices"][0]["text"] == plain
        assert answer["metrics"]["speculative_decoding"] is None
    assert server.complete(seed=7, rule="coupled", num_draft_tokens=4)["choices"][0]["text"] == plain
    answer = server.complete(seed=7, rule="token", num_draft_tokens=3)
    assert answer["choices"][0]["text"] == alone(server, prompt, chat=False, rule="token", num_draft_tokens=3).text
    assert answer["metrics"]["speculative_decoding"]["num_spec_tokens"] <= 3


def test_n_texts_have_consecutive_seeds(server):
    answer = server.complete(seed=7, n=3)
    alone_texts = [server.complete(seed=7 + i)["choices"][0]["text"] for i in range(3)]
    assert [choice["text"] for choice in answer["choices"]] == alone_texts
    assert len(set(alone_texts)) == 3
    assert answer["usage"]["prompt_tokens"] == server.complete(seed=7)["usage"]["prompt_tokens"]
    events = server.stream_text(seed=7, n=3)
    for i in range(3):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == i]
        assert "".join(choice["text"] for choice in mine) == alone_texts[i]
        assert [choice["finish_reason"] for choice in mine].count(None) == len(mine) - 1


def test_the_largest_seed_wraps(server):
    assert len(server.complete(seed=2**63 - 1, n=2)["choices"]) == 2


# ------------------------------------------------------------------------------------------------ usage and the ending


def test_usage_comes_last_when_it_is_asked_for(server):
    plain, asked = server.stream_chat(seed=7), server.stream_chat(seed=7, stream_options={"include_usage": True})
    assert not any("usage" in e for e in plain)
    assert all(e["usage"] is None for e in asked[:-1])
    assert asked[-1]["choices"] == []
    expected = server.chat(seed=7)["usage"]
    assert {k: asked[-1]["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        k: expected[k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    each = server.stream_chat(seed=7, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [e["usage"]["completion_tokens"] for e in each]
    assert counts == sorted(counts)
    assert counts[-1] == expected["completion_tokens"]


def test_max_completion_tokens_and_its_defaults(endless):
    assert endless.chat(seed=1, max_tokens=None, max_completion_tokens=5)["usage"]["completion_tokens"] == 5
    assert endless.complete(seed=1, max_tokens=None)["usage"]["completion_tokens"] == 16
    assert endless.chat(seed=1, max_tokens=3)["choices"][0]["finish_reason"] == "length"


def test_no_tokens_at_all(endless):
    answer = endless.complete(max_tokens=0)
    assert answer["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
    events = endless.stream_text(max_tokens=0)
    assert [e["choices"][0]["finish_reason"] for e in events] == ["length"]
    assert endless.stream_chat(max_tokens=0)[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
def test_an_empty_prompt_begins_a_text(server, prompt):
    begun = server.complete(prompt=[server.engine.tokenizer.bos_token_id], seed=7)["choices"]
    assert server.complete(prompt=prompt, seed=7)["choices"] == begun
    assert server.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1)["usage"]["prompt_tokens"] == 1


def test_no_alternatives_need_no_log_probabilities(server):
    assert server.chat(seed=7, top_logprobs=0)["choices"] == server.chat(seed=7)["choices"]


def test_characters_of_several_tokens_are_streamed_whole(server):
    """A grammar forces characters of which every byte is a token of its own; no event shows a part of one."""
    text = "ψж 漢字 🦊🦊"
    wanted = {"type": "json_schema", "json_schema": {"schema": {"const": text}}}
    fields = {"response_format": wanted, "max_tokens": 200, "seed": 1, "drafter": False, "return_token_ids": True}
    choices = [e["choices"][0] for e in server.stream_text(**fields)]
    assert json.loads("".join(choice["text"] for choice in choices)) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in choice["text"] for choice in choices)
    assert sum(len(choice.get("token_ids", [])) for choice in choices) > len(text) + 2


def test_more_tokens_than_there_is_room_end_by_length(folder):
    from serve.running import load, serving

    with serving(load(folder, max_length=40)) as small:
        answer = small.complete(prompt=[1] * 30, max_tokens=1000, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 10
        assert answer["choices"][0]["finish_reason"] == "length"
        assert small.chat(messages=[{"role": "user", "content": "a"}], max_tokens=None)["usage"]["total_tokens"] <= 40


def test_a_stop_string_leaves_nothing_behind(endless):
    """Also inside an accepted draft: neither tokens nor log-probabilities come after it (vLLM 47616)."""
    greedy = {"max_tokens": 40, "temperature": 0, "num_draft_tokens": 8}
    free = endless.complete(**greedy, return_token_ids=True)["choices"][0]
    stop = free["text"][10:12]
    cut = free["text"].index(stop)
    fields = greedy | {"stop": [stop], "logprobs": 0}
    answer = endless.complete(**fields, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["text"] == free["text"][:cut]
    assert choice["finish_reason"] == "stop"
    ids = choice["token_ids"]
    assert ids == free["token_ids"][: len(ids)]
    assert len(choice["logprobs"]["tokens"]) == len(ids) == answer["usage"]["completion_tokens"]
    decoded = endless.engine.tokenizer.decode(ids)
    assert stop in decoded
    assert stop not in endless.engine.tokenizer.decode(ids[:-1]), "the last token completes the stop string"
    events = endless.stream_text(**fields)
    assert "".join(e["choices"][0]["text"] for e in events) == choice["text"]
    entries = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    assert sum(len(entry["tokens"]) for entry in entries) == len(ids)


def test_stop_token_ids_min_tokens_and_ignore_eos(server, endless):
    ids = endless.complete(seed=5, return_token_ids=True)["choices"][0]["token_ids"]
    answer = endless.complete(seed=5, stop_token_ids=[ids[4]], return_token_ids=True)["choices"][0]
    assert answer["token_ids"] == ids[: ids.index(ids[4]) + 1]
    assert answer["finish_reason"] == "stop"
    later = endless.complete(seed=5, stop_token_ids=[ids[4]], min_tokens=8, return_token_ids=True)["choices"][0]
    assert ids[4] not in later["token_ids"][:8]
    assert len(later["token_ids"]) >= 8
    [eos] = server.engine.eos
    ends = {"seed": 5, "max_tokens": 30, "logit_bias": {str(eos): 50.0}, "return_token_ids": True}
    assert server.complete(**ends)["choices"][0]["token_ids"] == [eos]
    assert server.complete(**ends, min_tokens=6)["choices"][0]["token_ids"].index(eos) == 6
    ignored = server.complete(**ends, ignore_eos=True)["choices"][0]
    assert ignored["token_ids"] == [eos] * 30
    assert ignored["finish_reason"] == "length"


# -------------------------------------------------------------------------------------------------- log-probabilities


def test_log_probabilities_of_a_chat_are_the_librarys(server):
    expected = alone(server, CHAT["messages"], logprobs=3, temperature=0.5)
    choice = server.chat(seed=7, temperature=0.5, logprobs=True, top_logprobs=3)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [each.logprob for each in expected.logprobs]
    assert [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries] == [
        [value for _, value in each.top] for each in expected.logprobs
    ]
    assert all(entry["logprob"] < 0 for entry in entries), "of the raw distribution, not 0 under speculation"
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries if entry["token"] != "<|im_end|>")
    assert spelled.decode("utf-8", "replace") == choice["message"]["content"]
    streamed = [
        entry
        for e in server.stream_chat(seed=7, temperature=0.5, logprobs=True, top_logprobs=3)
        if e["choices"][0]["logprobs"]
        for entry in e["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == entries


def test_echo_with_log_probabilities_of_the_prompt(server):
    tokens = server.engine.tokenizer.encode(TEXT["prompt"])
    expected = alone(server, tokens, logprobs=2, prompt_logprobs=2, max_tokens=1)
    for max_tokens in (0, 1):
        answer = server.complete(prompt=tokens, echo=True, logprobs=2, max_tokens=max_tokens, seed=7)
        lists = answer["choices"][0]["logprobs"]
        assert lists["tokens"][: len(tokens)] == [server.engine.tokenizer.decode([token]) for token in tokens]
        assert lists["token_logprobs"][0] is None
        wanted = [each.logprob for each in expected.prompt_logprobs] + [each.logprob for each in expected.logprobs]
        assert lists["token_logprobs"][1:] == wanted[: len(tokens) - 1 + max_tokens]
        assert lists["text_offset"][:2] == [0, len(lists["tokens"][0])]
        assert answer["choices"][0]["text"].startswith(TEXT["prompt"])
        for value, top in zip(lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True):
            assert value in top.values()
            assert len(top) in (2, 3)
    events = server.stream_text(prompt=tokens, echo=True, logprobs=2, max_tokens=1, seed=7)
    assert events[0]["choices"][0]["text"] == TEXT["prompt"]
    assert len(events[0]["choices"][0]["logprobs"]["tokens"]) == len(tokens)


def test_what_cannot_happen_is_a_finite_number():
    from draftproof.serve.logprobs import finite

    assert finite(-math.inf) == -9999.0


# ------------------------------------------------------------------------------------------------------------- extras


def test_an_answer_reports_its_times_and_its_drafts(endless):
    answer = endless.complete(seed=7, max_tokens=30, temperature=0, num_draft_tokens=4)
    speculation, metrics = answer["metrics"]["speculative_decoding"], answer["metrics"]
    assert metrics["time_to_first_token_ms"] > 0
    assert metrics["generation_time_ms"] >= metrics["mean_itl_ms"] >= 0
    assert metrics["queue_time_ms"] >= 0
    assert metrics["tokens_per_second"] > 0
    histogram = speculation["acceptance_histogram"]
    assert sum(histogram) == speculation["num_spec_steps"]
    accepted = sum(i * count for i, count in enumerate(histogram))
    assert accepted == speculation["num_accepted_draft_tokens"] > 0
    assert speculation["draft_acceptance_rate"] == accepted / speculation["num_draft_tokens"]
    assert speculation["mean_acceptance_length"] == 1 + accepted / speculation["num_spec_steps"]
    timings = answer["timings"]
    assert (timings["predicted_n"], timings["draft_n"], timings["draft_n_accepted"]) == (
        30, speculation["num_draft_tokens"], accepted,
    )  # fmt: skip
    assert timings["cache_n"] + timings["prompt_n"] == answer["usage"]["prompt_tokens"]


def test_a_second_turn_reports_its_cached_tokens(endless):
    prompt = [5, 6, 7, 8] * 40
    assert endless.complete(prompt=prompt, seed=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert endless.complete(prompt=prompt, seed=1)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_a_trace_spells_the_text_and_tells_where_it_came_from(endless):
    fields = {"seed": 2, "max_tokens": 40, "temperature": 0, "num_draft_tokens": 4, "draftproof_trace": True}
    events = endless.stream_chat(**fields)
    traces = [e["draftproof"] for e in events if "draftproof" in e]
    parts = [part for trace in traces for part in trace["tokens"]]
    assert "".join(part["text"] for part in parts) == streamed_text(events)
    assert {part["from"] for part in parts} <= {"draft", "residual", "bonus", "plain"}
    assert "draft" in {part["from"] for part in parts}
    assert traces[-1]["tokens_per_pass"] > 1
    plain = [e["draftproof"] for e in endless.stream_chat(**fields | {"drafter": False}) if "draftproof" in e]
    assert {part["from"] for trace in plain for part in trace["tokens"]} == {"plain"}
    assert not any("draftproof" in e for e in endless.stream_chat(seed=2))


def test_a_whole_answer_tells_its_rounds(endless):
    fields = {"seed": 2, "max_tokens": 20, "temperature": 0, "num_draft_tokens": 3, "draftproof_trace": True}
    for answer in (endless.chat(**fields), endless.complete(**fields)):
        rounds = answer["choices"][0]["draftproof"]["rounds"]
        speculation = answer["metrics"]["speculative_decoding"]
        assert sum(drafted for drafted, _ in rounds) == speculation["num_draft_tokens"]
        assert sum(accepted for _, accepted in rounds) == speculation["num_accepted_draft_tokens"]
    assert "draftproof" not in endless.chat(seed=2)["choices"][0]


def test_a_trace_stops_at_a_stop_string(endless):
    text = endless.chat(seed=2, max_tokens=40, temperature=0)["choices"][0]["message"]["content"]
    events = endless.stream_chat(seed=2, max_tokens=40, temperature=0, stop=text[9:12], draftproof_trace=True)
    parts = [part["text"] for e in events if "draftproof" in e for part in e["draftproof"]["tokens"]]
    assert "".join(parts) == streamed_text(events) == text[: text.index(text[9:12])]


def test_token_ids_on_request(server):
    answer = server.chat(seed=7, return_token_ids=True)
    assert answer["prompt_token_ids"] == server.engine.tokenizer.apply_chat_template(
        CHAT["messages"], add_generation_prompt=True, return_dict=False
    )
    events = server.stream_chat(seed=7, return_token_ids=True)
    streamed = [token for e in events for token in e["choices"][0].get("token_ids", [])]
    assert streamed == answer["choices"][0]["token_ids"]
