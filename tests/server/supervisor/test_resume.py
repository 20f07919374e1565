"""Engines die under requests, which go on with the next engine as if nothing had happened, or are found at fault."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.helpers.live_server import Artifacts, LiveServer, error_of, eventually, live_server
from tests.server.helpers.poison import POISON_TOKEN, poisoned_environment
from tests.server.supervisor.test_faults import ENGINE, processes

# Several starts of an engine follow each other, each as slow as the machine.
PATIENCE_S = 1200
pytestmark = pytest.mark.timeout(2 * PATIENCE_S)
NUM_NEW = 600
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 80, "maxLength": 120}},
    "required": ["name"],
    "additionalProperties": False,
}
# Each is a call of a route, with the body that it is sent.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/generate?variant=plain", {"prompt": "hello", "temperature": 0, "max_new_tokens": NUM_NEW}),
    "base": ("/generate", {"prompt": "hello", "temperature": 0, "max_new_tokens": NUM_NEW}),
    "sampled": (
        "/generate?variant=third",
        {"prompt": "hi", "temperature": 1.5, "seed": 3, "n": 3, "max_new_tokens": NUM_NEW},
    ),
    "scored": (
        "/v1/completions",
        {"model": "plain", "prompt": [7] * 40, "max_tokens": NUM_NEW, "seed": 1, "logprobs": 2, "echo": True},
    ),
    "penalised": (
        "/generate?variant=plain",
        {"prompt": "hello", "seed": 5, "repetition_penalty": 1.3, "max_new_tokens": NUM_NEW},
    ),
    "constrained": (
        "/v1/chat/completions",
        {
            "model": "chatty",
            "messages": [{"role": "user", "content": "who?"}],
            "seed": 2,
            "max_tokens": NUM_NEW,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
}


NUM_WATCHED = NUM_NEW * 5
# Tokens of the stream that is watched, after which the engine is killed.
KILLED_AT = (30, 150)
GONE_ON = "requests go on with another engine"
NUM_INNOCENT = 30


def ask(server: LiveServer, call: str) -> Any:
    """Return the parts of a reply that do not differ between two runs."""
    target, body = CALLS[call]
    reply = httpx.post(f"{server.url}{target}", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return without_identity(reply.json())


def without_identity(document: Any) -> Any:
    """Leave out ids and times; other requests in a step change the last bits of a log-probability."""
    if isinstance(document, dict):
        left_out = ("id", "created", "timings", "system_fingerprint")
        return {key: without_identity(value) for key, value in document.items() if key not in left_out}
    if isinstance(document, list):
        return [without_identity(value) for value in document]
    return Close(document) if isinstance(document, float) else document


class Close(float):
    """A number that is equal to those near it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(float(self) - float(other)) < 1e-4

    __hash__ = float.__hash__


@pytest.fixture(scope="module")
def server(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("resume")
    sizes = ("--http-workers", 2, "--max-gpu-deltas", 2, "--max-num-seqs", 40)
    options = (*sizes, "--shutdown-timeout", 1, "--resume-timeout", PATIENCE_S)
    environment = poisoned_environment(directory / "poison")
    with live_server(artifacts.base, directory / "registry", *options, environment=environment) as running:
        for name in ("plain", "chatty", "third"):
            assert running.upload(name, getattr(artifacts, name)).status_code == 201
        yield running


def test_requests_of_every_kind_go_on_with_the_next_engine_token_for_token(server: LiveServer) -> None:
    want = {call: ask(server, call) for call in CALLS}
    watched = server.token_ids(max_new_tokens=NUM_WATCHED)
    with ThreadPoolExecutor(len(CALLS)) as pool:
        got = {call: pool.submit(ask, server, call) for call in CALLS}

        def have_begun() -> bool:
            num_done = sum(answer.done() for answer in got.values())
            return server.metric("num_requests_running") + num_done >= len(CALLS)

        assert eventually(have_begun)
        streamed: list[int] = []
        with server.streaming(max_new_tokens=NUM_WATCHED) as stream:
            for name, document in stream:
                assert name != "error", document
                if name == "token":
                    streamed.append(document["token_id"])
                if len(streamed) in KILLED_AT and name == "token":
                    num_killed = KILLED_AT.index(len(streamed))
                    # Tokens of the engine before may still come: the next one must have taken over.
                    assert eventually(lambda: server.log.read_text().count(GONE_ON) >= num_killed)  # noqa: B023
                    eventually(lambda: processes(server, ENGINE))[0].kill()
        assert {call: answer.result() for call, answer in got.items()} == want
    assert streamed == watched
    assert server.log.read_text().count(GONE_ON) >= len(KILLED_AT)


def test_two_requests_that_kill_their_engine_are_found_among_thirty_that_do_not(server: LiveServer) -> None:
    def innocent(number: int) -> Any:
        body = {"prompt": [number + 5, 7], "max_tokens": 60, "seed": number, "logprobs": 0}
        model = ("base", "plain", "third")[number % 3]
        reply = httpx.post(f"{server.url}/v1/completions", json={"model": model, **body}, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        return without_identity(reply.json())

    def poisoned(model: str) -> httpx.Response:
        body = {"model": model, "prompt": [9] * 10 + [POISON_TOKEN], "max_tokens": 60, "temperature": 0}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)

    want = [innocent(number) for number in range(NUM_INNOCENT)]
    with ThreadPoolExecutor(NUM_INNOCENT + 2) as pool:
        answers = [pool.submit(innocent, number) for number in range(NUM_INNOCENT)]
        at_fault = [pool.submit(poisoned, model) for model in ("base", "plain")]
        for answer, expected in zip(answers, want, strict=True):
            assert answer.result() == expected
        for failed in at_fault:
            reply = failed.result()
            assert (reply.status_code, error_of(reply)["code"]) == (500, "engine_failed")
    # A second one of the same version, and it is served no more.
    reply = poisoned("plain")
    assert (reply.status_code, error_of(reply)["code"]) == (500, "engine_failed")
    assert eventually(lambda: server.client.get("/ready").is_success)
    reply = server.generate("plain", max_new_tokens=2)
    assert (reply.status_code, error_of(reply)["code"]) == (424, "variant_quarantined")
    assert server.token_ids("third", max_new_tokens=4)


def test_a_request_waits_no_longer_than_its_time_for_another_engine(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    with live_server(artifacts.base, tmp_path / "registry", "--resume-timeout", 0.2) as server:
        # Found before, so that the answer is not whole when it is killed.
        [engine] = processes(server, ENGINE)
        with server.streaming(max_new_tokens=NUM_WATCHED) as stream:
            next(stream)
            engine.kill()
            *_, (name, document) = stream
    assert (name, document["error"]["code"]) == ("error", "engine_restarted")
