"""Sums over processes that come and go, and gauges of those that live."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from server.metrics.aggregator import Aggregator
from server.metrics.exposition import render, variant_labels
from server.metrics.instruments import MAX_LABEL_VALUES, Family, Series, Snapshot
from server.metrics.metrics import EngineMetrics

Sum = tuple[str, tuple[str, ...], int]
SeriesName = tuple[str, frozenset[tuple[str, str]]]
PROCESSES = ("a", "b", "c")
VARIANTS = ("v", "w")


def sums_of(snapshot: Snapshot) -> dict[Sum, float]:
    """Return counters' values, and histograms' sums and buckets."""
    return {
        (family.name, series.labels, part): number
        for family in snapshot.families
        if family.type != "gauge"
        for series in family.series
        for part, number in enumerate((series.value, *series.counts))
    }


class Process:
    """One run of a process, and what was scraped from it."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics()
        self.scraped: dict[Sum, float] = {}

    def scrape_into(self, aggregator: Aggregator) -> None:
        snapshot = self.metrics.snapshot()
        aggregator.received(self, snapshot)
        self.scraped = sums_of(snapshot)


def series_of(aggregator: Aggregator, *types: str) -> dict[SeriesName, float]:
    """Return the rendered values of metrics of these types, without the times of their creation."""
    text = render(aggregator.merged()).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in types
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def value(aggregator: Aggregator, name: str, **labels: str) -> float | None:
    values = series_of(aggregator, "counter", "histogram", "gauge")
    return values.get((f"peraxis_{name}", frozenset(labels.items())))


def added(*parts: dict[Sum, float]) -> dict[Sum, float]:
    return {name: sum(values.get(name, 0) for values in parts) for name in set().union(*parts)}


processes = st.sampled_from(PROCESSES)
actions = st.one_of(
    st.tuples(st.just("count"), processes, st.sampled_from(VARIANTS), st.integers(0, 5)),
    # Sums of multiples of 1/8 are exact.
    st.tuples(st.just("observe"), processes, st.integers(0, 1000).map(lambda number: number / 8)),
    st.tuples(st.just("scrape"), processes),
    st.tuples(st.just("replace"), processes),
)


@given(st.lists(actions, max_size=40))
@settings(deadline=None)
def test_sums_never_decrease_and_hold_all_that_was_scraped(taken: list[tuple[Any, ...]]) -> None:
    aggregator = Aggregator()
    running: dict[str, Process] = {}
    ended: dict[Sum, float] = {}
    before = sums_of(aggregator.merged())
    for action, name, *arguments in taken:
        if action == "replace" and name in running:
            process = running.pop(name)
            aggregator.ended(process)
            ended = added(ended, process.scraped)
        if name not in running:
            running[name] = Process()
            aggregator.started(running[name])
        process = running[name]
        if action == "count":
            variant, amount = arguments
            label = process.metrics.variant_label("t", variant)
            process.metrics.variant_tokens_total.labels(label, "prompt").inc(amount)
        elif action == "observe":
            process.metrics.step_seconds.observe(*arguments)
            process.metrics.cold_start_seconds.labels("disk").observe(*arguments)
        elif action == "scrape":
            process.scrape_into(aggregator)
        now = sums_of(aggregator.merged())
        assert all(now[part] >= number for part, number in before.items())
        truth = added(ended, *(process.scraped for process in running.values()))
        assert {part: number for part, number in now.items() if part in truth} == truth
        assert not any(number for part, number in now.items() if part not in truth)
        before = now


@pytest.fixture
def aggregator() -> Aggregator:
    return Aggregator()


@pytest.fixture
def process(aggregator: Aggregator) -> Process:
    process = Process()
    aggregator.started(process)
    return process


def test_before_any_process_has_started_everything_is_zero(aggregator: Aggregator) -> None:
    values = series_of(aggregator, "counter", "histogram", "gauge")
    assert values
    assert not any(values.values())


def test_gauges_of_an_ended_process_go_and_bounded_ones_fall_to_zero(
    aggregator: Aggregator, process: Process
) -> None:
    process.metrics.slots.set(4)
    process.metrics.variant_resident.labels("t/v", "host").set(1)
    process.scrape_into(aggregator)
    assert value(aggregator, "slots") == 4
    aggregator.ended(process)
    assert value(aggregator, "slots") == 0
    assert value(aggregator, "variant_resident", variant="t/v", level="host") is None


def test_gauges_of_running_processes_are_added(aggregator: Aggregator, process: Process) -> None:
    other = Process()
    aggregator.started(other)
    for number, one in enumerate((process, other), start=1):
        one.metrics.slots.set(number)
        one.scrape_into(aggregator)
    assert value(aggregator, "slots") == 3


def test_a_snapshot_that_arrives_after_its_process_ended_is_ignored(
    aggregator: Aggregator, process: Process
) -> None:
    aggregator.ended(process)
    process.metrics.prompt_tokens_total.inc()
    process.scrape_into(aggregator)
    assert value(aggregator, "prompt_tokens_total") == 0


def test_a_late_process_counts_with_its_last_snapshot(aggregator: Aggregator, process: Process) -> None:
    process.metrics.prompt_tokens_total.inc(2)
    process.metrics.slots.set(4)
    process.scrape_into(aggregator)
    process.metrics.prompt_tokens_total.inc()
    assert value(aggregator, "prompt_tokens_total") == 2
    assert value(aggregator, "slots") == 4


def test_of_the_process_metrics_the_oldest_start_and_the_smallest_limit_are_shown(
    aggregator: Aggregator,
) -> None:
    values = {"a": (30.0, 100.0, 1.0, 5.0), "b": (20.0, 200.0, 2.0, 7.0)}
    for source, (started, max_fds, cpu, memory) in values.items():
        aggregator.started(source)
        aggregator.received(
            source,
            Snapshot(
                tuple(
                    Family(f"process_{name}", "text", kind, (), (Series((), number),))
                    for name, kind, number in (
                        ("start_time_seconds", "gauge", started),
                        ("max_fds", "gauge", max_fds),
                        ("cpu_seconds", "counter", cpu),
                        ("resident_memory_bytes", "gauge", memory),
                    )
                )
            ),
        )
    aggregator.ended("a")
    aggregator.started("c")
    shown = {name: number for (name, _), number in series_of(aggregator, "counter", "gauge").items()}
    assert shown["process_cpu_seconds_total"] == 3
    assert shown["process_resident_memory_bytes"] == 7
    assert (shown["process_start_time_seconds"], shown["process_max_fds"]) == (20, 200)
    aggregator.started("d")
    aggregator.received("d", Snapshot((Family("process_max_fds", "text", "gauge", (), (Series((), 50.0),)),)))
    shown = {name: number for (name, _), number in series_of(aggregator, "gauge").items()}
    assert shown["process_max_fds"] == 50


def test_a_sum_was_created_with_its_first_process(aggregator: Aggregator) -> None:
    for source, created in {"old": 10.0, "new": 20.0}.items():
        aggregator.started(source)
        series = (Series((), 1.0, created=created),)
        aggregator.received(source, Snapshot((Family("made", "text", "counter", (), series),)))
    made = aggregator.merged().families[-1]
    assert made.series == (Series((), 2.0, created=10.0),)


def test_a_forgotten_variant_goes_from_totals_of_dead_and_running_processes(
    aggregator: Aggregator, process: Process
) -> None:
    dead = Process()
    aggregator.started(dead)
    for one in (dead, process):
        for variant in VARIANTS:
            label = one.metrics.variant_label("t", variant)
            one.metrics.variant_tokens_total.labels(label, "prompt").inc(2)
            one.metrics.variant_resident.labels(label, "host").set(1)
        one.scrape_into(aggregator)
    aggregator.ended(dead)
    assert variant_labels(aggregator.merged()) == {"t/v", "t/w"}
    aggregator.forget_variants({"t/v"})
    # The process has not forgotten it yet, and has counted nothing since.
    process.scrape_into(aggregator)
    assert value(aggregator, "variant_tokens_total", variant="t/v", kind="prompt") is None
    assert value(aggregator, "variant_tokens_total", variant="t/w", kind="prompt") == 4


def test_a_variant_that_was_forgotten_and_counts_again_starts_at_zero(
    aggregator: Aggregator, process: Process
) -> None:
    for amount in (2, 5):
        label = process.metrics.variant_label("t", "v")
        process.metrics.variant_tokens_total.labels(label, "prompt").inc(amount)
        process.scrape_into(aggregator)
        assert value(aggregator, "variant_tokens_total", variant="t/v", kind="prompt") == amount
        aggregator.forget_variants({"t/v"})
        process.metrics.forget_variants({"t/v"})


def test_nothing_is_kept_of_an_ended_process_but_its_sums(aggregator: Aggregator, process: Process) -> None:
    process.metrics.prompt_tokens_total.inc()
    process.scrape_into(aggregator)
    number_of_series = len(series_of(aggregator, "counter", "histogram", "gauge"))
    for _ in range(20):
        ended = Process()
        aggregator.started(ended)
        ended.metrics.prompt_tokens_total.inc()
        ended.scrape_into(aggregator)
        aggregator.ended(ended)
    kept = weakref.ref(ended)
    del ended
    gc.collect()
    assert kept() is None
    assert len(series_of(aggregator, "counter", "histogram", "gauge")) == number_of_series
    assert value(aggregator, "prompt_tokens_total") == 21


def test_labels_of_many_dead_processes_fold_into_one(aggregator: Aggregator) -> None:
    for number in range(MAX_LABEL_VALUES + 50):
        process = Process()
        aggregator.started(process)
        label = process.metrics.variant_label("t", f"v{number}")
        process.metrics.variant_tokens_total.labels(label, "prompt").inc()
        process.scrape_into(aggregator)
        aggregator.ended(process)
    assert len(variant_labels(aggregator.merged())) == MAX_LABEL_VALUES
    assert value(aggregator, "variant_tokens_total", variant="t/v0", kind="prompt") == 1
    assert value(aggregator, "variant_tokens_total", variant="other", kind="prompt") == 50


def test_labels_of_one_tenant_do_not_take_those_of_another(aggregator: Aggregator) -> None:
    """As when many processes have ended, each with other variants of the same tenant."""
    for tenant, number in [*(("greedy", number) for number in range(2 * MAX_LABEL_VALUES)), ("honest", 0)]:
        process = Process()
        aggregator.started(process)
        label = process.metrics.variant_label(tenant, f"v{number}")
        process.metrics.variant_tokens_total.labels(label, "prompt").inc()
        process.scrape_into(aggregator)
        aggregator.ended(process)
    assert value(aggregator, "variant_tokens_total", variant="honest/v0", kind="prompt") == 1
    assert value(aggregator, "variant_tokens_total", variant="other", kind="prompt") == MAX_LABEL_VALUES


def test_a_forgotten_variants_label_can_be_used_again(aggregator: Aggregator, process: Process) -> None:
    for number in range(MAX_LABEL_VALUES):
        process.metrics.variant_label("t", f"v{number}")
    process.scrape_into(aggregator)
    aggregator.forget_variants({"t/v7"})
    process.metrics.forget_variants({"t/v7"})
    label = process.metrics.variant_label("t", "new")
    process.metrics.variant_tokens_total.labels(label, "prompt").inc()
    process.scrape_into(aggregator)
    assert value(aggregator, "variant_tokens_total", variant="t/new", kind="prompt") == 1
