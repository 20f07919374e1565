"""Every expression of dashboards and alerts has an answer: a real Prometheus scrapes a real server under load."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deltastore.registry import Registry
from server.tenants.tenant import DEFAULT_TENANT
from tests.helpers.debian import debian_tool
from tests.monitoring.helpers.check import without_variables
from tests.monitoring.helpers.files import (
    ALERTS,
    RULES,
    compared_values,
    label_variables,
    panel_expressions,
)
from tests.monitoring.helpers.prometheus import Prometheus, running_prometheus
from tests.server.helpers.live_server import Artifacts, LiveServer, eventually, live_server

# What Grafana would fill in: every target, variant and tenant, and a window that covers the whole test.
VALUES = {
    "$job": ".*", "$namespace": ".*", "$instance": ".*", "$variant": ".*", "$tenant": ".*",
    "$__rate_interval": "2m", "$copy_limit": "50e9",
}  # fmt: skip
# Events that the load must have caused, so that expressions about them are about something.
CAUSED = (
    'peraxis_variant_load_seconds_count{source="disk",stage="read"}',
    'peraxis_variant_load_seconds_count{source="host",stage="copy"}',
    'peraxis_cold_start_seconds_count{source="disk"}',
    'peraxis_variant_evictions_total{level="device",reason="capacity"}',
    'peraxis_variant_evictions_total{level="host",reason="capacity"}',
    'peraxis_variant_load_failures_total{reason="corrupt"}',
    'peraxis_variant_requests_total{finish_reason="error",variant="default/broken"}',
    'peraxis_admission_rejections_total{reason="queue_full"}',
    'peraxis_uploads_total{result="created"}',
    'peraxis_uploads_total{result="duplicate"}',
    'peraxis_uploads_total{result="rejected"}',
    "peraxis_prefix_cache_hits_total",
    "peraxis_registry_quarantined",
    "peraxis_batch_distinct_variants_sum",
)


def test_every_panel_alert_and_variable_has_an_answer_after_real_load(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    options = ("--max-gpu-deltas", 2, "--max-host-cache-gb", 0.00005, "--max-num-seqs", 4, "--max-queue", 4)
    with live_server(artifacts.base, tmp_path / "registry", *options) as server:
        target = server.url.removeprefix("http://")
        # Before the first scrape, because the registry's objects are counted once a minute.
        ask_a_damaged_variant(server, artifacts)
        with running_prometheus(tmp_path, target, RULES) as prometheus:
            cause_events(server, artifacts)
            prometheus.await_scrapes(2)
            assert server.client.patch("/variants/plain", json={"active": 1}).is_success
            prometheus.await_scrapes(2)
            assert [series for series in CAUSED if not sum(prometheus.query(series))] == []
            assert dict(unanswered(prometheus)) == {}
            without = {
                label
                for label, series in label_variables()
                if not prometheus.label_values(label, without_variables(series, VALUES))
            }
            # Only Kubernetes' service discovery gives targets a namespace.
            assert without == {"namespace"}
            assert {rule["health"] for rule in prometheus.rules()} == {"ok"}
            assert lint(server.client.get("/metrics").text) == []


def lint(exposition: str) -> list[str]:
    """Return what promtool finds wrong with the names, units and help of metrics; vLLM's have colons."""
    command = [debian_tool("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=exposition, capture_output=True, text=True, check=False)
    return [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("vllm:")]


def cause_events(server: LiveServer, artifacts: Artifacts) -> None:
    """Upload, load, evict, answer, refuse and promote."""
    for name, artifact in (
        ("plain", artifacts.plain),
        ("chatty", artifacts.chatty),
        ("third", artifacts.third),
    ):
        assert server.upload(name, artifact).status_code == 201
    assert server.upload("plain", artifacts.plain).status_code == 200
    assert server.upload("wrong", artifacts.foreign).status_code == 409
    for name in ("plain", "chatty", "third", "chatty", "plain", "third", "chatty"):
        server.token_ids(name, max_new_tokens=4)
    assert server.upload("plain", artifacts.spare[0], activate="false").status_code == 201
    assert server.client.patch("/variants/plain", json={"active": 2}).is_success
    # A busy machine may send so slowly that the queue is never full.
    assert eventually(lambda: burst(server) == {200, 503})
    assert server.generate("plain", max_new_tokens=-1).status_code == 400
    for _ in range(2):
        server.token_ids("plain", prompt="the same words " * 40, max_new_tokens=2)


def burst(server: LiveServer) -> set[int]:
    """Send more requests at once than may run and wait; return the statuses of the replies."""
    with ThreadPoolExecutor(16) as pool:
        names = ["plain", None, "chatty", "third"] * 4
        replies = pool.map(lambda name: server.generate(name, max_new_tokens=64), names)
        return {reply.status_code for reply in replies}


def ask_a_damaged_variant(server: LiveServer, artifacts: Artifacts) -> None:
    assert server.upload("broken", artifacts.spare[1]).status_code == 201
    # Its text is read now, so that the engine is the first to meet the damage.
    assert server.token_ids("broken", max_new_tokens=2)
    assert server.client.post("/variants/broken/unload").is_success
    assert eventually(lambda: level(server, "broken") == "disk")
    registry = Registry(server.registry)
    record = registry.resolve(DEFAULT_TENANT.name, "broken", None)
    path = server.registry / "objects" / record.digest
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    assert server.generate("broken").status_code == 424


def level(server: LiveServer, name: str) -> str:
    found: str = server.client.get(f"/variants/{name}").json()["versions"][0]["level"]
    return found


def unanswered(prometheus: Prometheus) -> Iterator[tuple[str, list[float]]]:
    """Yield the expressions without a series, or with a value that is no finite number."""
    alerts = [(name, value) for name, rule in ALERTS.items() for value in compared_values(rule["expr"])]
    for name, expression in (*panel_expressions(), *alerts):
        values = prometheus.query(without_variables(expression, VALUES))
        if not values or not all(map(math.isfinite, values)):
            yield f"{name}: {expression}", values
