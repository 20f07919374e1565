"""Compare expressions with the series that a server exposes, without a server: names, labels and values of labels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser as promql

from deltastore.registry.records import Usage
from server.metrics.exposition import RegistryState, service_families
from server.metrics.instruments import Family
from server.metrics.metrics import EngineMetrics, FrontendMetrics, vllm_families

# Grafana fills these in; Prometheus' parser takes no variable for a duration or a number.
GRAFANA_VARIABLES = {"$__rate_interval": "1m", "$__interval": "1m", "$__range": "1h", "$copy_limit": "1"}
# Labels that Prometheus' configuration or Kubernetes' service discovery gives every series of a target.
TARGET_LABELS = ("job", "instance", "namespace")
# Labels whose values are not known in advance, although some series may exist from the start.
OPEN_LABELS = frozenset({"variant", "tenant", "route", "code", "version", "le", *TARGET_LABELS})
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}


@dataclass(frozen=True, slots=True)
class KnownSeries:
    """The series of one name.

    Attributes:
        labels: known values by label; None where any value may occur.
    """

    name: str
    labels: Mapping[str, frozenset[str] | None]


def known_series() -> dict[str, KnownSeries]:
    """Return what a server exposes, and the series that Prometheus adds, by name."""
    counted = [
        *EngineMetrics().snapshot().families,
        *FrontendMetrics(process=True).snapshot().families,
    ]
    service = service_families(RegistryState(Usage(0, 0, 0, 0), {}), is_ready=True)
    found = [each for family in (*counted, *vllm_families(counted), *service) for each in _series_of(family)]
    up = KnownSeries("up", dict.fromkeys(TARGET_LABELS))
    return {each.name: each for each in (*found, up)}


def _series_of(family: Family) -> Iterator[KnownSeries]:
    values = {
        name: frozenset(series.labels[index] for series in family.series)
        for index, name in enumerate(family.label_names)
    }
    labels = {name: None if name in OPEN_LABELS else known or None for name, known in values.items()}
    for suffix in SUFFIXES[family.type]:
        bucket = ("le",) if suffix == "_bucket" else ()
        # ProcessCollector names a counter with its suffix or without it, by the version of prometheus_client.
        name = f"{family.name.removesuffix(suffix)}{suffix}" if suffix else family.name
        yield KnownSeries(name, {**labels, **dict.fromkeys((*bucket, *TARGET_LABELS))})


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
