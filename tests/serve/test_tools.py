"""Calls of tools and JSON answers: they always fit their schemas, whole and streamed, whatever the model is."""

import json

import pytest

from draftproof.serve.tools import HERMES, LLAMA, CallParser, format_of
from serve.running import load, serving

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"],
    "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "forecast", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "parameters": CLOCK}},
]
TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}{% endfor %} {% endfor %}"
)


def fits(name, arguments):
    values = json.loads(arguments)
    if name == "clock":
        return values in ({"zone": "utc"}, {"zone": "cet"})
    return set(values) == {"city", "days"} and values["days"] in (1, 2, 3) and len(values["city"]) <= 8


def assembled(events):
    """Put the deltas of a stream together as a client does."""
    content, calls = "", {}
    for e in events:
        delta = e["choices"][0]["delta"]
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", []):
            if "id" in part:
                calls[part["index"]] = {"name": part["function"]["name"], "arguments": ""}
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return content, [calls[i] for i in sorted(calls)]


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_fits_its_schema(server, seed):
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200, "seed": seed}
    [choice] = server.chat(**fields)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert fits(call["function"]["name"], call["function"]["arguments"])
    events = server.stream_chat(**fields)
    content, calls = assembled(events)
    assert content == ""
    assert calls == [call["function"]]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_named_tool_is_called(server):
    choice = {"type": "function", "function": {"name": "clock"}}
    for seed in range(3):
        answer = server.chat(tools=TOOLS, tool_choice=choice, max_tokens=100, seed=seed)
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "clock"
        assert call["type"] == "function"
        assert call["id"].startswith("call_")


def test_several_calls_in_one_answer(server):
    """A bias against the end makes a random model call again and again, until its tokens are used up."""
    bias = {str(server.engine.tokenizer.eos_token_id): -100.0}
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "temperature": 0.6, "logit_bias": bias}
    found = []
    for seed in range(3):
        [choice] = server.chat(**fields, seed=seed)["choices"]
        calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
        whole = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
        assert all(fits(call["name"], call["arguments"]) for call in whole)
        content, streamed = assembled(server.stream_chat(**fields, seed=seed))
        assert (content, streamed) == ("", calls)
        found.append(len(calls))
    assert max(found) > 1, "otherwise nothing was shown"


def test_with_auto_a_model_may_talk(server):
    fields = {"tools": TOOLS, "max_tokens": 30, "seed": 1}
    [choice] = server.chat(**fields)["choices"]
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] in ("stop", "length")


def test_after_the_trigger_only_calls_are_allowed(server):
    from draftproof.serve.protocol import ChatBody
    from draftproof.serve.tools import tool_use

    tokenizer = server.engine.tokenizer
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS})
    for several in (True, False):
        body.parallel_tool_calls = several
        allowed = tool_use(body, "").grammar(server.engine)
        free = allowed(tokenizer.encode("so "))
        assert free[tokenizer.encode("x")[0]]
        begun = tokenizer.encode("so <tool_call>")
        assert [tokenizer.decode([i]) for i in allowed(begun).nonzero().flatten().tolist()] == ["\n"]
        call = 'so <tool_call>\n{"name": "clock", "arguments": {"zone": "utc"}}\n</tool_call>'
        after = allowed(tokenizer.encode(call))
        assert after[tokenizer.eos_token_id]
        assert bool(after[tokenizer.encode("x")[0]]) is several


def test_no_tools_are_called_when_none_are_wanted(server):
    without = server.chat(seed=3, return_token_ids=True)
    answer = server.chat(tools=TOOLS, tool_choice="none", seed=3, return_token_ids=True)
    assert answer["prompt_token_ids"] == without["prompt_token_ids"]
    assert answer["choices"] == without["choices"]


def test_a_template_that_does_not_know_tools_gets_them_in_a_message(server):
    history = [
        {"role": "user", "content": "weather in Rom?"},
        {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom", "days": 1}'}}
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
    ]  # fmt: skip
    answer = server.chat(messages=history, tools=TOOLS, return_token_ids=True)
    prompt = server.engine.tokenizer.decode(answer["prompt_token_ids"])
    assert '"name": "weather"' in prompt.split("<|im_end|>")[0]
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": 1}}\n</tool_call>' in prompt
    assert "<tool_response>\nsun\n</tool_response>" in prompt


def test_a_template_that_knows_tools_is_given_them(folder):
    with serving(load(folder), chat_template=TEMPLATE) as knowing:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
        history = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
        answer = knowing.chat(messages=history, tools=TOOLS, return_token_ids=True)
        prompt = knowing.engine.tokenizer.decode(answer["prompt_token_ids"])
        assert prompt == "[weather][clock]user: hi assistant: <tool_call>Rom "


@pytest.mark.parametrize(
    "parameters", [{"type": "array"}, {"type": "object", "properties": {"a": {"type": "nonsense"}}}]
)
def test_a_wrong_schema_is_a_400(server, parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": tools})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


# ------------------------------------------------------------------------------------------------------- JSON answers


@pytest.mark.parametrize("stream", [False, True])
def test_json_fits_its_schema(server, stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "w", "strict": True, "schema": WEATHER}}
    for seed in range(3):
        fields = {"response_format": wanted, "max_tokens": 200, "seed": seed}
        if stream:
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in server.stream_chat(**fields))
        else:
            text = server.chat(**fields)["choices"][0]["message"]["content"]
        assert fits("weather", text)


def test_json_ends_although_the_model_would_repeat_new_lines(server):
    wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    [new_line] = server.engine.tokenizer.encode("\n")
    fields = {"max_tokens": 200, "seed": 1, "logit_bias": {str(new_line): 100.0}}
    text = server.complete(response_format=wanted, **fields)["choices"][0]["text"]
    assert fits("weather", text)
    assert "\n" in text
    flexible = {
        "type": "json_schema",
        "json_schema": {"schema": WEATHER | {"x-guidance": {"whitespace_flexible": True}}},
    }
    endless = server.complete(response_format=flexible, **fields)["choices"][0]
    assert endless["text"].endswith("\n" * 50), "as JSON allows it"


def test_any_json_object(server):
    answer = server.complete(response_format={"type": "json_object"}, max_tokens=60, seed=1, temperature=0.5)
    assert answer["choices"][0]["text"].lstrip().startswith("{")
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["choices"][0]["text"]), dict)


# --------------------------------------------------------------------------------------------------------- the parser


TRICKY = '{"a": "}\\n</tool_call> \\"{", "b": [{"c": "\\\\"}]}'


@pytest.mark.parametrize("form", [HERMES, LLAMA])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_the_parser_does_not_depend_on_how_the_text_is_cut(form, size):
    calls = [("first", "{}"), ("second", TRICKY)]
    text = (
        "Let me see.\n" + "\n".join(f"{form.begin}{name}{form.middle}{args}{form.end}" for name, args in calls) + "\n"
    )
    parser, pieces = CallParser(form), []
    for at in range(0, len(text), size):
        pieces += parser.feed(text[at : at + size])
    pieces += parser.flush()
    assert "".join(piece.text for piece in pieces if piece.kind == "content") == "Let me see.\n"
    for i, (name, args) in enumerate(calls):
        mine = [piece for piece in pieces if piece.call == i and piece.kind != "content"]
        assert (mine[0].kind, mine[0].text) == ("name", name)
        assert "".join(piece.text for piece in mine[1:]) == args
    assert parser.calls == 2


def test_where_only_calls_are_allowed_the_beginning_of_one_that_is_cut_is_no_text():
    call = f"{HERMES.begin}f{HERMES.middle}{{}}{HERMES.end}"
    for cut in range(1, len(HERMES.begin)):
        parser = CallParser(HERMES, only_calls=True)
        pieces = [*parser.feed(call + "\n" + call[:cut]), *parser.flush()]
        assert [piece.text for piece in pieces] == ["f", "{}"]


def test_text_that_only_looks_like_a_call_is_text():
    parser = CallParser(HERMES)
    pieces = [*parser.feed("<tool"), *parser.feed(" box"), *parser.feed(" <tool_call>")]
    assert "".join(piece.text for piece in [*pieces, *parser.flush()]) == "<tool box <tool_call>"
    assert parser.calls == 0


def test_the_form_of_calls_is_the_templates():
    assert format_of("… <|python_tag|> …") is LLAMA
    assert format_of("… <tool_call> … <|python_tag|>") is HERMES
    assert format_of("nothing") is HERMES
