"""Response formats and tools over HTTP, asked by OpenAI's own client of a model with random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema_rs
import openai
import pydantic
import pytest

from tests.server.helpers.live_server import LiveServer, error_of

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOKENS = 600
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ENDLESS = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]}


class Animal(pydantic.BaseModel):
    """A structured answer."""

    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    legs: list[Literal["left", "right"]] = pydantic.Field(max_length=4)
    age: int = pydantic.Field(ge=0, le=30)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """Return the choices of a chat with the variant ``chatty``."""
    whole = {"model": "chatty", "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 1.5, "seed": 1}
    return client.chat.completions.create(**{**whole, **fields}).choices


def streamed(client: openai.OpenAI, **fields: Any) -> list[Any]:
    """Return the first choices of the chunks of a stream."""
    whole = {"model": "chatty", "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 1.5, "seed": 1}
    with client.chat.completions.create(**{**whole, **fields}, stream=True) as chunks:
        return [chunk.choices[0] for chunk in chunks]


def test_every_answer_matches_its_schema(client: openai.OpenAI) -> None:
    choices = ask(client, response_format=json_schema(CITY), n=8)
    answers = [json.loads(choice.message.content) for choice in choices]
    for answer in answers:
        jsonschema_rs.validate(CITY, answer)
    assert {choice.finish_reason for choice in choices} == {"stop"}
    assert len({json.dumps(answer) for answer in answers}) > 1


def test_the_client_parses_answers_into_its_own_types(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="chatty", messages=MESSAGES, max_tokens=TOKENS, temperature=1.5, seed=2, response_format=Animal
    )
    assert isinstance(reply.choices[0].message.parsed, Animal)


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    (whole,) = ask(client, response_format=json_schema(CITY))
    chunks = streamed(client, response_format=json_schema(CITY))
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == "stop"


def test_any_object_is_json_as_far_as_it_goes(client: openai.OpenAI) -> None:
    for choice in ask(client, response_format={"type": "json_object"}, n=4, max_tokens=100):
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def test_completions_take_a_response_format_too(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="plain",
        prompt=["one", "two"],
        max_tokens=TOKENS,
        temperature=1.5,
        seed=3,
        extra_body={"response_format": json_schema(CITY)},
    )
    for choice in reply.choices:
        jsonschema_rs.validate(CITY, json.loads(choice.text))


def test_a_constrained_request_changes_no_token_of_others(server: LiveServer, client: openai.OpenAI) -> None:
    free = {"max_new_tokens": 120, "n": 3, "temperature": 1.0, "seed": 5}
    alone = server.generate("third", **free).json()["outputs"]
    with server.streaming("third", **free) as events:
        ask(client, response_format=json_schema(CITY), n=4)
        tokens: list[list[int]] = [[], [], []]
        for name, data in events:
            if name == "token":
                tokens[data["index"]].append(data["token_id"])
    assert tokens == [output["token_ids"] for output in alone]


def test_a_required_call_names_a_tool_and_has_its_arguments(client: openai.OpenAI) -> None:
    names = set()
    for choice in ask(client, tools=[WEATHER, CLOCK], tool_choice="required", n=6):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        for call in choice.message.tool_calls:
            names.add(call.function.name)
            schema = CITY if call.function.name == "weather" else {"maxProperties": 0}
            jsonschema_rs.validate(schema, json.loads(call.function.arguments))
    assert names == {"weather", "clock"}


def test_without_parallel_calls_there_is_one(client: openai.OpenAI) -> None:
    choices = ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, n=6)
    assert [len(choice.message.tool_calls) for choice in choices] == [1] * 6


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_stream_has_the_parts_of_the_calls(choice: Any, client: openai.OpenAI) -> None:
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": choice}
    whole = ask(client, **fields)[0].message.tool_calls
    chunks = streamed(client, **fields)
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in [delta for chunk in chunks for delta in chunk.delta.tool_calls or []]:
        if delta.function.name is not None:
            assert re.fullmatch("[A-Za-z0-9]{9}", delta.id)
            names[delta.index] = delta.function.name
        arguments[delta.index] = arguments.get(delta.index, "") + delta.function.arguments
    assert list(names.values()) == [call.function.name for call in whole]
    assert list(arguments.values()) == [call.function.arguments for call in whole]
    assert len(chunks) > 5
    assert chunks[-1].finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert ask(client, **fields)[0].finish_reason == chunks[-1].finish_reason


def test_a_free_answer_beside_tools_is_content(client: openai.OpenAI) -> None:
    (plain,) = ask(client, max_tokens=20)
    for tool_choice in ("auto", "none"):
        (choice,) = ask(client, tools=[WEATHER], tool_choice=tool_choice, max_tokens=20)
        assert choice.message.content == plain.message.content
        assert choice.message.tool_calls is None
    chunks = streamed(client, tools=[WEATHER], max_tokens=20)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == plain.message.content


def test_a_format_beside_tools_that_may_be_called_holds_for_answers_and_calls(client: openai.OpenAI) -> None:
    kinds = set()
    for choice in ask(client, tools=[WEATHER], response_format=json_schema(CITY), n=16):
        kinds.add(choice.finish_reason)
        if choice.message.tool_calls:
            (call,) = choice.message.tool_calls
            assert (call.function.name, choice.message.content) == ("weather", None)
        answer = call.function.arguments if choice.message.tool_calls else choice.message.content
        jsonschema_rs.validate(CITY, json.loads(answer))
    assert kinds == {"stop", "tool_calls"}


def test_answers_of_tools_are_messages_of_a_conversation(client: openai.OpenAI) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'}
    call = {"id": "call_1", "type": "function", "function": function}
    conversation: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    (choice,) = ask(client, messages=conversation, tools=[WEATHER], max_tokens=5)
    assert choice.finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": json_schema({"type": "poem"})}, "response_format"),
        ({"response_format": json_schema({"type": "string", "pattern": "("})}, "response_format"),
        ({"response_format": json_schema({"enum": ["x" * 100 for _ in range(10_000)]})}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "poem"}}}],
          "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(
    fields: dict[str, Any], param: str, server: LiveServer
) -> None:
    body = {"model": "chatty", "messages": MESSAGES, "max_tokens": 5, **fields}
    reply = server.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param


def test_a_schema_without_end_is_refused_and_others_are_served(
    server: LiveServer, client: openai.OpenAI
) -> None:
    body = {"model": "plain", "prompt": "x", "max_tokens": 5, "response_format": json_schema(ENDLESS)}
    reply = server.client.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert "simplify the schema" in error_of(reply)["message"]
    (choice,) = ask(client, response_format=json_schema(CITY))
    jsonschema_rs.validate(CITY, json.loads(choice.message.content))


def test_a_client_that_leaves_ends_its_constrained_request(server: LiveServer) -> None:
    endless = json_schema({"type": "array", "items": {"enum": [1]}, "minItems": 10**5})
    body = {"model": "third", "prompt": "x", "max_tokens": 3000, "stream": True, "response_format": endless}
    with server.client.stream("POST", "/v1/completions", json=body) as reply:
        assert next(reply.iter_lines())
    chat = {
        "model": "chatty",
        "messages": MESSAGES,
        "max_tokens": TOKENS,
        "response_format": json_schema(CITY),
    }
    reply_of_another = server.client.post("/v1/chat/completions", json=chat)
    jsonschema_rs.validate(CITY, json.loads(reply_of_another.json()["choices"][0]["message"]["content"]))
