"""The exposition of a server that has served nothing: every metric of the API, and its bounded series at 0."""

from __future__ import annotations

import asyncio
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.api.service import Backend
from server.app import create_app
from server.settings import Settings

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

    def load(*args: Any) -> Backend:
        stopping: threading.Event = args[3]
        stopping.wait()
        raise RuntimeError("stopped while loading")

    async def ask() -> str:
        app = create_app(Settings(base=directory, registry=directory / "registry", shutdown_timeout=5), load)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            return (await client.get("/metrics")).text

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
    assert {name for name, value in started.items() if value} == {"peraxis_build_info"}
