"""Expressions are compared with what a server exposes: names, labels and values of labels."""

from __future__ import annotations

import pytest

from tests.monitoring.helpers.check import known_series, problems
from tests.monitoring.helpers.files import expressions

KNOWN = known_series()


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_every_expression_names_only_what_a_server_has(name: str, expression: str) -> None:
    assert problems(expression, KNOWN) == [], name


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(peraxis_upload_total[$__rate_interval])", "no server has peraxis_upload_total"),
        ("peraxis_slots{tenant='a'}", "peraxis_slots has no label tenant"),
        ("peraxis_uploads_total{result=~'created|fine'}", "peraxis_uploads_total has no result fine"),
        ("peraxis_uploads_total{result='fine'}", "peraxis_uploads_total has no result fine"),
        (
            "sum by (variant) (peraxis_slots)",
            "no series in sum by (variant)(peraxis_slots{}) has the label variant",
        ),
        ("{job='peraxis'}", 'no server has {job="peraxis"}'),
    ],
)
def test_an_unknown_name_is_reported(expression: str, problem: str) -> None:
    assert problems(expression, KNOWN) == [problem]


def test_labels_of_a_match_are_looked_up() -> None:
    expression = "peraxis_variants_resident / on (instance, reason) group_left (version) peraxis_build_info"
    assert [each.rpartition(" ")[2] for each in problems(expression, KNOWN)] == ["reason"]


def test_an_expression_that_does_not_parse_is_reported() -> None:
    (problem,) = problems("sum(", KNOWN)
    assert problem.startswith("it does not parse")


def test_a_label_with_any_value_takes_every_value() -> None:
    assert not problems("peraxis_variant_requests_total{variant='tenant/name',finish_reason='stop'}", KNOWN)
    assert not problems("peraxis_step_seconds_bucket{le='0.5',namespace='any'}", KNOWN)
