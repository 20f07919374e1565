"""Questions about a variant cost as many reads and listings with many versions as with few, in every state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest

from deltastore.registry import Registry
from deltastore.registry.directory.files import DirectoryFiles
from server.metrics.exposition import read_registry
from tests.deltastore.helpers.crash_storage import SteppedStorage, artifact, push

FEW, MANY = 5, 40


def all_active(registry: Registry, num_versions: int) -> None:
    for seed in range(num_versions):
        push(registry, artifact(seed, 10), "a")


def all_but_one_inactive(registry: Registry, num_versions: int) -> None:
    for seed in range(num_versions):
        push(registry, artifact(seed, 10), "a", activate=seed == 0)


def inactive_since_a_promotion(registry: Registry, num_versions: int) -> None:
    for seed in range(3):
        push(registry, artifact(seed, 10), "a")
    registry.activate("default", "a", 2)
    for seed in range(3, num_versions):
        push(registry, artifact(seed, 10), "a", activate=False)


def deleted_one_by_one(registry: Registry, num_versions: int) -> None:
    all_active(registry, num_versions)
    for number in range(1, num_versions):
        registry.delete("default", "a", number)


def every_other_one_deleted(registry: Registry, num_versions: int) -> None:
    all_active(registry, num_versions)
    for number in range(1, num_versions, 2):
        registry.delete("default", "a", number)


KINDS = (
    all_active,
    all_but_one_inactive,
    inactive_since_a_promotion,
    deleted_one_by_one,
    every_other_one_deleted,
)
QUESTIONS: dict[str, Callable[[Registry], object]] = {
    "the active version": lambda registry: registry.resolve("default", "a"),
    "a pinned version": lambda registry: registry.resolve(
        "default", "a", registry.summary("default", "a").numbers[0]
    ),
    "the variant": lambda registry: registry.summary("default", "a"),
    "a page of variants": lambda registry: registry.summaries("default", registry.names("default")),
    "whether a version is live": lambda registry: registry.is_live(registry.resolve("default", "a")),
    "a scrape": lambda registry: read_registry(registry, ["default/a"]),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the reads of small files and the listings of directories."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> None:
        made = getattr(DirectoryFiles, name)

        def call(files: DirectoryFiles, path: PurePath, **options: bool) -> object:
            counted[name] += 1
            return made(files, path, **options)

        monkeypatch.setattr(DirectoryFiles, name, call)

    for name in ("read", "names", "each_name", "subdirectories"):
        counting(name)
    return counted


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("make", KINDS)
def test_a_question_about_a_variant_costs_the_same_whatever_its_versions(
    make: Callable[[Registry, int], None], question: str, tmp_path: Path, calls: Counter[str]
) -> None:
    costs = []
    for num_versions in (FEW, MANY):
        registry = Registry(tmp_path / str(num_versions), SteppedStorage())
        make(registry, num_versions)
        calls.clear()
        QUESTIONS[question](registry)
        costs.append(calls.copy())
    assert costs[0] == costs[1]
    assert costs[0]["read"] + costs[0]["names"] > 0


def test_a_page_of_variants_costs_the_same_beside_many_others(tmp_path: Path, calls: Counter[str]) -> None:
    registry = Registry(tmp_path / "registry", SteppedStorage())
    costs = []
    for others in (range(5), range(5, 100)):
        for number in others:
            push(registry, artifact(number, 10), f"v{number:02}")
        calls.clear()
        registry.summaries("default", registry.names("default")[:5])
        costs.append(calls.copy())
    assert costs[0] == costs[1]
