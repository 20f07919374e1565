"""Two engine replicas on a real Ray Serve behind the web application, and the death of one of them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Event
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.server.helpers.live_server import WAIT_S, Artifacts, LiveServer, error_of, eventually
from tests.server.helpers.served import generate, merged, same_up_to_a_tie
from tests.server.scale.helpers.ray_server import NUM_SEQS, RayServer, ray_server, wait_until_ready

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Bern", "Rome"]}, "large": {"type": "boolean"}},
    "required": ["name", "large"],
    "additionalProperties": False,
}
NUM_TOKENS = 16
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": NUM_TOKENS},
    "several draws": {"max_new_tokens": NUM_TOKENS, "n": 3, "temperature": 1.0, "seed": 7},
    "logprobs": {"max_new_tokens": 4, "logprobs": 2},
}
# More than the engines run at a time, so that some wait.
NUM_STREAMS = 3 * NUM_SEQS
MAX_STREAMED = 500


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.deploy)], ids=["proxy", "haproxy"]
)
def ray(
    artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[RayServer]:
    """Run one server for this file's tests, behind Ray Serve's proxy or HAProxy."""
    registry = tmp_path_factory.mktemp("ray") / "registry"
    registry.mkdir()
    with ray_server(artifacts.base, registry, has_haproxy=request.param) as running:
        for name in ("plain", "chatty", "third"):
            assert running.upload(name, getattr(artifacts, name)).status_code == 201
        yield running


def stream(ray: RayServer, variant: str, begun: Event) -> tuple[int, str, dict[str, Any]]:
    """Stream tokens; return their number, and the name and data of the last event."""
    seen: list[tuple[str, dict[str, Any]]] = []
    with ray.streaming(variant, max_new_tokens=MAX_STREAMED) as events:
        for event in events:
            seen.append(event)
            begun.set()
    name, data = seen[-1]
    return sum(each == "token" for each, _ in seen), name, data


@pytest.mark.parametrize("variant", ["plain", "third"])
def test_a_variant_answers_as_its_merged_checkpoint(
    ray: RayServer, artifacts: Artifacts, variant: str, tmp_path: Any
) -> None:
    reference = merged(artifacts.base, getattr(artifacts, variant), tmp_path / "merged")
    body = {"model": variant, "prompt": "hello"}
    prompt_ids = ray.client.post("/tokenize", json=body).json()["tokens"]
    tokens, margins = generate(reference, prompt_ids, NUM_TOKENS)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: ray.token_ids(variant, max_new_tokens=NUM_TOKENS), range(8)))
    for reply in replies:
        assert same_up_to_a_tie(reply, tokens, margins)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_reply_is_that_of_a_server_without_ray(
    ray: RayServer, server: LiveServer, body: dict[str, Any]
) -> None:
    theirs, ours = (each.generate("third", **body).json()["outputs"] for each in (server, ray))
    assert ours == theirs


def test_an_answer_matches_its_schema(ray: RayServer) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    body = {"model": "plain", "prompt": "a", "max_tokens": 200, "n": 3, "temperature": 1.5, "seed": 3}
    reply = ray.client.post("/v1/completions", json={**body, "response_format": response_format})
    assert reply.status_code == 200, reply.text
    for choice in reply.json()["choices"]:
        jsonschema_rs.validate(SCHEMA, json.loads(choice["text"]))


def test_a_stop_string_ends_its_sequence(ray: RayServer) -> None:
    body = {"model": "plain", "prompt": "hello", "max_tokens": 200, "temperature": 0}
    whole = ray.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = whole[20:22]
    (choice,) = ray.client.post("/v1/completions", json={**body, "stop": stop}).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == whole[: whole.index(stop)]


def test_a_client_that_leaves_ends_its_request(ray: RayServer) -> None:
    def cancelled() -> float:
        return ray.metric("variant_requests_total", finish_reason="cancelled", variant="default/chatty")

    before = cancelled()
    with ray.streaming("chatty", max_new_tokens=4000) as events:
        next(events)
    assert eventually(lambda: cancelled() > before)
    assert eventually(lambda: ray.client.get("/stats").json()["requests"]["running"] == 0)


def test_a_version_is_pinned_and_unloaded_wherever_it_is(ray: RayServer) -> None:
    def called(action: str) -> tuple[str, bool]:
        found = ray.client.post(f"/variants/chatty/{action}").json()
        return found["level"], found["pinned"]

    def levels() -> list[str]:
        return [version["level"] for version in ray.client.get("/variants/chatty").json()["versions"]]

    # A reply may come before the outcome of its call.
    assert eventually(lambda: called("pin") == ("device", True))
    assert eventually(lambda: not called("unpin")[1])
    ray.client.post("/variants/chatty/unload")
    assert eventually(lambda: levels() == ["disk"])


def test_limits_hold_for_all_replicas_together(ray: RayServer) -> None:
    limits = {"requests_per_minute": 3}
    assert ray.client.put("/tenants/acme", json=limits).status_code == 200
    headers = {"Authorization": f"Bearer {ray.key('acme')}"}
    body = {"prompt": "hello", "max_new_tokens": 1}

    def ask() -> httpx.Response:
        return ray.client.post("/generate", json=body, headers=headers)

    # The replica that counts has read the limit; requests before it count, too.
    assert eventually(lambda: "x-ratelimit-limit-requests" in ask().headers)
    answers = [ask().status_code for _ in range(6)]
    # Two of three, and one more if a minute begins meanwhile; each replica alone would let five pass.
    assert answers.count(200) <= 3
    assert set(answers) - {200} == {429}


def test_metrics_and_statistics_are_those_of_all_replicas(ray: RayServer) -> None:
    assert ray.metric("slots") == 4
    assert ray.metric("ready") == 1
    assert ray.client.get("/stats").json()["engine"]["slots"] == 4


def test_a_killed_replica_fails_only_requests_that_had_begun(ray: RayServer) -> None:
    lengths = {name: len(ray.token_ids(name, max_new_tokens=MAX_STREAMED)) for name in ("plain", "third")}
    longest = max(lengths, key=lengths.__getitem__)
    begun = [Event() for _ in range(NUM_STREAMS)]
    # Looked for beforehand, which takes as long as some streams.
    victim, survivor = ray.replicas("Engine")
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        # Both engines have the variant.
        list(pool.map(lambda _: ray.token_ids(longest, max_new_tokens=MAX_STREAMED), range(NUM_STREAMS)))
        answers = [pool.submit(stream, ray, longest, each) for each in begun]
        assert eventually(lambda: sum(each.is_set() for each in begun) >= 5)
        victim.send_signal(signal.SIGKILL)
        ended = [answer.result() for answer in answers]
    failed = [(count, data) for count, name, data in ended if name == "error"]
    assert all(count and data["error"]["code"] == "engine_restarted" for count, data in failed), failed
    assert 1 <= len(failed) <= NUM_SEQS
    assert [name for _, name, _ in ended].count("done") == NUM_STREAMS - len(failed)
    assert {count for count, name, _ in ended if name == "done"} == {lengths[longest]}
    assert survivor.is_running()
    wait_until_ready(ray, 2)


def stream_as(ray: RayServer, key: str, begun: Event) -> list[str]:
    """Stream tokens of the base to the end, or until the connection breaks; return the names of the events."""
    names: list[str] = []
    body = {"prompt": "hello", "stream": True, "max_new_tokens": 3000}
    headers = {"Authorization": f"Bearer {key}"}
    with (
        suppress(httpx.TransportError),
        ray.client.stream("POST", "/generate", json=body, headers=headers) as reply,
    ):
        for line in reply.iter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
                begun.set()
    return names


def killed_under_streams(ray: RayServer, deployment: str, keys: list[str]) -> list[list[str]]:
    """Kill a deployment's replica under a stream of each key; return the names of their events."""
    begun = [Event() for _ in keys]
    with ThreadPoolExecutor(len(keys)) as pool:
        streams = [pool.submit(stream_as, ray, *each) for each in zip(keys, begun, strict=True)]
        assert all(each.wait(60) for each in begun)
        for victim in ray.replicas(deployment):
            victim.send_signal(signal.SIGKILL)
        return [each.result() for each in streams]


def tenants(ray: RayServer, names: tuple[str, str]) -> list[str]:
    """Return keys of two tenants, each of which may run one request at a time."""
    for name in names:
        assert ray.client.put(f"/tenants/{name}", json={"max_running": 1}).status_code == 200
    return [ray.key(name) for name in names]


def served_again(ray: RayServer, key: str) -> bool:
    body = {"prompt": "hello", "max_new_tokens": 1}
    try:
        # Not by the client that compares replies with their description: without an ingress the proxy answers 404.
        reply = httpx.post(
            f"{ray.url}/generate", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S
        )
    except httpx.TransportError:
        return False
    return reply.status_code == 200


@pytest.mark.deploy
def test_streams_of_two_tenants_go_on_when_what_counts_them_is_killed(ray: RayServer) -> None:
    keys = tenants(ray, ("initech", "hooli"))
    for names in killed_under_streams(ray, "Shared", keys):
        assert names[-1] == "done", names[-1]
    for key in keys:
        assert eventually(partial(served_again, ray, key))


@pytest.mark.deploy
def test_tenants_are_served_again_when_the_ingress_was_killed_under_their_streams(ray: RayServer) -> None:
    keys = tenants(ray, ("vandelay", "kramerica"))
    for names in killed_under_streams(ray, "Ingress", keys):
        assert "done" not in names
    # What the killed replica ran does not count any more, and no engine runs it on.
    for key in keys:
        assert eventually(partial(served_again, ray, key))
    assert eventually(lambda: ray.client.get("/stats").json()["requests"]["running"] == 0)


def test_a_key_without_the_role_is_refused(ray: RayServer) -> None:
    reply = ray.client.get("/stats", headers={"Authorization": f"Bearer {ray.key('globex')}"})
    assert error_of(reply)["code"] == "forbidden"
