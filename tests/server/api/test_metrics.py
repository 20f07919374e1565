"""`/metrics` over HTTP: each metric counts the requests that a test made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.helpers.live_server import Artifacts, LiveServer, connection, eventually, json_request

HELLO_TOKENS = 5


@pytest.fixture
def grown(server: LiveServer) -> Callable[..., float]:
    """Return a function that gives the growth of a series since its first call in this test."""
    before: dict[str, float] = {}

    def growth(name: str, **labels: str) -> float:
        value = server.metric(name, **labels)
        return value - before.setdefault(f"{name} {sorted(labels.items())}", value)

    return growth


def level_of(server: LiveServer, name: str) -> str:
    level: str = server.client.get(f"/variants/{name}").json()["versions"][0]["level"]
    return level


def test_an_answer_counts_its_request_and_tokens(server: LiveServer, grown: Callable[..., float]) -> None:
    def counts() -> list[float]:
        return [
            grown("variant_requests_total", variant="default/plain", finish_reason="length"),
            grown("variant_tokens_total", variant="default/plain", kind="prompt"),
            grown("variant_tokens_total", variant="default/plain", kind="generation"),
            grown("tenant_tokens_total", tenant="default", kind="generation"),
            grown("prompt_tokens_total"),
            grown("generation_tokens_total"),
            grown("e2e_request_latency_seconds_count"),
            grown("time_to_first_token_seconds_count"),
            grown("inter_token_latency_seconds_count"),
            grown("request_queue_seconds_count"),
            grown("http_requests_total", route="/generate", code="200"),
        ]

    counts()
    for _ in range(2):
        server.generate("plain", max_new_tokens=3)
    assert counts() == [2, 2 * HELLO_TOKENS, 6, 6, 2 * HELLO_TOKENS, 6, 2, 2, 4, 2, 2]


@pytest.mark.parametrize("kind", ["step", "sample"])
def test_the_seconds_of_an_answer_are_its_tenants(
    server: LiveServer, grown: Callable[..., float], kind: str
) -> None:
    server.generate("plain", max_new_tokens=1)
    grown("tenant_seconds_total", tenant="default", kind=kind)
    steps = grown("step_seconds_sum")
    server.generate("plain", max_new_tokens=3)
    assert (
        0
        < grown("tenant_seconds_total", tenant="default", kind=kind)
        <= grown("step_seconds_sum") - steps + 1
    )


def test_the_base_is_counted_under_its_own_label(server: LiveServer, grown: Callable[..., float]) -> None:
    label = {"variant": "base", "finish_reason": "length"}
    lookups = [{"result": result} for result in ("device", "disk")]
    for result in lookups:
        grown("variant_lookups_total", **result)
    grown("variant_requests_total", **label)
    server.generate(max_new_tokens=1)
    assert grown("variant_requests_total", **label) == 1
    assert [grown("variant_lookups_total", **result) for result in lookups] == [0, 0]


def test_cold_and_warm_starts_are_counted_apart(
    server: LiveServer, grown: Callable[..., float], artifacts: Artifacts
) -> None:
    def counts() -> list[float]:
        return [
            grown("variant_lookups_total", result="device"),
            grown("variant_lookups_total", result="disk"),
            grown("cold_start_seconds_count", source="disk"),
            grown("variant_load_seconds_count", source="disk", stage="total"),
            grown("variant_evictions_total", level="device", reason="unload"),
        ]

    server.unload_all()
    counts()
    server.generate("third", max_new_tokens=1)
    assert counts() == [0, 1, 1, 1, 0]
    server.generate("third", max_new_tokens=1)
    assert counts() == [1, 1, 1, 1, 0]
    server.client.post("/variants/third/unload")
    assert eventually(lambda: counts() == [1, 1, 1, 1, 1])


def test_residency_gauges_follow_the_slots(server: LiveServer) -> None:
    level = {"variant": "default/third", "level": "device"}
    server.unload_all()
    server.client.post("/variants/third/load")
    assert eventually(lambda: server.metric("variant_resident", **level) == 1)
    resident = server.metric("variants_resident", level="device")
    server.client.post("/variants/third/unload")
    assert eventually(lambda: level_of(server, "third") == "disk")
    assert server.metric("variant_resident", **level) == 0
    assert server.metric("variants_resident", level="device") == resident - 1 == server.metric("slots_in_use")
    assert server.metric("slots") == 4


def test_uploads_are_counted_by_outcome(
    server: LiveServer, grown: Callable[..., float], artifacts: Artifacts
) -> None:
    def counts() -> list[float]:
        results = ("created", "duplicate", "rejected", "failed")
        return [grown("uploads_total", result=result) for result in results]

    size = artifacts.plain.stat().st_size
    counts(), grown("upload_bytes_total")
    server.upload("counted", artifacts.plain)
    server.upload("counted", artifacts.plain)
    server.upload("counted", artifacts.foreign)
    assert counts() == [1, 1, 1, 0]
    assert grown("upload_bytes_total") == 2 * size + artifacts.foreign.stat().st_size


def test_registry_gauges_show_a_count_of_the_last_minute(server: LiveServer) -> None:
    assert server.metric("registry_up") == 1
    assert server.metric("registry_bytes") >= server.metric("registry_objects") > 0
    assert server.metric("registry_free_bytes") > 0


def test_the_series_of_a_deleted_variant_are_removed(server: LiveServer, artifacts: Artifacts) -> None:
    server.upload("passing", artifacts.plain)
    server.generate("passing", max_new_tokens=1)
    assert server.metric("variant_active_version", variant="default/passing") == 1
    server.client.delete("/variants/passing")
    assert "default/passing" not in server.client.get("/metrics").text


def test_the_active_version_gauge_follows_promotions(server: LiveServer, artifacts: Artifacts) -> None:
    server.upload("followed", artifacts.plain)
    server.upload("followed", artifacts.third)
    label = {"variant": "default/followed"}
    assert server.metric("variant_active_version", **label) == 2
    server.client.patch("/variants/followed", json={"active": 1})
    assert server.metric("variant_active_version", **label) == 1


def test_refusals_are_counted_by_route_and_tenant(server: LiveServer, grown: Callable[..., float]) -> None:
    def counts() -> list[float]:
        return [
            grown("http_requests_total", route="/generate", code="404"),
            grown("http_requests_total", route="/generate", code="400"),
            grown("http_requests_total", route="other", code="404"),
            grown("tenant_requests_total", tenant="default", code="404"),
            grown("tenant_rejections_total", tenant="default", reason="invalid"),
            grown("admission_rejections_total", reason="invalid"),
        ]

    counts()
    server.generate("absent")
    server.generate(max_new_tokens=5000)
    server.client.get("/made/up/path")
    assert counts() == [1, 1, 1, 1, 1, 1]


def test_running_and_waiting_requests_are_gauged(server: LiveServer, grown: Callable[..., float]) -> None:
    request = json_request("/generate?variant=plain", {"prompt": "hello", "max_new_tokens": 4000, "n": 100})
    grown("generation_tokens_total")
    with connection(server.url) as first, connection(server.url) as second:
        first.sendall(request)
        # After the first token, all 100 sequences start, more than can run at a time.
        assert eventually(lambda: grown("generation_tokens_total") > 0)
        second.sendall(request)
        assert eventually(lambda: server.metric("num_requests_waiting") == 1)
        assert server.metric("num_requests_running") == 1
        assert server.metric("num_requests_waiting_by_reason", reason="capacity") == 1
    assert eventually(
        lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0
    )
