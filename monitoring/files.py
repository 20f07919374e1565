"""The files that are written from this source, and the expressions in them. Writes nothing itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from monitoring.alerts.alert import fill
from monitoring.alerts.definitions import ALERTS
from monitoring.alerts.rules import DEFAULT_VALUES, chart_rules, chart_thresholds, default_rules
from monitoring.dashboards.dashboard import PROMOTIONS
from monitoring.dashboards.deltas import DELTAS
from monitoring.dashboards.service import SERVICE

ROOT = Path(__file__).resolve().parent.parent
GENERATED = Path("monitoring/generated")
CHART = Path("helm/peraxis/files")
DASHBOARDS = {"dashboard.json": SERVICE, "dashboard-deltas.json": DELTAS}


def files() -> dict[Path, str]:
    """Return the text of each file by its path in the repository."""
    dashboards = {name: page.text() for name, page in DASHBOARDS.items()}
    return {
        **{GENERATED / name: text for name, text in dashboards.items()},
        **{CHART / "dashboards" / name: text for name, text in dashboards.items()},
        GENERATED / "rules.yaml": default_rules(),
        CHART / "alerts.yaml": chart_rules(),
        CHART / "thresholds.yaml": chart_thresholds(),
    }


def panel_expressions() -> Iterator[tuple[str, str]]:
    """Yield the expressions of all panels and annotations, each with its name."""
    for page in DASHBOARDS.values():
        for panel in json.loads(page.text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{page.title} / {panel['title']}", target["expr"]
    yield "promotions", PROMOTIONS


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the expressions of all alerts, panels and annotations, each with its name."""
    for alert in ALERTS:
        yield alert.full_name, fill(alert.expression, DEFAULT_VALUES.__getitem__)
    yield from panel_expressions()
