"""OpenAI's own client against the server: plain, asynchronous, streaming, structured output, tools and errors."""

import asyncio
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from serve.running import CHAT, TEXT, load, serving
from serve.test_tools import TOOLS, fits

MESSAGES = CHAT["messages"]


class Weather(BaseModel):
    city: Literal["Rom", "Ulm"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def keyed(folder):
    with serving(load(folder), headers={"Authorization": "Bearer k"}, api_keys=("k",)) as running:
        yield running


@pytest.fixture(scope="module")
def client(keyed):
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="k", max_retries=0) as made:
        yield made


def test_a_chat(client, keyed):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, seed=7)
    assert answer.choices[0].message.content == keyed.chat(seed=7)["choices"][0]["message"]["content"]
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_streamed_chat(client, keyed):
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, seed=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == keyed.chat(seed=7)["choices"][0]["message"]["content"]
    assert chunks[-1].usage.completion_tokens > 0


def test_many_asynchronous_chats_at_once(keyed):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{keyed.url}/v1", api_key="k", max_retries=0) as client:

            async def one(i):
                if i % 2:
                    answer = await client.chat.completions.create(
                        model="tiny", messages=MESSAGES, max_tokens=12, seed=i
                    )
                    return answer.choices[0].message.content
                stream = await client.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=12, seed=i, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(i) for i in range(12)))

    texts = asyncio.run(main())
    assert texts == [keyed.chat(seed=i)["choices"][0]["message"]["content"] for i in range(12)]


def test_structured_output(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Weather, max_tokens=200, seed=1
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Weather)


def test_tools(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        max_tokens=200, seed=2,
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls
    assert fits(call.function.name, call.function.arguments)
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        max_tokens=200, seed=2,
    ) as stream:  # fmt: skip
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_completions_with_echo_and_log_probabilities(client, keyed):
    tokens = keyed.engine.tokenizer.encode(TEXT["prompt"])
    answer = client.completions.create(model="tiny", prompt=tokens, echo=True, logprobs=1, max_tokens=0)
    assert len(answer.choices[0].logprobs.token_logprobs) == len(tokens)
    streamed = client.completions.create(model="tiny", prompt=TEXT["prompt"], max_tokens=5, stream=True, seed=1)
    assert (
        "".join(chunk.choices[0].text for chunk in streamed)
        == keyed.complete(seed=1, max_tokens=5)["choices"][0]["text"]
    )


def test_our_own_fields_in_extra_body(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, seed=1, extra_body={"drafter": False, "top_k": 5}
    )
    assert answer.metrics["speculative_decoding"] is None


def test_errors_become_the_clients_exceptions(client, keyed):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temprature") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"temprature": 0})
    assert caught.value.param == "temprature"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0).models.list()
    schema = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"const": 1}}}
    with pytest.raises(openai.APIError, match="not a distribution"):
        list(
            client.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, response_format=schema, max_tokens=20,
                extra_body={"min_tokens": 9},
            )
        )  # fmt: skip


def test_the_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "draftproof"
