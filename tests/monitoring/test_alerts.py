"""Alerts for Prometheus and for the chart are the same, and each has what an operator needs."""

from __future__ import annotations

import re
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.helm.helpers.rendering import NAME, NAMESPACE, rendered, the
from tests.monitoring.helpers.files import ALERTS, CHART, PREFIX, RULES, THRESHOLDS

RUNBOOK = "https://docs.example/runbook"
MONITORING: dict[str, Any] = {"alerts": {"enabled": True}, "runbookUrl": RUNBOOK}


def parsed(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of rules with each expression as Prometheus' parser prints it, which is one way for a number."""
    return [
        {**group, "rules": [{**rule, "expr": str(promql.parse(rule["expr"]))} for rule in group["rules"]]}
        for group in groups
    ]


def test_a_chart_with_the_default_values_has_the_rules_of_prometheus_without_it() -> None:
    groups = the(rendered({"monitoring": MONITORING}), "PrometheusRule")["spec"]["groups"]
    text = yaml.safe_dump(groups, width=10_000)
    text = text.replace(f'namespace="{NAMESPACE}",job="{NAME}-admin"', 'job="peraxis"')
    text = text.replace(RUNBOOK, "docs/deploy/runbook.md")
    assert parsed(yaml.safe_load(text)) == parsed(yaml.safe_load(RULES.read_text())["groups"])


def test_each_threshold_is_used_and_has_a_default_that_the_chart_reads() -> None:
    used = re.findall(r"\.Values\.monitoring\.alerts\.thresholds\.(\w+)", (CHART / "alerts.yaml").read_text())
    assert set(used) == set(yaml.safe_load(THRESHOLDS.read_text()))


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_a_severity_its_texts_and_a_link_to_its_section(name: str) -> None:
    rule = ALERTS[name]
    assert name.startswith(PREFIX)
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]
    assert rule["annotations"]["runbook_url"] == f"docs/deploy/runbook.md#{name.lower()}"
