"""Fields of OpenAI's calls, of vLLM's and of transformers': served, neutral, refused by name, or ignored and told."""

from __future__ import annotations

import logging
from typing import Any, get_args, get_type_hints

import msgspec
import openai.types as openai_types
import pytest
from openai.types.chat import completion_create_params as chat_params

from server.api.fields import MAX_LOGGED, MAX_TOLD, NEUTRAL, IgnoredNames, ignored_fields, told
from server.api.schemas import ChatBody, CompletionBody
from server.errors import InvalidRequest
from tests.helpers.tiny_models import make_tokenizer
from tests.server.helpers.live_server import LiveServer

TOKENIZER = make_tokenizer()
# The fields of vLLM's SamplingParams that its request schemas have, in 0.28 to 0.33.
VLLM_FIELDS = [
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "watermarking",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "repetition_detection",
    "truncate_prompt_tokens",
    "use_beam_search",
    "length_penalty",
]


def fields_of(kind: type[msgspec.Struct]) -> set[str]:
    return set(kind.__struct_encode_fields__) | set(NEUTRAL)


def names(params: Any) -> set[str]:
    return {name for each in get_args(params) for name in get_type_hints(each)} - {"extra_headers"}


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (ChatBody, chat_params.CompletionCreateParams),
        (CompletionBody, openai_types.CompletionCreateParams),
    ],
)
def test_every_field_of_openais_client_and_of_vllm_has_a_place(
    kind: type[msgspec.Struct], params: Any
) -> None:
    assert names(params) - fields_of(kind) == set()
    # One that the other call has is not unknown.
    other = ChatBody if kind is CompletionBody else CompletionBody
    assert set(other.__struct_encode_fields__) - fields_of(kind) == set()
    assert set(VLLM_FIELDS) - fields_of(kind) == set()


def complete(server: LiveServer, **body: Any) -> dict[str, Any]:
    asked = {"model": "plain", "prompt": "hello", "temperature": 0, "max_tokens": 8, "logprobs": 0, **body}
    reply = server.client.post("/v1/completions", json=asked)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def test_a_bias_decides_a_token(server: LiveServer) -> None:
    token = TOKENIZER("z")["input_ids"][0]
    assert complete(server, logit_bias={str(token): 100})["text"] == "z" * 8
    first = complete(server)["logprobs"]["tokens"][0]
    banned = {str(token): -100 for token in TOKENIZER(first)["input_ids"]}
    assert complete(server, logit_bias=banned)["logprobs"]["tokens"][0] != first


def test_penalties_forbid_repetition(server: LiveServer) -> None:
    token = str(TOKENIZER("z")["input_ids"][0])
    for penalty in ("frequency_penalty", "presence_penalty"):
        tokens = complete(server, logit_bias={token: 1.5}, **{penalty: 2})["logprobs"]["tokens"]
        rewarded = complete(server, logit_bias={token: 1.5}, **{penalty: -2})["logprobs"]["tokens"]
        assert len(set(rewarded)) <= len(set(tokens))
        assert tokens != rewarded


def test_a_stop_token_ends_an_answer_and_is_not_in_it(server: LiveServer) -> None:
    token = TOKENIZER("z")["input_ids"][0]
    ended = complete(server, logit_bias={str(token): 100}, stop_token_ids=[token])
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")
    later = complete(server, logit_bias={str(token): 100}, stop_token_ids=[token], min_tokens=3, max_tokens=9)
    assert (later["finish_reason"], len(later["logprobs"]["tokens"])) == ("stop", 4)
    assert "z" not in later["text"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["z"], "yyyyyyyy"),
        (["zz"], "zyzyzyzy"),
        (["zy", "zz"], "zxzxzxzx"),
        ([], "zzzzzzzz"),
        (["z", "y"], "xxxxxxxx"),
    ],
)
def test_bad_words_do_not_come(server: LiveServer, words: list[str], text: str) -> None:
    bias = {str(TOKENIZER(each)["input_ids"][0]): value for each, value in (("z", 100), ("y", 90), ("x", 80))}
    assert complete(server, logit_bias=bias, bad_words=words)["text"] == text


@pytest.mark.parametrize(
    "words", [[""], ["a" * 129], ["a"] * 129, "a", ["abcdefgh" * 16 + str(i) for i in range(99)]]
)
def test_bad_words_have_bounds(server: LiveServer, words: Any) -> None:
    body = {"model": "plain", "prompt": "hello", "max_tokens": 1, "bad_words": words}
    reply = server.client.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert "bad_words" in reply.json()["error"]["message"]


def test_an_end_token_is_none_on_request(server: LiveServer) -> None:
    bias = {str(TOKENIZER.eos_token_id): 100}
    assert complete(server, logit_bias=bias)["finish_reason"] == "stop"
    ignored = complete(server, logit_bias=bias, ignore_eos=True)
    assert (ignored["finish_reason"], len(ignored["logprobs"]["tokens"])) == ("length", 8)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_is_shown_on_request(server: LiveServer, is_stream: bool) -> None:
    token = TOKENIZER("z")["input_ids"][0]
    body = {
        "model": "plain",
        "prompt": "hello",
        "temperature": 0,
        "max_tokens": 8,
        "logit_bias": {str(token): 100},
    }
    body |= {"stop": "zzz", "include_stop_str_in_output": True, "stream": is_stream}
    with server.client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.read().count(b"z") == 3


def test_no_probability_takes_the_likeliest_token(server: LiveServer) -> None:
    assert complete(server, temperature=5, top_p=0)["text"] == complete(server)["text"]
    assert complete(server, top_k=-1)["text"] == complete(server)["text"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_fields_of_no_api_are_ignored_and_told(server: LiveServer, route: str) -> None:
    chat = route.endswith("chat/completions")
    body = {
        "model": "chatty",
        "max_tokens": 1,
        "provider": {"a": 1},
        "x,\r\ny\u20ac": 2,
        "metadata": {"a": "b"},
    }
    body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    reply = server.client.post(route, json=body)
    assert reply.status_code == 200
    assert reply.headers["X-Peraxis-Ignored"] == "provider, x???y?"
    refused = server.client.post(route, json={**body, "use_beam_search": True})
    assert refused.json()["error"]["param"] == "use_beam_search"


def test_a_head_names_a_bounded_number_of_fields_and_the_log_each_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "server.api.fields")
    many = tuple(f"a field of my own {number} {'x' * 100}" for number in range(1000))
    assert len(told(many)) < MAX_TOLD * 70
    ignored = IgnoredNames()
    for _ in range(2):
        ignored.tell(many, "a")
    assert len(caplog.records) == MAX_LOGGED // 2
    # Whatever one tenant sends, the log tells those of others.
    ignored.tell((*many, "tempreature"), "b")
    ignored.tell(("tempreature",), "c")
    assert "tempreature" in caplog.messages[-1]
    for number in range(100):
        ignored.tell(tuple(f"{number} {each}" for each in range(1000)), f"tenant {number}")
    assert len(caplog.records) <= MAX_LOGGED


@pytest.mark.parametrize(("name", "neutral"), [(n, v) for n, values in NEUTRAL.items() for v in values or ()])
def test_a_value_that_asks_for_nothing_is_neutral(name: str, neutral: object) -> None:
    for value in (neutral, None):
        assert ignored_fields(CompletionBody, msgspec.json.encode({name: value})) == ()
    if name not in CompletionBody.__struct_encode_fields__:
        with pytest.raises(InvalidRequest, match=name):
            ignored_fields(CompletionBody, msgspec.json.encode({name: "something else"}))
