"""Requests whose delta is in a slot, in host memory or on disk get the same tokens and are counted by level."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltastore.registry.records import VersionRecord
from tests.helpers.tiny_models import Change, make_pair
from tests.server.helpers.served import (
    Mode,
    Served,
    make_delta,
    serving,
)
from tests.vllm.helpers.environment import SIZES

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def base_and_deltas(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    directory = tmp_path_factory.mktemp("models")
    models = make_pair("llama", directory, seed=5, changes=(Change(),) * 3, **SIZES)
    files = [directory / f"{number}.safetensors" for number in range(3)]
    pairs = zip(models.finetunes, files, strict=True)
    return models.base, [make_delta(models.base, finetune, file) for finetune, file in pairs]


@pytest.fixture
def served(base_and_deltas: tuple[Path, list[Path]], tmp_path: Path, mode: Mode) -> Iterator[Served]:
    """Serve with two slots."""
    with serving(base_and_deltas[0], tmp_path / "registry", mode, max_gpu_deltas=2) as running:
        yield running


@pytest.fixture
def records(served: Served, base_and_deltas: tuple[Path, list[Path]]) -> list[VersionRecord]:
    """Publish three variants and ask each once; the first has left its slot."""
    records = [served.publish(file, f"v{number}") for number, file in enumerate(base_and_deltas[1])]
    for record in records:
        served.ask(record, PROMPT)
    assert [served.level(record) for record in records] == ["host", "device", "device"]
    return records


def test_lookups_and_cold_starts_are_counted_by_where_the_delta_was(
    served: Served, records: list[VersionRecord]
) -> None:
    served.ask(records[0], PROMPT)
    served.ask(records[0], PROMPT)
    counts = [served.metric("variant_lookups_total", result=level) for level in ("device", "host", "disk")]
    assert counts == [1, 1, 3]
    assert [served.metric("cold_start_seconds_count", source=s) for s in ("host", "disk")] == [1, 3]
    assert served.metric("variant_load_bytes_total", source="host") == records[0].device_bytes
    assert served.metric("host_cache_limit_bytes") >= served.metric("host_cache_bytes") > 0
    assert served.metric("variants_resident", level="host") == 3


def test_a_delta_from_host_memory_answers_as_from_disk_though_its_object_is_corrupt(
    served: Served, records: list[VersionRecord]
) -> None:
    second = served.ask(records[1], PROMPT).token_ids
    path = served.registry.object_path(records[1])
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[::-1])
    for record in (records[2], records[0]):
        served.ask(record, PROMPT)
    assert served.level(records[1]) == "host"
    assert served.ask(records[1], PROMPT).token_ids == second
