"""The chart embeds alerts and dashboards, with the operator's thresholds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, HelmError

from tests.helm.helpers.rendering import CHART, NAME, NAMESPACE, objects_of, of_kind, rendered, the

ALERTS: dict[str, Any] = {"monitoring": {"alerts": {"enabled": True}}}


def with_thresholds(**thresholds: object) -> dict[str, Any]:
    return {"monitoring": {"alerts": {"enabled": True, "thresholds": thresholds}}}


def rules(values: dict[str, Any]) -> dict[str, Any]:
    """Return the alerts by name; one of several conditions has several rules, and the last stands for them."""
    groups = the(rendered(values), "PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_alerts_watch_the_service_that_prometheus_scrapes() -> None:
    expression = rules(ALERTS)["PeraxisDown"]["expr"]
    assert f'job="{NAME}-admin"' in expression
    assert f'namespace="{NAMESPACE}"' in expression


def test_a_template_of_prometheus_is_left_to_prometheus() -> None:
    assert "{{ $labels.instance }}" in rules(ALERTS)["PeraxisNotReady"]["annotations"]["description"]


def test_every_alert_links_the_runbook_of_the_values() -> None:
    values = {"monitoring": {"alerts": {"enabled": True}, "runbookUrl": "https://docs.example/runbook"}}
    assert {each["annotations"]["runbook_url"].split("#")[0] for each in rules(values).values()} == {
        "https://docs.example/runbook"
    }


def test_a_threshold_of_the_values_takes_the_place_of_the_default() -> None:
    assert rules(with_thresholds(downFor="9m"))["PeraxisDown"]["for"] == "9m"
    assert rules(ALERTS)["PeraxisDown"]["for"] != "9m"


def test_a_threshold_of_zero_is_no_missing_threshold() -> None:
    given = rules(with_thresholds(loadFailures=0))["PeraxisLoadFailing"]["expr"]
    assert given != rules(ALERTS)["PeraxisLoadFailing"]["expr"]
    assert given.endswith("> 0")


def test_an_unknown_threshold_is_named_with_those_that_exist() -> None:
    with pytest.raises(HelmError, match=r"thresholds\.downForever is not a threshold.*downFor, "):
        rendered(with_thresholds(downForever=1))


def test_every_dashboard_of_the_chart_has_its_config_map() -> None:
    files = {path.name: path.read_text() for path in (CHART / "files" / "dashboards").glob("*.json")}
    maps = of_kind(objects_of("everything"), "ConfigMap")
    assert {name: json.loads(text) for each in maps for name, text in each["data"].items()} == {
        name: json.loads(text) for name, text in files.items()
    }


def test_a_dashboard_is_found_by_its_label_and_its_own_templates_stay(tmp_path: Path) -> None:
    chart = tmp_path / "peraxis"
    shutil.copytree(CHART, chart)
    board = {"title": "one", "panels": [{"legendFormat": "{{variant}}", "expr": 'a{b="$tenant"}'}]}
    (chart / "files" / "dashboards").mkdir(exist_ok=True)
    (chart / "files" / "dashboards" / "Load_times.json").write_text(json.dumps(board, indent=2))
    values = {"monitoring": {"dashboards": {"enabled": True, "labels": {"find": "me"}}}}
    with Chart.load(chart) as loaded:
        text = loaded.render(values, name="demo", namespace=NAMESPACE)["peraxis/templates/dashboards.yaml"]
    named = {each["metadata"]["name"]: each for each in yaml.safe_load_all(text) if each}
    found = named[f"{NAME}-load-times"]
    assert found["metadata"]["labels"]["find"] == "me"
    assert json.loads(found["data"]["Load_times.json"]) == board


def test_the_schema_takes_every_default_threshold() -> None:
    thresholds = yaml.safe_load((CHART / "files" / "thresholds.yaml").read_text())
    assert rules(with_thresholds(**thresholds)) == rules(ALERTS)
