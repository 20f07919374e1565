"""Checks expressions against the series that a server has, without a server. Knows no dashboard and no alert."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser as promql

from monitoring.known import KnownSeries

# Grafana fills these in; Prometheus' parser takes no variable for a duration or a number.
GRAFANA_VARIABLES = {"$__rate_interval": "1m", "$__interval": "1m", "$__range": "1h", "$copy_limit": "1"}


def without_variables(expression: str, values: Mapping[str, str] = GRAFANA_VARIABLES) -> str:
    """Return an expression that Prometheus can parse, with the longest names replaced first."""
    for name in sorted(values, key=len, reverse=True):
        expression = expression.replace(name, values[name])
    return expression


def problems(expression: str, known: Mapping[str, KnownSeries]) -> list[str]:
    """Return what an expression names and no server has: series, labels and values of labels."""
    try:
        parsed = promql.parse(without_variables(expression))
    except ValueError as error:
        return [f"it does not parse: {error}"]
    found: list[str] = []
    for node in _nodes(parsed):
        if isinstance(node, promql.VectorSelector):
            found += _problems_of(node, known)
        else:
            found += _unknown_labels(node, known)
    return found


def _problems_of(selector: promql.VectorSelector, known: Mapping[str, KnownSeries]) -> Iterator[str]:
    series = known.get(selector.name or "")
    if series is None:
        yield f"no server has {selector.name or selector}"
        return
    for matcher in selector.matchers.matchers:
        if matcher.name not in series.labels:
            yield f"{series.name} has no label {matcher.name}"
            continue
        values = series.labels[matcher.name]
        # Alternatives are looked up one by one, so that none of them is misspelled.
        patterns = [re.escape(matcher.value)]
        if matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe):
            patterns = matcher.value.split("|")
        for pattern in patterns if values is not None else ():
            if not any(re.fullmatch(pattern, value) for value in values or ()):
                yield f"{series.name} has no {matcher.name} {pattern}"


def _unknown_labels(node: promql.Expr, known: Mapping[str, KnownSeries]) -> Iterator[str]:
    """Yield labels that an aggregation or a match names and none of the series below it has."""
    for label in _named_labels(node):
        below = [known[name] for each in _selectors(node) if (name := each.name or "") in known]
        if not any(label in series.labels for series in below):
            yield f"no series in {node} has the label {label}"


def _named_labels(node: promql.Expr) -> list[str]:
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        return node.modifier.labels
    if isinstance(node, promql.BinaryExpr) and node.modifier is not None:
        matching = node.modifier.matching
        return [*(matching.labels if matching is not None else ()), *(node.modifier.group_labels or ())]
    return []


def _selectors(expression: promql.Expr) -> list[promql.VectorSelector]:
    return [node for node in _nodes(expression) if isinstance(node, promql.VectorSelector)]


def _nodes(expression: promql.Expr) -> list[Any]:
    """Return an expression and all below it; the selector of a range is one of them."""
    nodes: list[Any] = []
    promql.walk(expression, nodes.append)
    return nodes
