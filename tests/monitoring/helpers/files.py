"""The dashboards, alerts and thresholds of the repository, and the expressions in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "peraxis" / "files"
RULES = ROOT / "docker" / "rules.yaml"
THRESHOLDS = CHART / "thresholds.yaml"

Object = dict[str, Any]
# Grafana's and Prometheus' own forms, by file name and by name of the alert.
DASHBOARDS: dict[str, Object] = {
    path.name: json.loads(path.read_text()) for path in sorted((CHART / "dashboards").glob("*.json"))
}
ALERTS: dict[str, Object] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}
PREFIX = "Peraxis"


def panels(dashboard: Object) -> Iterator[Object]:
    """Yield the panels of a dashboard, without rows, and with the panels that a collapsed row holds."""
    for panel in dashboard["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else (panel,)


def panel_expressions() -> Iterator[tuple[str, str]]:
    """Yield the expressions of all panels and annotations, each with its name."""
    for dashboard in DASHBOARDS.values():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield f"{dashboard['title']} / {panel['title']}", target["expr"]
        for annotation in dashboard["annotations"]["list"]:
            if "expr" in annotation:
                yield f"{dashboard['title']} / {annotation['name']}", annotation["expr"]


def label_variables() -> Iterator[tuple[str, str]]:
    """Yield each label whose values are those of a variable, with the selector of the series that have it."""
    for dashboard in DASHBOARDS.values():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
                assert found is not None, variable["name"]
                yield found[2], found[1]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the expressions of all alerts, panels, annotations and variables, each with its name."""
    yield from ((name, rule["expr"]) for name, rule in ALERTS.items())
    yield from panel_expressions()
    yield from (
        (f"variable {label}", f"count by ({label}) ({series})") for label, series in label_variables()
    )


def compared_values(expression: str) -> Iterator[str]:
    """Yield what an alert's comparisons compare with a bound."""

    def below(node: promql.Expr) -> Iterator[str]:
        assert isinstance(node, promql.BinaryExpr), node
        if str(node.op) in ("and", "or"):
            yield from (*below(node.lhs), *below(node.rhs))
        else:
            yield str(node.lhs)

    return below(promql.parse(expression))
