"""`POST /v1/completions` over HTTP: prompts of every form, echoes, log-probabilities, streams and refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.helpers.tiny_models import make_tokenizer
from tests.server.helpers.live_server import MAX_MODEL_LEN, LiveServer, error_of

HELLO = make_tokenizer()("hello")["input_ids"]


def post(server: LiveServer, **body: Any) -> httpx.Response:
    """Ask the variant ``plain`` for greedy tokens; `body` overrides."""
    return server.client.post("/v1/completions", json={"model": "plain", "temperature": 0, **body})


def complete(server: LiveServer, **body: Any) -> dict[str, Any]:
    reply = post(server, **body)
    assert reply.status_code == 200, reply.text
    document: dict[str, Any] = reply.json()
    return document


def texts(document: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in document["choices"]] == list(range(len(document["choices"])))
    return [choice["text"] for choice in document["choices"]]


def stream(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    """Return the documents of a stream, which must end with ``[DONE]``."""
    reply = post(server, stream=True, **body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def usage_of(document: dict[str, Any]) -> dict[str, int]:
    """Return the number of tokens, without how many of them were cached."""
    usage: dict[str, Any] = document["usage"]
    assert 0 <= usage.pop("prompt_tokens_details")["cached_tokens"] < usage["prompt_tokens"]
    return usage


def joined(documents: list[dict[str, Any]], index: int) -> str:
    """Return the text that a stream gives one choice."""
    choices = [choice for document in documents for choice in document["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


@pytest.mark.parametrize("model", ["base", "plain", "chatty", "third@1"])
def test_a_completion_has_the_tokens_of_generate(server: LiveServer, model: str) -> None:
    output = server.generate(model, max_new_tokens=12, logprobs=0).json()["outputs"][0]
    choice = complete(server, model=model, prompt="hello", max_tokens=12, logprobs=0)["choices"][0]
    assert choice["text"] == output["text"]
    assert choice["finish_reason"] == output["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [entry["logprob"] for entry in output["logprobs"]]


def test_the_reply_names_the_version_that_answered(server: LiveServer) -> None:
    reply = post(server, prompt="hello", max_tokens=3)
    document, version = reply.json(), server.client.get("/variants/plain").json()["versions"][0]
    digest = version["digest"].removeprefix("sha256:")
    assert document["object"] == "text_completion"
    assert document["id"].startswith("cmpl-")
    assert document["model"] == "plain"
    assert document["system_fingerprint"] == digest[:12]
    assert reply.headers["X-Peraxis-Variant"] == "plain"
    assert reply.headers["X-Peraxis-Version"] == "1"
    assert reply.headers["X-Peraxis-Digest"] == version["digest"]
    assert usage_of(document) == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def test_the_base_has_no_version_and_no_fingerprint(server: LiveServer) -> None:
    reply = post(server, model="base", prompt="hello", max_tokens=1)
    assert reply.json()["system_fingerprint"] is None
    assert "X-Peraxis-Version" not in reply.headers


def test_sixteen_tokens_come_without_a_length(server: LiveServer) -> None:
    assert complete(server, prompt="hello")["usage"]["completion_tokens"] == 16


def test_every_form_of_a_prompt_gives_the_same_tokens(server: LiveServer) -> None:
    wanted = texts(complete(server, prompt="hello", max_tokens=8))
    for prompt in (["hello"], HELLO, [HELLO]):
        assert texts(complete(server, prompt=prompt, max_tokens=8)) == wanted


def test_the_choices_of_several_prompts_stand_in_their_order(server: LiveServer) -> None:
    prompts = ["hello", "a", "a much longer prompt than the others"]
    alone = [texts(complete(server, prompt=prompt, max_tokens=6))[0] for prompt in prompts]
    together = complete(server, prompt=prompts, max_tokens=6)
    assert texts(together) == alone
    assert together["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert together["usage"]["completion_tokens"] == 18


def test_each_prompt_has_n_choices_with_draws_of_their_own(server: LiveServer) -> None:
    body = {"prompt": ["hello", "world"], "max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 2}
    found = texts(complete(server, **body))
    assert len(set(found)) == 4
    assert texts(complete(server, **body)) == found
    assert texts(complete(server, **{**body, "prompt": "hello"})) == found[:2]


def test_a_stop_string_ends_a_choice_and_is_not_in_it(server: LiveServer) -> None:
    (whole,) = texts(complete(server, prompt="hello", max_tokens=60))
    stop = next(char for char in whole if char.isascii() and char.isprintable())
    (choice,) = complete(server, prompt="hello", max_tokens=60, stop=stop)["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_logprobs_name_each_token_its_place_and_the_likeliest(server: LiveServer) -> None:
    (choice,) = complete(server, prompt="hello", max_tokens=20, logprobs=3)["choices"]
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert {len(values) for values in logprobs.values()} == {20}
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert 1 <= len(top) <= 3
        assert top[token] == logprob == max(top.values())  # greedy takes the likeliest
    offsets = [*logprobs["text_offset"], len(choice["text"])]
    for token, offset, end in zip(logprobs["tokens"], offsets, offsets[1:], strict=False):
        assert token.startswith("bytes:") or choice["text"][offset:end].endswith(token)


def test_an_unlikely_token_stands_beside_the_likeliest(server: LiveServer) -> None:
    body = {"prompt": "hello", "max_tokens": 30, "temperature": 2.0, "seed": 1, "logprobs": 1}
    logprobs = complete(server, **body)["choices"][0]["logprobs"]
    others = 0
    for logprob, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert logprob <= max(top.values())
        others += len(top) == 2 and logprob in top.values()
    assert others


def test_an_echo_repeats_the_prompt_with_its_log_probabilities(server: LiveServer) -> None:
    new = complete(server, prompt="hello", max_tokens=4, logprobs=2)["choices"][0]
    choice = complete(server, prompt="hello", max_tokens=4, logprobs=2, echo=True)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "hello" + new["text"]
    assert logprobs["tokens"] == [*"hello", *new["logprobs"]["tokens"]]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(logprob < 0 for logprob in logprobs["token_logprobs"][1:])
    assert logprobs["token_logprobs"][5:] == pytest.approx(new["logprobs"]["token_logprobs"], abs=1e-4)
    assert logprobs["text_offset"][:6] == [0, 1, 2, 3, 4, 5]


def test_an_echo_without_log_probabilities_is_only_text(server: LiveServer) -> None:
    (new,) = texts(complete(server, prompt="hello", max_tokens=4))
    choice = complete(server, prompt=[HELLO, HELLO], max_tokens=4, echo=True)["choices"][1]
    assert choice["logprobs"] is None
    assert texts(complete(server, prompt=HELLO, max_tokens=4, echo=True)) == ["hello" + new]


@pytest.mark.parametrize("prompt", ["h", "hello"])
def test_no_new_token_comes_with_an_echo_of_the_prompt_alone(server: LiveServer, prompt: str) -> None:
    document = complete(server, prompt=prompt, max_tokens=0, logprobs=1, echo=True)
    (choice,) = document["choices"]
    assert choice["text"] == prompt
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == list(prompt)
    assert document["usage"]["completion_tokens"] == 0
    documents = stream(server, prompt=prompt, max_tokens=0, logprobs=1, echo=True)
    assert joined(documents, 0) == prompt
    assert documents[0]["choices"][0]["logprobs"] == choice["logprobs"]


def test_a_stream_gives_each_choice_the_text_of_the_whole_reply(server: LiveServer) -> None:
    body: dict[str, Any] = {
        "prompt": ["hello", "world"],
        "max_tokens": 10,
        "n": 2,
        "seed": 5,
        "temperature": 1.0,
    }
    whole, documents = complete(server, **body), stream(server, **body)
    assert [joined(documents, index) for index in range(4)] == texts(whole)
    ends = [choice for document in documents for choice in document["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2, 3]
    assert len({document["id"] for document in documents}) == 1
    assert not any("usage" in document for document in documents)


def test_a_stream_with_echo_and_logprobs_gives_what_the_whole_reply_has(server: LiveServer) -> None:
    body: dict[str, Any] = {"prompt": ["hello", "world"], "max_tokens": 5, "logprobs": 2, "echo": True}
    whole, documents = complete(server, **body), stream(server, **body)
    for choice in whole["choices"]:
        assert joined(documents, choice["index"]) == choice["text"]
        parts = [
            part["logprobs"]
            for document in documents
            for part in document["choices"]
            if part["index"] == choice["index"] and part["logprobs"]
        ]
        found = {name: [value for part in parts for value in part[name]] for name in choice["logprobs"]}
        for name in ("tokens", "text_offset"):
            assert found[name] == choice["logprobs"][name]
        wanted = choice["logprobs"]["token_logprobs"]
        assert found["token_logprobs"] == pytest.approx(wanted, abs=1e-4)


def test_a_stream_ends_with_its_usage_on_request(server: LiveServer) -> None:
    documents = stream(server, prompt="hello", max_tokens=3, stream_options={"include_usage": True})
    *parts, last = documents
    assert all(document["usage"] is None for document in parts)
    assert last["choices"] == []
    assert usage_of(last) == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def test_each_event_of_a_stream_has_its_usage_on_request(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    documents = stream(server, prompt="hello", max_tokens=4, stream_options=options)
    counts = [document["usage"]["completion_tokens"] for document in documents]
    assert counts == sorted(counts)
    assert (counts[0] >= 1, counts[-1]) == (True, 4)


@pytest.mark.parametrize("is_stream", [False, True])
def test_usage_tells_the_tokens_that_were_cached(server: LiveServer, is_stream: bool) -> None:
    """Pages of 16 tokens are cached, and the last token is always computed."""
    body = {
        "prompt": [5 + is_stream, *range(3, 45)],
        "max_tokens": 1,
        "stream_options": {"include_usage": True},
    }
    cached = []
    for _ in range(2):
        document = stream(server, **body)[-1] if is_stream else complete(server, **body)
        cached.append(document["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 32]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "much"}, "presence_penalty"),
        ({"logit_bias": {"50": 101}}, "logit_bias"),
        ({"logit_bias": {"10000": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"top_k": -2}, "top_k"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_json": "no json"}, "guided_json"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"num_beams": 4}, "num_beams"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ({"suffix": "the end"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 0}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10_000]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1] * (MAX_MODEL_LEN + 1)}, "prompt"),
        ({"prompt": "a" * (MAX_MODEL_LEN + 1)}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
        ({"prompt": ["a" * 4000] * 200, "echo": True, "logprobs": 5, "max_tokens": 1}, "logprobs"),
        ({"prompt": ["a" * 4000] * 50, "echo": True, "n": 100, "max_tokens": 1}, "prompt"),
        ({"model": ""}, "model"),
        ({"stop": ["a"] * 17}, "stop"),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_by_its_field(
    server: LiveServer, body: dict[str, Any], param: str
) -> None:
    reply = post(server, **{"prompt": "hello", **body})
    assert reply.status_code == 400, reply.text
    error = error_of(reply)
    assert error["param"] == param
    # What is too long has a code of its own, which `test_http_manners.py` tests.
    assert error["code"] in ("invalid_request", "context_length_exceeded")


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(server: LiveServer, missing: str) -> None:
    body = {"model": "plain", "prompt": "hello"}
    del body[missing]
    reply = server.client.post("/v1/completions", json=body)
    assert (reply.status_code, error_of(reply)["param"]) == (400, missing)


def test_fields_that_change_nothing_are_ignored(server: LiveServer) -> None:
    neutral = {
        "best_of": 1, "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "suffix": None,
        "user": "someone", "store": True, "a_field_of_tomorrow": [{"a": 1}],
    }  # fmt: skip
    assert texts(complete(server, prompt="hello", **neutral)) == texts(complete(server, prompt="hello"))


@pytest.mark.parametrize("model", ["absent", "plain@9", "plain@x", "../plain", "PLAIN"])
def test_an_unknown_model_is_not_found(server: LiveServer, model: str) -> None:
    reply = post(server, model=model, prompt="hello")
    assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")
