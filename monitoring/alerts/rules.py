"""Renders alerts as Prometheus' rules: with the default thresholds, and as a template of the Helm chart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import yaml

from monitoring.alerts.alert import Alert, Threshold, fill
from monitoring.alerts.definitions import ALERTS
from monitoring.alerts.thresholds import THRESHOLDS

GROUP = "peraxis"
HEADER = "# Written by `python -m monitoring`: do not edit.\n"
CHART_HEADER = f"""{HEADER}# Groups of Prometheus' rules, as a template for Helm's `tpl`. Values that it needs:
#   monitoring.alerts.thresholds  a map; thresholds.yaml, beside this file, has every key with its default
#   monitoring.runbookUrl         the address of docs/deploy/runbook.md
# The named template `peraxis.adminService` is the service that Prometheus scrapes, and so the label `job`.
"""
CHART_MATCHERS = 'namespace="{{ .Release.Namespace }}",job="{{ include "peraxis.adminService" . }}"'
# An action of Prometheus' own templates.
ACTION = re.compile(r"\{\{.*?\}\}")


def number(value: float | str) -> str:
    """Return a threshold as PromQL and YAML write it."""
    return value if isinstance(value, str) else f"{value:.12g}"


# Values without a chart: the job of Compose's Prometheus, and the place of the runbook in the repository.
DEFAULT_VALUES = {each.name: number(each.default) for each in THRESHOLDS} | {
    "matchers": 'job="peraxis"',
    "runbookUrl": "docs/deploy/runbook.md",
}


class _Block(str):
    """Text that YAML shows line by line."""


class _Dumper(yaml.SafeDumper):
    """Writes `_Block` in YAML's literal style."""


_Dumper.add_representer(
    _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def default_rules() -> str:
    """Return a file of rules for Prometheus, with the default thresholds."""
    return HEADER + _dump({"groups": [_group(lambda text: fill(text, DEFAULT_VALUES.__getitem__))]})


def chart_rules() -> str:
    """Return the groups as a template that the chart evaluates."""

    def value_of(name: str) -> str:
        if name == "matchers":
            return CHART_MATCHERS
        path = "monitoring.runbookUrl" if name == "runbookUrl" else f"monitoring.alerts.thresholds.{name}"
        return f"{{{{ .Values.{path} }}}}"

    def template(text: str) -> str:
        # Helm must leave Prometheus' actions as they are.
        return fill(ACTION.sub(lambda match: f"{{{{ `{match[0]}` }}}}", text), value_of)

    return CHART_HEADER + _dump([_group(template)])


def chart_thresholds() -> str:
    """Return the default thresholds, each below its meaning."""
    return HEADER + "".join(_commented(each) for each in THRESHOLDS)


def _group(finish: Callable[[str], str], alerts: Iterable[Alert] = ALERTS) -> dict[str, Any]:
    return {"name": GROUP, "rules": [_rule(alert, finish) for alert in alerts]}


def _rule(alert: Alert, finish: Callable[[str], str]) -> dict[str, Any]:
    return {
        "alert": alert.full_name,
        "expr": _Block(finish(alert.expression)),
        "for": finish(alert.lasting.placeholder),
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": finish(alert.summary),
            "description": finish(alert.description),
            "runbook_url": finish(f"@runbookUrl@#{alert.anchor}"),
        },
    }


def _commented(threshold: Threshold) -> str:
    return f"# {threshold.meaning}\n{threshold.name}: {number(threshold.default)}\n"


def _dump(document: object) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000)
