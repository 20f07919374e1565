"""Dashboards as an operator sees them: Grafana's schema, the grid, units, legends and what each panel says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from docs.reference import reference
from monitoring.alerts.definitions import ALERTS
from monitoring.files import DASHBOARDS, GENERATED, ROOT

COLUMNS = 24
PAGES = sorted(DASHBOARDS)


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / GENERATED / name).read_text())
    return found


def panels(name: str) -> list[dict[str, Any]]:
    """Return the panels of a dashboard, without its rows."""
    return [panel for panel in document(name)["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("name", PAGES)
def test_the_schema_knows_every_field(name: str) -> None:
    """The SDK's classes drop what they do not know."""
    text = json.dumps(Dashboard.from_json(document(name)), cls=JSONEncoder)
    assert json.loads(text) == document(name)


@pytest.mark.parametrize("name", PAGES)
def test_panels_fill_the_grid_and_none_overlaps_another(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in document(name)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    rows = range(max(y for _, y in taken) + 1)
    assert taken == {(x, y) for x in range(COLUMNS) for y in rows}


@pytest.mark.parametrize("name", PAGES)
def test_each_panel_has_a_title_of_its_own_an_id_a_unit_and_legends(name: str) -> None:
    found = panels(name)
    assert len({panel["title"] for panel in found}) == len(found)
    assert len({panel["id"] for panel in document(name)["panels"]}) == len(document(name)["panels"])
    for panel in found:
        assert panel["fieldConfig"]["defaults"].get("unit") or panel["type"] == "state-timeline", panel[
            "title"
        ]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("name", PAGES)
def test_labels_of_legends_are_those_that_the_expression_keeps(name: str) -> None:
    for panel in panels(name):
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            if kept:
                assert named <= {label.strip() for labels in kept for label in labels.split(",")}, panel[
                    "title"
                ]


@pytest.mark.parametrize("name", PAGES)
def test_each_panel_says_what_it_shows_and_names_flags_and_alerts_that_exist(name: str) -> None:
    flags = set(re.findall(r"`(--[a-z-]+)`", reference()))
    alerts = {alert.full_name for alert in ALERTS}
    for panel in panels(name):
        text = panel["description"]
        assert len(text) > 30, panel["title"]
        assert set(re.findall(r"--[a-z][a-z-]+", text)) <= flags, panel["title"]
        assert set(re.findall(r"Peraxis[A-Z]\w+", text)) <= alerts, panel["title"]


@pytest.mark.parametrize("name", PAGES)
def test_targets_are_chosen_by_variables(name: str) -> None:
    variables = {each["name"] for each in document(name)["templating"]["list"]}
    assert {"datasource", "namespace", "job", "instance"} <= variables
    used = set(
        re.findall(
            r"\$(\w+)", " ".join(target["expr"] for panel in panels(name) for target in panel["targets"])
        )
    )
    assert used - {"__rate_interval"} <= variables
