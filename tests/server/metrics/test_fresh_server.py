"""The exposition of a server that has served nothing: every metric of the API, and its bounded series at 0."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.helpers.http_app import running_app, settings_of

EXPECTED = Path(__file__).with_name("fresh_server.txt")
SeriesName = tuple[str, frozenset[tuple[str, str]]]


class Exposed(NamedTuple):
    """A metric without its values."""

    documentation: str
    type: str
    series: frozenset[SeriesName]


def exposed(text: str) -> dict[str, Exposed]:
    return {
        family.name: Exposed(
            family.documentation,
            family.type,
            frozenset((sample.name, frozenset(sample.labels.items())) for sample in family.samples),
        )
        for family in text_string_to_metric_families(text)
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return `/metrics` of a server that still loads its base."""
    directory = tmp_path_factory.mktemp("fresh")

    async def ask() -> str:
        async with running_app(settings_of(directory, directory / "registry")) as app:
            return (await app.client.get("/metrics")).text

    return asyncio.run(ask())


def test_it_has_the_names_types_help_and_series_that_dashboards_were_built_on(text: str) -> None:
    expected = EXPECTED.read_text().replace("VERSION", version("peraxis"))
    assert exposed(text) == exposed(expected)


def test_counters_histograms_and_gauges_start_at_zero(text: str) -> None:
    started = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("peraxis_") and not sample.name.endswith(("_created", "_free_bytes"))
    }
    ones = {"peraxis_build_info", "peraxis_registry_up"}
    assert {name for name, value in started.items() if value} == ones
