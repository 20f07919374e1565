"""OpenAI's own Python client against a live server: whole and streamed, blocking and asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.server.helpers.live_server import LiveServer

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
RENDERED = "<user>hi\n<assistant>"


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def wanted(server: LiveServer, variant: str, prompt: str) -> str:
    """Return the greedy text that `/generate` gives."""
    output = server.generate(variant, prompt=prompt, max_new_tokens=12).json()["outputs"][0]
    return str(output["text"])


def test_a_completion_is_parsed(server: LiveServer, client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model="plain", prompt="hello", max_tokens=12, temperature=0, logprobs=2
    )
    assert completion.choices[0].text == wanted(server, "plain", "hello")
    assert completion.choices[0].logprobs is not None
    assert len(completion.choices[0].logprobs.token_logprobs or ()) == 12
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 12
    assert completion.system_fingerprint


def test_a_completion_is_streamed(server: LiveServer, client: openai.OpenAI) -> None:
    with client.completions.create(
        model="plain", prompt="hello", max_tokens=12, temperature=0, stream=True
    ) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == wanted(server, "plain", "hello")
    assert choices[-1].finish_reason == "length"


def test_a_chat_is_parsed(server: LiveServer, client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="chatty",
        messages=MESSAGES,
        max_completion_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=1,
    )
    (choice,) = completion.choices
    assert choice.message.content == wanted(server, "chatty", RENDERED)
    assert choice.logprobs is not None
    assert len(choice.logprobs.content or ()) == 12
    assert completion.model == "chatty"


def test_a_chat_is_streamed_with_its_usage(server: LiveServer, client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="chatty",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == wanted(server, "chatty", RENDERED)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_the_client_s_stream_helper_gathers_a_chat(server: LiveServer, client: openai.OpenAI) -> None:
    whole = wanted(server, "chatty", RENDERED)
    stop = next(char for char in whole if char.isascii() and char.isprintable())
    # The helper raises an error for an answer that its length ends.
    with client.chat.completions.stream(
        model="chatty", messages=MESSAGES, max_tokens=12, temperature=0, stop=stop
    ) as stream:
        (choice,) = stream.get_final_completion().choices
    assert choice.message.content == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_the_asynchronous_client_asks_several_variants_at_once(server: LiveServer) -> None:
    async def ask(client: openai.AsyncOpenAI, variant: str) -> str:
        completion = await client.completions.create(
            model=variant, prompt="hello", max_tokens=12, temperature=0
        )
        return completion.choices[0].text

    async def stream(client: openai.AsyncOpenAI) -> str:
        chunks = await client.chat.completions.create(
            model="chatty", messages=MESSAGES, max_tokens=12, temperature=0, stream=True
        )
        async with chunks:
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            variants = ("base", "plain", "third")
            return await asyncio.gather(*(ask(client, variant) for variant in variants), stream(client))

    assert asyncio.run(main()) == [
        wanted(server, "base", "hello"),
        wanted(server, "plain", "hello"),
        wanted(server, "third", "hello"),
        wanted(server, "chatty", RENDERED),
    ]


def test_the_version_is_in_the_headers(server: LiveServer, client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="plain@1", prompt="a", max_tokens=1)
    assert raw.headers["X-Peraxis-Version"] == "1"
    assert raw.parse().choices


def test_an_error_is_the_client_s_own_exception(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="absent", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="chatty", messages=MESSAGES, frequency_penalty=3)
    assert (refused.value.code, refused.value.param) == ("invalid_request", "frequency_penalty")


def test_models_are_listed(client: openai.OpenAI) -> None:
    listed = {model.id for model in client.models.list()}
    assert {"base", "plain", "chatty", "third"} <= listed
    assert client.models.retrieve("plain").owned_by
