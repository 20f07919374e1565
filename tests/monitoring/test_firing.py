"""Alerts fire when they should, and not on a healthy server: `promtool test rules` on made-up series."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.debian import debian_tool
from tests.monitoring.helpers.files import ALERTS, PREFIX, RULES

MINUTES = 60
# The labels of a server, and of its service.
TARGET = {"job": "peraxis", "instance": "a:1", "namespace": "llm"}
SERVICE = {"job": "peraxis", "namespace": "llm"}
# Values at each minute, in promtool's notation: START+STEPxCOUNT.
ALWAYS = f"x{MINUTES}"
Series = Mapping[str, str]

HEALTHY: Series = {
    "up": f"1{ALWAYS}",
    "peraxis_ready": f"1{ALWAYS}",
    "peraxis_num_requests_running": f"2{ALWAYS}",
    "peraxis_num_requests_waiting": f"1{ALWAYS}",
    'peraxis_num_requests_waiting_by_reason{reason="capacity"}': f"1{ALWAYS}",
    'peraxis_num_requests_waiting_by_reason{reason="variant_load"}': f"1{ALWAYS}",
    "peraxis_step_seconds_count": f"0+600{ALWAYS}",
    'peraxis_variant_load_seconds_count{source="disk",stage="total"}': f"0+6{ALWAYS}",
    'peraxis_variant_evictions_total{level="device",reason="capacity"}': f"0+12{ALWAYS}",
    'peraxis_variant_lookups_total{result="device"}': f"0+120{ALWAYS}",
    'peraxis_cold_start_seconds_bucket{source="disk",le="2"}': f"0+6{ALWAYS}",
    'peraxis_cold_start_seconds_bucket{source="disk",le="30"}': f"0+6{ALWAYS}",
    'peraxis_cold_start_seconds_bucket{source="disk",le="+Inf"}': f"0+6{ALWAYS}",
    'peraxis_time_to_first_token_seconds_bucket{le="1"}': f"0+120{ALWAYS}",
    'peraxis_time_to_first_token_seconds_bucket{le="10"}': f"0+120{ALWAYS}",
    'peraxis_time_to_first_token_seconds_bucket{le="+Inf"}': f"0+120{ALWAYS}",
    'peraxis_variant_requests_total{variant="t/a",finish_reason="stop"}': f"0+1200{ALWAYS}",
    'peraxis_variant_requests_total{variant="t/a",finish_reason="error"}': f"0{ALWAYS}",
    'peraxis_admission_rejections_total{reason="queue_full"}': f"0{ALWAYS}",
    'peraxis_admission_rejections_total{reason="engine_restarted"}': f"0{ALWAYS}",
    "peraxis_kv_cache_usage_ratio": f"0.9{ALWAYS}",
    'peraxis_variant_load_failures_total{reason="corrupt"}': f"0{ALWAYS}",
    'peraxis_uploads_total{result="failed"}': f"0{ALWAYS}",
    "peraxis_registry_free_bytes": f"500000000000{ALWAYS}",
    "peraxis_registry_quarantined": f"0{ALWAYS}",
    "peraxis_registry_up": f"1{ALWAYS}",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A fault of a server, and the alert that tells of it.

    Attributes:
        changes: series that differ from a healthy server's; None removes one.
        labels: of the alert, beside its name and severity.
    """

    alert: str
    changes: Mapping[str, str | None]
    description: str
    labels: Mapping[str, str] = field(default_factory=lambda: TARGET)


NO_TARGET = dict.fromkeys(HEALTHY)
CASES = (
    Case("Down", {"up": f"0{ALWAYS}"}, "a:1 does not answer."),
    Case("Down", NO_TARGET, "No target is found.", {}),
    Case(
        "NotReady",
        {"peraxis_ready": f"0{ALWAYS}"},
        "a:1 answers and is not ready: its base is loading, its engine restarts, or it drains.",
    ),
    Case(
        "Stalled",
        {"peraxis_step_seconds_count": f"9{ALWAYS}"},
        "3 requests of a:1 run or wait, and no step has ended.",
    ),
    Case(
        "ErrorBudget",
        {'peraxis_variant_requests_total{variant="t/a",finish_reason="error"}': f"0+24{ALWAYS}"},
        "llm/peraxis burns its error budget at 19.61 times the rate that lasts a month.",
        SERVICE,
    ),
    Case(
        "ErrorBudget",
        {'peraxis_admission_rejections_total{reason="queue_full"}': f"0+12{ALWAYS}"},
        "llm/peraxis burns its error budget at 9.901 times the rate that lasts a month.",
        SERVICE,
    ),
    Case(
        "LoadStuck",
        {'peraxis_variant_load_seconds_count{source="disk",stage="total"}': f"9{ALWAYS}"},
        "1 requests of a:1 wait for a delta, and no load has ended.",
    ),
    Case(
        "SlotThrash",
        {'peraxis_variant_evictions_total{level="device",reason="capacity"}': f"0+60{ALWAYS}"},
        "a:1 evicts 0.50 deltas per request.",
    ),
    Case(
        "ColdStartSlow",
        {'peraxis_cold_start_seconds_bucket{source="disk",le="2"}': f"0{ALWAYS}"},
        "One cold start in twenty of llm/peraxis takes over 28.6s.",
        SERVICE,
    ),
    Case(
        "LoadFailing",
        {'peraxis_variant_load_failures_total{reason="corrupt"}': f"0+1{ALWAYS}"},
        "15 loads of a:1 have failed in 15 minutes: corrupt.",
        {**TARGET, "reason": "corrupt"},
    ),
    Case(
        "TTFTHigh",
        {'peraxis_time_to_first_token_seconds_bucket{le="1"}': f"0+60{ALWAYS}"},
        "One first token in twenty of llm/peraxis takes over 9.1s.",
        SERVICE,
    ),
    Case(
        "Rejecting",
        {'peraxis_admission_rejections_total{reason="queue_full"}': f"0+300{ALWAYS}"},
        "llm/peraxis refuses 20% of its requests.",
        SERVICE,
    ),
    Case("KVFull", {"peraxis_kv_cache_usage_ratio": f"1{ALWAYS}"}, "100% of a:1's KV cache is in use."),
    Case(
        "VariantErrors",
        {'peraxis_variant_requests_total{variant="t/a",finish_reason="error"}': f"0+400{ALWAYS}"},
        "25% of the requests to t/a end with an error.",
        {**SERVICE, "variant": "t/a"},
    ),
    Case(
        "UploadsFailing",
        {'peraxis_uploads_total{result="failed"}': f"0+1{ALWAYS}"},
        "15 uploads to llm/peraxis have failed in 15 minutes.",
        SERVICE,
    ),
    Case(
        "RegistryDown",
        {"peraxis_registry_up": f"0{ALWAYS}"},
        "a:1 cannot read its registry.",
    ),
    Case(
        "DiskLow",
        {"peraxis_registry_free_bytes": f"4294967296{ALWAYS}"},
        "The registry of a:1 has 4GiB left.",
    ),
    Case(
        "Quarantined",
        {"peraxis_registry_quarantined": f"2{ALWAYS}"},
        "2 artifacts of llm/peraxis's registry are quarantined.",
        SERVICE,
    ),
)


def test_each_alert_fires_and_none_on_a_healthy_server(tmp_path: Path) -> None:
    promtool = debian_tool("promtool")
    healthy: dict[str, Any] = {
        "interval": "1m",
        "input_series": _input(HEALTHY),
        "alert_rule_test": [
            {"eval_time": at, "alertname": name, "exp_alerts": []}
            for name in ALERTS
            for at in ("1m", "10m", f"{MINUTES}m")
        ],
    }
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [healthy, *map(_test_of, CASES)],
    }
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump(document))
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    assert set(ALERTS) == {PREFIX + case.alert for case in CASES}


def test_prometheus_accepts_the_rules() -> None:
    command = [debian_tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(RULES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _test_of(case: Case) -> dict[str, Any]:
    name = PREFIX + case.alert
    rule = ALERTS[name]
    expected = {
        "exp_labels": {**case.labels, **rule["labels"]},
        "exp_annotations": {**rule["annotations"], "description": case.description},
    }
    return {
        "interval": "1m",
        "input_series": _input({**HEALTHY, **case.changes}),
        "alert_rule_test": [
            {"eval_time": f"{MINUTES}m", "alertname": name, "exp_alerts": [expected]},
        ],
    }


def _input(series: Mapping[str, str | None]) -> list[dict[str, str]]:
    """Return series as promtool takes them, each with the labels of one target."""
    labels = ",".join(f'{name}="{value}"' for name, value in TARGET.items())
    return [
        {
            "series": f"{name[:-1]},{labels}}}" if name.endswith("}") else f"{name}{{{labels}}}",
            "values": values,
        }
        for name, values in series.items()
        if values is not None
    ]
