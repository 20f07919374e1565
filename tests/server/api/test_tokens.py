"""`POST /tokenize` and `POST /detokenize` over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.tiny_models import VOCAB_SIZE, make_tokenizer
from tests.server.helpers.live_server import MAX_MODEL_LEN, LiveServer, error_of

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def ask(server: LiveServer, route: str, **body: Any) -> dict[str, Any]:
    reply = server.client.post(route, json=body)
    assert reply.status_code == 200, reply.text
    document: dict[str, Any] = reply.json()
    return document


def test_a_prompt_has_the_token_ids_of_transformers(server: LiveServer) -> None:
    ids = make_tokenizer()("naïve 漢字")["input_ids"]
    assert ask(server, "/tokenize", prompt="naïve 漢字", model="plain") == {
        "count": len(ids),
        "max_model_len": MAX_MODEL_LEN,
        "tokens": ids,
        "token_strs": None,
    }


def test_the_base_answers_without_a_model(server: LiveServer) -> None:
    assert ask(server, "/tokenize", prompt="abc") == ask(server, "/tokenize", prompt="abc", model="base")


def test_a_variant_s_own_tokens_are_its_own(server: LiveServer) -> None:
    own = ask(server, "/tokenize", prompt="<added-1>", model="chatty", return_token_strs=True)
    assert (own["tokens"], own["token_strs"]) == ([VOCAB_SIZE + 1], ["<added-1>"])
    assert ask(server, "/tokenize", prompt="<added-1>", model="plain")["count"] == len("<added-1>")
    assert ask(server, "/detokenize", tokens=own["tokens"], model="chatty") == {"prompt": "<added-1>"}


def test_a_conversation_is_rendered_first(server: LiveServer) -> None:
    found = ask(server, "/tokenize", messages=MESSAGES, model="chatty", return_token_strs=True)
    assert "".join(found["token_strs"]) == "<user>hiĊ<assistant>"
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert ask(server, "/tokenize", messages=in_parts, model="chatty")["tokens"] == found["tokens"]


def test_a_conversation_takes_the_fields_of_a_chat(server: LiveServer) -> None:
    body = {
        "messages": MESSAGES, "model": "chatty", "tools": [TOOL], "tool_choice": "auto", "chat_template": "default",
        "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none",
        "continue_final_message": True, "return_token_strs": True,
    }  # fmt: skip
    assert "".join(ask(server, "/tokenize", **body)["token_strs"]) == "<user>hi"
    chat = {"messages": MESSAGES, "model": "chatty"}
    special = ask(server, "/tokenize", **chat, add_special_tokens=True)["tokens"]
    assert special == make_tokenizer()("<user>hi\n<assistant>")["input_ids"]


def test_token_ids_become_text_again_with_their_special_tokens(server: LiveServer) -> None:
    tokens = ask(server, "/tokenize", prompt="</s>naïve", model="plain")["tokens"]
    assert ask(server, "/detokenize", tokens=tokens, model="plain") == {"prompt": "</s>naïve"}
    assert ask(server, "/detokenize", tokens=[]) == {"prompt": ""}


def test_the_reply_names_the_version(server: LiveServer) -> None:
    reply = server.client.post("/tokenize", json={"prompt": "a", "model": "plain@1"})
    assert (reply.headers["X-Peraxis-Variant"], reply.headers["X-Peraxis-Version"]) == ("plain", "1")


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, None),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a" * (MAX_MODEL_LEN + 1)}, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "model": "chatty", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": [{"role": "banana", "content": "a"}], "model": "chatty"}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "model": "chatty", "tools": [{"type": "f"}]}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "model": "plain"}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (MAX_MODEL_LEN + 1)}, "tokens"),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_by_its_field(
    server: LiveServer, route: str, body: dict[str, Any], param: str | None
) -> None:
    reply = server.client.post(route, json=body)
    assert reply.status_code == 400, reply.text
    error = error_of(reply)
    assert error["param"] == param
    # What is too long has a code of its own, which `test_http_manners.py` tests.
    assert error["code"] in ("invalid_request", "context_length_exceeded")


def test_an_unknown_model_is_not_found(server: LiveServer) -> None:
    for route, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        reply = server.client.post(route, json={**body, "model": "absent"})
        assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")
