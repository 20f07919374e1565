"""`POST /v1/chat/completions` over HTTP: templates, content, log-probabilities, streams and refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from server.api.schemas import ChatBody
from tests.server.helpers.live_server import MAX_MODEL_LEN, LiveServer, error_of

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
RENDERED = "<system>be brief\n<user>hi\n<assistant>"


def post(server: LiveServer, **body: Any) -> httpx.Response:
    """Ask the variant ``chatty`` for greedy tokens; `body` overrides."""
    whole = {"model": "chatty", "messages": MESSAGES, "temperature": 0, **body}
    return server.client.post("/v1/chat/completions", json=whole)


def chat(server: LiveServer, **body: Any) -> dict[str, Any]:
    reply = post(server, **body)
    assert reply.status_code == 200, reply.text
    document: dict[str, Any] = reply.json()
    return document


def stream(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    """Return the documents of a stream, which must end with ``[DONE]``."""
    reply = post(server, stream=True, **body)
    assert reply.status_code == 200, reply.text
    *events, last = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_chat_has_the_tokens_that_generate_gives_to_the_rendered_conversation(server: LiveServer) -> None:
    wanted = server.generate("chatty", prompt=RENDERED, max_new_tokens=12).json()
    reply = post(server, max_tokens=12)
    document = reply.json()
    (choice,) = document["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": wanted["outputs"][0]["text"],
        "refusal": None,
    }
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert document["object"] == "chat.completion"
    assert document["system_fingerprint"] == wanted["digest"].removeprefix("sha256:")[:12]
    assert document["usage"].pop("prompt_tokens_details")["cached_tokens"] in (0, 32)
    assert document["usage"] == wanted["usage"]
    assert reply.headers["X-Peraxis-Version"] == "1"


def test_parts_of_a_content_are_lines_of_it(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    in_parts = chat(server, messages=[{"role": "user", "content": parts}], max_tokens=8)
    whole = chat(server, messages=[{"role": "user", "content": "one\ntwo"}], max_tokens=8)
    assert in_parts["choices"] == whole["choices"]


def test_the_variant_s_own_length_holds_without_another(server: LiveServer) -> None:
    assert chat(server)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_fields_of_the_length_count(server: LiveServer, field: str) -> None:
    assert chat(server, **{field: 3})["usage"]["completion_tokens"] == 3
    refused = post(server, **{field: MAX_MODEL_LEN})
    assert (refused.status_code, error_of(refused)["param"]) == (400, field)


def test_logprobs_name_each_token_with_its_bytes(server: LiveServer) -> None:
    output = server.generate("chatty", prompt=RENDERED, max_new_tokens=20, logprobs=2).json()["outputs"][0]
    logprobs = chat(server, max_tokens=20, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    for found, wanted in zip(logprobs["content"], output["logprobs"], strict=True):
        assert found["token"] == wanted["text"]
        assert found["logprob"] == pytest.approx(wanted["logprob"], abs=1e-4)
        assert found["bytes"] == wanted["bytes"]
        assert [top["token"] for top in found["top_logprobs"]] == [top["text"] for top in wanted["top"]]


def test_no_other_tokens_may_be_asked_for_without_logprobs(server: LiveServer) -> None:
    assert chat(server, max_tokens=2, logprobs=False, top_logprobs=0)["choices"][0]["logprobs"] is None


def test_logprobs_alone_have_no_other_tokens(server: LiveServer) -> None:
    content = chat(server, max_tokens=2, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]


def test_a_stream_opens_each_answer_and_gives_it_the_text_of_the_whole_reply(server: LiveServer) -> None:
    body: dict[str, Any] = {"max_tokens": 12, "n": 2, "temperature": 1.0, "seed": 3}
    whole, documents = chat(server, **body), stream(server, **body)
    choices = [choice for document in documents for choice in document["choices"]]
    assert {document["object"] for document in documents} == {"chat.completion.chunk"}
    for wanted in whole["choices"]:
        mine = [choice for choice in choices if choice["index"] == wanted["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == wanted["message"]["content"]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]


def test_a_stream_carries_logprobs_and_usage(server: LiveServer) -> None:
    documents = stream(
        server, max_tokens=4, logprobs=True, top_logprobs=1, stream_options={"include_usage": True}
    )
    scored = [
        entry
        for document in documents
        for choice in document["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert len(scored) == 4
    assert documents[-1]["choices"] == []
    assert documents[-1]["usage"]["completion_tokens"] == 4
    assert all(document["usage"] is None for document in documents[:-1])


def test_a_variant_without_a_template_refuses_a_chat(server: LiveServer) -> None:
    reply = post(server, model="plain")
    assert (reply.status_code, error_of(reply)["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"logit_bias": {"1": -101}}, "logit_bias"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"presence_penalty": True}, "presence_penalty"),
        ({"prompt": "hi"}, "prompt"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template": "../chat_template"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": ""}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": dict.fromkeys(map(str, range(17)))}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [{"role": "banana", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal", "text": "hi"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "hi", "refusal": 5}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": "hi", "deep": json.loads("[" * 101 + "]" * 101)}]},
            "messages",
        ),
        ({"messages": [{"role": "user", "content": "hi", "many": [1] * (1 << 17)}]}, "messages"),
        ({"messages": [{"role": "user", "function_call": {"name": "f", "arguments": ""}}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * MAX_MODEL_LEN}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}] * 5000}, "messages"),
        ({"n": 129}, "n"),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_by_its_field(
    server: LiveServer, body: dict[str, Any], param: str
) -> None:
    reply = post(server, **body)
    assert reply.status_code == 400, reply.text
    error = error_of(reply)
    assert error["param"] == param
    # What is too long has a code of its own, which `test_http_manners.py` tests.
    assert error["code"] in ("invalid_request", "context_length_exceeded")


def test_fields_that_change_nothing_are_ignored(server: LiveServer) -> None:
    neutral = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "frequency_penalty": 0, "parallel_tool_calls": True, "store": False, "metadata": {"a": "b"},
        "service_tier": "auto", "prediction": None, "user": "someone", "chat_template_kwargs": {},
    }  # fmt: skip
    assert chat(server, **neutral)["choices"] == chat(server)["choices"]


def test_fields_of_messages_and_tools_pass_as_they_came() -> None:
    function = {"name": "f", "description": "d", "return": {"type": "string"}}
    call = {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": ""}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "reasoning": "so",
            "tomorrow": [{"a": 1}],
        },
    ]
    body = {
        "model": "m",
        "messages": messages,
        "tools": [{"type": "function", "function": function, "extra": 1}],
    }
    parsed = msgspec.json.decode(json.dumps(body), type=ChatBody)
    conversation = parsed.conversation(parsed.requested.tools)
    assert conversation.messages == messages
    assert json.loads(conversation.tools) == body["tools"]


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"chat_template": "default"}, RENDERED),
        ({"chat_template_kwargs": {"enable_thinking": False, "budget": 5}}, RENDERED),
        ({"messages": [{"role": "developer", "content": "be brief"}, MESSAGES[1]]}, RENDERED),
        ({"messages": [{**message, "tomorrow": {}} for message in MESSAGES]}, RENDERED),
        (
            {"messages": [MESSAGES[0], {"role": "user", "content": "hi"}], "continue_final_message": True},
            "<system>be brief\n<user>hi",
        ),
        ({"add_special_tokens": False, "add_generation_prompt": False}, RENDERED),
    ],
)
def test_a_conversation_is_rendered_as_asked(server: LiveServer, body: dict[str, Any], prompt: str) -> None:
    wanted = server.generate("chatty", prompt=prompt, max_new_tokens=4).json()
    document = chat(server, max_tokens=4, **body)
    assert document["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
    assert document["choices"][0]["message"]["content"] == wanted["outputs"][0]["text"]
