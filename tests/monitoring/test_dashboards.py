"""Dashboards as an operator sees them: Grafana's schema, the grid, units, legends and what each panel says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from docs.reference import reference
from tests.monitoring.helpers.files import ALERTS, CHART, DASHBOARDS, panels

COLUMNS = 24
PAGES = sorted(DASHBOARDS)
# Fields of Grafana's classic schema by the object that has them. One that a new kind of panel brings is added here.
FIELDS = {
    "": "annotations description editable fiscalYearStartMonth gnetId graphTooltip id links liveNow panels preload "
    "refresh revision schemaVersion tags templating time timepicker timezone title uid version weekStart",
    "annotations.list": "builtIn datasource enable expr filter hide iconColor mappings name placement step tagKeys "
    "target textFormat titleFormat type useValueForTime",
    "links": "asDropdown icon includeVars keepTime placement tags targetBlank title tooltip type url",
    "templating.list": "allValue allowCustomValue auto auto_count auto_min current datasource definition "
    "description hide includeAll label multi name options query refresh regex skipUrlSync sort type",
    "panels": "collapsed datasource description fieldConfig gridPos id interval links maxDataPoints options panels "
    "pluginVersion repeat repeatDirection targets timeFrom timeShift title transformations transparent type",
    "panels.fieldConfig.defaults": "color custom decimals description displayName links mappings max min noValue "
    "thresholds unit",
    "panels.gridPos": "h static w x y",
    "panels.targets": "adhocFilters datasource editorMode exemplar expr format hide instant interval intervalFactor "
    "legendFormat range refId",
}


def objects_at(value: Any, path: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects at the path of a field, which may lead through lists."""
    if isinstance(value, list):
        for each in value:
            yield from objects_at(each, path)
    elif not path:
        yield value
    elif path[0] in value:
        yield from objects_at(value[path[0]], path[1:])


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("place", FIELDS)
def test_the_schema_knows_every_field(name: str, place: str) -> None:
    found = list(objects_at(DASHBOARDS[name], place.split(".") if place else []))
    assert found
    assert {field for each in found for field in each} <= set(FIELDS[place].split())


@pytest.mark.parametrize("name", PAGES)
def test_a_file_is_sorted_and_indented_so_that_an_export_shows_its_changes_alone(name: str) -> None:
    text = json.dumps(DASHBOARDS[name], indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert (CHART / "dashboards" / name).read_text() == text, (
        "python -m json.tool --sort-keys --indent 1 --no-ensure-ascii"
    )


@pytest.mark.parametrize("name", PAGES)
def test_panels_fill_the_grid_and_none_overlaps_another(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
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
    found = list(panels(DASHBOARDS[name]))
    assert len({panel["title"] for panel in found}) == len(found)
    assert len({panel["id"] for panel in DASHBOARDS[name]["panels"]}) == len(DASHBOARDS[name]["panels"])
    for panel in found:
        assert panel["fieldConfig"]["defaults"].get("unit") or panel["type"] == "state-timeline", panel[
            "title"
        ]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("name", PAGES)
def test_labels_of_legends_are_those_that_the_expression_keeps(name: str) -> None:
    for panel in panels(DASHBOARDS[name]):
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
    for panel in panels(DASHBOARDS[name]):
        text = panel["description"]
        assert len(text) > 30, panel["title"]
        assert set(re.findall(r"--[a-z][a-z-]+", text)) <= flags, panel["title"]
        assert set(re.findall(r"Peraxis[A-Z]\w+", text)) <= set(ALERTS), panel["title"]


@pytest.mark.parametrize("name", PAGES)
def test_targets_are_chosen_by_variables(name: str) -> None:
    variables = {each["name"] for each in DASHBOARDS[name]["templating"]["list"]}
    assert {"datasource", "namespace", "job", "instance"} <= variables
    used = set(
        re.findall(
            r"\$(\w+)",
            " ".join(target["expr"] for panel in panels(DASHBOARDS[name]) for target in panel["targets"]),
        )
    )
    assert used - {"__rate_interval"} <= variables
