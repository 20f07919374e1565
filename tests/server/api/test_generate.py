"""`POST /generate` over HTTP: replies, streams, defaults, log-probabilities and headers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.helpers.live_server import (
    MAX_MODEL_LEN,
    Artifacts,
    LiveServer,
    connection,
    error_of,
    eventually,
    json_request,
)

HELLO_TOKENS = 5  # a token per byte


def gathered(events: list[tuple[str, Any]]) -> str:
    """Return the text of a stream: that of its tokens, and that held back until its end."""
    return "".join(data["text"] for name, data in events if name in ("token", "finish"))


def test_each_variant_answers_with_its_own_tokens(server: LiveServer) -> None:
    answers = [server.token_ids(variant, max_new_tokens=12) for variant in (None, "plain", "chatty", "third")]
    assert all(len(answer) == 12 for answer in answers)
    assert len({tuple(answer) for answer in answers}) == 4


def test_the_reply_says_which_version_answered(server: LiveServer) -> None:
    reply = server.generate("plain", max_new_tokens=3)
    listed = server.client.get("/variants/plain").json()["versions"][0]
    document = reply.json()
    assert (document["variant"], document["version"], document["digest"]) == ("plain", 1, listed["digest"])
    assert document["digest"].startswith("sha256:")
    assert reply.headers["X-Peraxis-Variant"] == "plain"
    assert reply.headers["X-Peraxis-Version"] == "1"
    assert reply.headers["X-Peraxis-Digest"] == listed["digest"]


def test_the_base_has_a_name_but_no_version(server: LiveServer) -> None:
    reply = server.generate("base", max_new_tokens=3)
    document = reply.json()
    assert (document["variant"], document["version"], document["digest"]) == ("base", None, None)
    assert reply.headers["X-Peraxis-Variant"] == "base"
    assert "X-Peraxis-Digest" not in reply.headers
    assert document["outputs"] == server.generate(max_new_tokens=3).json()["outputs"]


def test_the_reply_counts_tokens_and_times(server: LiveServer) -> None:
    document = server.generate("plain", max_new_tokens=3).json()
    assert document["usage"] == {"prompt_tokens": HELLO_TOKENS, "completion_tokens": 3, "total_tokens": 8}
    assert document["outputs"][0]["finish_reason"] == "length"
    timings = document["timings"]
    assert list(timings) == ["queue_s", "load_s", "cold", "ttft_s", "total_s"]
    assert 0 <= timings["queue_s"] <= timings["ttft_s"] <= timings["total_s"]


def test_a_pinned_version_is_the_one_that_answers(server: LiveServer, artifacts: Artifacts) -> None:
    server.upload("two-versions", artifacts.plain)
    server.upload("two-versions", artifacts.third)
    assert server.generate("two-versions", max_new_tokens=1).json()["version"] == 2
    assert server.token_ids("two-versions@1", max_new_tokens=8) == server.token_ids("plain", max_new_tokens=8)


def test_a_conversation_goes_through_the_variants_own_template(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rendered = "<user>hi\n<assistant>"
    by_messages = server.generate("chatty", messages=messages).json()
    assert by_messages["outputs"] == server.generate("chatty", prompt=rendered).json()["outputs"]
    assert by_messages["usage"]["prompt_tokens"] == len(rendered)


def test_a_variant_without_a_template_refuses_a_conversation(server: LiveServer) -> None:
    reply = server.generate("plain", messages=[{"role": "user", "content": "hi"}])
    assert reply.status_code == 400
    assert error_of(reply)["param"] == "messages"


def test_defaults_come_from_the_variants_generation_config(server: LiveServer) -> None:
    greedy = server.generate("chatty", max_new_tokens=5).json()["outputs"]
    reply = server.client.post("/generate?variant=chatty", json={"prompt": "hello"})
    assert reply.json()["outputs"] == greedy
    assert reply.json()["usage"]["completion_tokens"] == 5


def test_a_default_length_gives_way_to_a_long_prompt(server: LiveServer) -> None:
    body = {"prompt": "a" * (MAX_MODEL_LEN - 2)}
    reply = server.client.post("/generate?variant=chatty", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 2


def test_seeds_fix_the_draw_and_each_answer_has_its_own(server: LiveServer) -> None:
    body = {"temperature": 1.0, "max_new_tokens": 16, "seed": 7, "n": 2}
    first, again = (server.generate("plain", **body).json()["outputs"] for _ in range(2))
    assert first == again
    assert first[0]["token_ids"] != first[1]["token_ids"]


def test_logprobs_name_the_chosen_token_and_the_likeliest(server: LiveServer) -> None:
    output = server.generate("plain", max_new_tokens=2, logprobs=3).json()["outputs"][0]
    assert [entry["token_id"] for entry in output["logprobs"]] == output["token_ids"]
    for entry in output["logprobs"]:
        assert len(entry["top"]) == 3
        assert entry["top"][0]["token_id"] == entry["token_id"]  # greedy takes the likeliest
        assert entry["top"][0]["logprob"] == entry["logprob"] < 0


def test_without_logprobs_there_are_none(server: LiveServer) -> None:
    assert "logprobs" not in server.generate("plain", max_new_tokens=1).json()["outputs"][0]


def test_a_stop_string_ends_the_answer_and_is_not_in_it(server: LiveServer) -> None:
    whole = server.generate("plain", max_new_tokens=60).json()["outputs"][0]["text"]
    stop = next(char for char in whole if char.isascii() and char.isprintable())
    output = server.generate("plain", max_new_tokens=60, stop=[stop]).json()["outputs"][0]
    assert output["finish_reason"] == "stop"
    assert output["text"] == whole[: whole.index(stop)]


def test_a_stream_carries_the_same_tokens_and_ends_with_the_totals(server: LiveServer) -> None:
    whole = server.generate("chatty", max_new_tokens=20).json()
    with server.streaming("chatty", max_new_tokens=20) as stream:
        events = list(stream)
    assert [name for name, _ in events] == ["token"] * 20 + ["finish", "done"]
    assert [data["token_id"] for name, data in events if name == "token"] == whole["outputs"][0]["token_ids"]
    assert gathered(events) == whole["outputs"][0]["text"]
    assert events[-2][1]["finish_reason"] == "length"
    last = events[-1][1]
    assert (last["usage"], last["digest"]) == (whole["usage"], whole["digest"])
    assert list(last["timings"]) == list(whole["timings"])


def test_a_stream_of_several_answers_numbers_them(server: LiveServer) -> None:
    with server.streaming("plain", max_new_tokens=4, n=2, logprobs=0) as stream:
        events = list(stream)
    assert [data["index"] for name, data in events if name == "finish"] == [0, 1]
    assert all(len(data["logprobs"]) == 1 for name, data in events if name == "token")


def test_a_stream_is_marked_so_that_proxies_do_not_hold_it_back(server: LiveServer) -> None:
    body = {"prompt": "hello", "max_new_tokens": 1, "stream": True}
    reply = server.client.post("/generate?variant=plain", json=body)
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    assert reply.headers["Cache-Control"] == "no-cache"
    assert reply.headers["X-Peraxis-Variant"] == "plain"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_ends_its_request(server: LiveServer, stream: bool) -> None:
    def cancelled() -> float:
        return server.metric("variant_requests_total", variant="default/third", finish_reason="cancelled")

    before = cancelled()
    body = {"prompt": "hello", "max_new_tokens": MAX_MODEL_LEN - 10, "n": 100, "stream": stream}
    with connection(server.url) as raw:
        raw.sendall(json_request("/generate?variant=third", body))
        assert eventually(lambda: server.client.get("/variants/third").json()["versions"][0]["num_requests"])
    assert eventually(lambda: cancelled() == before + 1)
    assert server.client.get("/variants/third").json()["versions"][0]["num_requests"] == 0
