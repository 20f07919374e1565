"""The files that are written from this source, and the expressions in them. Writes none itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from monitoring.alerts.alert import fill
from monitoring.alerts.definitions import ALERTS
from monitoring.alerts.rules import DEFAULT_VALUES, chart_rules, chart_thresholds, default_rules

ROOT = Path(__file__).resolve().parent.parent
GENERATED = Path("monitoring/generated")
CHART = Path("helm/peraxis/files")


def files() -> dict[Path, str]:
    """Return the text of each file by its path in the repository."""
    return {
        GENERATED / "rules.yaml": default_rules(),
        CHART / "alerts.yaml": chart_rules(),
        CHART / "thresholds.yaml": chart_thresholds(),
    }


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the expressions of all alerts and panels, each with the name of its alert or panel."""
    for alert in ALERTS:
        yield alert.full_name, fill(alert.expression, DEFAULT_VALUES.__getitem__)
