"""Models that may think before a schema or a forced call, over HTTP, in harmony's and in Mistral's markup."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from compressor.config import CompressConfig
from compressor.pipeline import compress
from tests.helpers.tiny_models import make_pair
from tests.server.helpers.answer_templates import tokenizer_of
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.tokenizer_kinds import byte_level, mistral

# Of the base, and of the variant "own".
TOKENIZERS = {"base": tokenizer_of("channels", byte_level()), "own": tokenizer_of("named", mistral())}
# Tokens that begin and end thoughts, so that some answers have short ones.
FAVOURED = {"base": {"<|channel|>": 4, "<|end|>": 6}, "own": {"[THINK]": 4, "[/THINK]": 6}}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY, "strict": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("thinking")
    models = make_pair("llama", directory, vocab_size=max(map(len, TOKENIZERS.values())))
    paths = dict(zip(TOKENIZERS, (models.base, models.finetunes[0]), strict=True))
    for model, path in paths.items():
        TOKENIZERS[model].save_pretrained(path)
        config = json.dumps({"eos_token_id": TOKENIZERS[model].eos_token_id})
        (path / "generation_config.json").write_text(config)
    compress(CompressConfig(str(paths["base"]), str(paths["own"]), directory / "own", method="scalar"))
    with live_server(models.base, directory / "registry") as running:
        assert running.upload("own", directory / "own").status_code == 201
        yield running


def ask(server: LiveServer, model: str, **fields: Any) -> list[tuple[dict[str, Any], str]]:
    """Return the messages of a whole reply, which its stream has, too, and why each ended."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        "n": 16,
        "max_tokens": 120,
        "temperature": 1.5,
        "seed": 1,
        "parallel_tool_calls": False if "tools" in fields else None,
        "logit_bias": {str(TOKENIZERS[model].vocab[token]): bias for token, bias in FAVOURED[model].items()},
        **fields,
    }
    reply = server.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    whole = [(told(choice["message"]), choice["finish_reason"]) for choice in reply.json()["choices"]]
    stream = server.client.post("/v1/chat/completions", json={**body, "stream": True})
    *events, _ = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
    messages: dict[int, dict[str, Any]] = defaultdict(dict)
    reasons: dict[int, str] = {}
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        message, delta = messages[choice["index"]], choice["delta"]
        for key in ("content", "reasoning_content"):
            message[key] = message.get(key, "") + (delta.get(key) or "")
        for call in delta.get("tool_calls", ()):
            function = message.setdefault("tool_calls", [{"function": {"name": "", "arguments": ""}}])[0][
                "function"
            ]
            for key, text in call["function"].items():
                function[key] += text
        reasons[choice["index"]] = choice["finish_reason"]
    assert [(told(messages[index]), reasons[index]) for index in range(len(whole))] == whole
    return whole


def told(message: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a message, and its only call."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    assert len(calls) <= 1
    parts = {key: message.get(key) or "" for key in ("content", "reasoning_content")}
    return {**parts, "call": calls[0] if calls else None}


@pytest.mark.parametrize("model", TOKENIZERS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_model_may_think_before_a_forced_call(choice: object, model: str, server: LiveServer) -> None:
    answers = ask(server, model, tools=[WEATHER], tool_choice=choice)
    ended = [message for message, reason in answers if reason != "length"]
    assert {reason for _, reason in answers} - {"length"} == {
        "tool_calls" if choice == "required" else "stop"
    }
    assert {bool(message["reasoning_content"]) for message in ended} == {False, True}
    for message in ended:
        assert (message["content"], message["call"]["name"]) == ("", "weather")
        jsonschema_rs.validate(CITY, json.loads(message["call"]["arguments"]))


@pytest.mark.parametrize("model", TOKENIZERS)
@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_a_model_may_think_before_a_schema_and_call_tools_beside_it(
    tools: list[Any] | None, model: str, server: LiveServer
) -> None:
    fields: dict[str, Any] = {} if tools is None else {"tools": tools}
    answers = ask(server, model, response_format=FORMAT, **fields)
    ended = [message for message, reason in answers if reason != "length"]
    assert {bool(message["reasoning_content"]) for message in ended} == {False, True}
    assert {message["call"] is not None for message in ended} == ({False} if tools is None else {False, True})
    for message in ended:
        if message["call"] is not None:
            assert (message["content"], message["call"]["name"]) == ("", "weather")
        text = message["content"] if message["call"] is None else message["call"]["arguments"]
        jsonschema_rs.validate(CITY, json.loads(text))
