"""Values that cross between the processes of a cluster."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from server.scale.routing import InvalidReport, ReplicaReport, Route, report_from_stats, stats_from_report

REPORT = ReplicaReport(
    "engine#1",
    capacity=16,
    num_slots=4,
    num_open=3,
    num_loads=1,
    resident=frozenset({"b", "a"}),
    in_host_cache=frozenset({"c"}),
)


def test_a_report_survives_json() -> None:
    assert report_from_stats(json.loads(json.dumps(stats_from_report(REPORT)))) == REPORT


def test_entries_of_a_later_version_are_ignored() -> None:
    assert report_from_stats({**stats_from_report(REPORT), "new": 1}) == REPORT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("replica", ""),
        ("replica", None),
        ("capacity", 0),
        ("capacity", True),
        ("num_slots", 0),
        ("num_open", -1),
        ("num_loads", 1.5),
        ("resident", "abc"),
        ("in_host_cache", [1]),
    ],
)
def test_an_entry_that_no_report_has_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidReport, match=name):
        report_from_stats({**stats_from_report(REPORT), name: value})


@pytest.mark.parametrize("name", sorted(stats_from_report(REPORT)))
def test_a_missing_entry_is_named(name: str) -> None:
    stats = stats_from_report(REPORT)
    del stats[name]
    with pytest.raises(InvalidReport, match=name):
        report_from_stats(stats)


def test_a_route_crosses_processes() -> None:
    route = Route("digest", pinned_replica="engine#1")
    assert pickle.loads(pickle.dumps(route)) == route
