"""Two servers on one volume, and gc meanwhile: one order of changes, and no stale reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deltastore.errors import VariantNotFound, VariantQuarantined
from deltastore.registry import Registry
from deltastore.registry.storage import MODE, Storage
from tests.deltastore.helpers.crash_storage import FACTS, artifact, digest_of, push, stored

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Registry(tmp_path / "registry")
    return tmp_path / "registry"


def start(mode: str, root: Path, *args: object) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.deltastore.helpers.crash_storage",
        mode,
        str(root),
        *map(str, args),
    ]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def results(processes: list[subprocess.Popen[str]]) -> list[list[tuple[int, str]]]:
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [[(version, digest) for version, digest in json.loads(output or "[]")] for output in outputs]


def test_two_processes_publishing_different_bytes_get_different_versions(root: Path) -> None:
    one, other = results([start("publish", root, "a", 0, 12), start("publish", root, "a", 12, 24)])
    versions = dict(one + other)
    assert sorted(versions) == list(range(1, 25))
    assert sorted(versions.values()) == sorted(digest_of(seed) for seed in range(24))
    listed = Registry(root).variant("default", "a")
    assert {record.version: record.digest for record in listed.versions} == versions
    assert listed.active == 24
    assert Registry(root).check().notes == ()


def test_two_processes_publishing_the_same_bytes_get_the_same_versions(root: Path) -> None:
    one, other = results([start("publish", root, "a", 0, 8), start("publish", root, "a", 0, 8)])
    assert one == other
    assert len(Registry(root).variant("default", "a").versions) == 8


def test_an_open_registry_sees_what_another_one_changes(root: Path) -> None:
    here, there = Registry(root), Registry(root)
    push(there, artifact(1), "a")
    assert here.resolve("default", "a").version == 1
    push(here, artifact(2), "a")
    assert there.resolve("default", "a").version == 2
    there.activate("default", "a", 1)
    assert here.resolve("default", "a").version == 1
    here.delete("default", "a")
    assert there.variants() == []


def test_an_open_registry_sees_what_another_process_changes(root: Path) -> None:
    registry = Registry(root)
    record = push(registry, artifact(1), "a").record
    for change, seen in (
        ("registry.quarantine(registry.resolve('default', 'a'), 'found by the other')", "quarantined"),
        ("registry.delete('default', 'a')", "no variant"),
    ):
        program = "import sys; from pathlib import Path; from deltastore.registry import Registry\n"
        program += f"registry = Registry(Path(sys.argv[1])); {change}"
        subprocess.run([sys.executable, "-c", program, str(root)], cwd=REPOSITORY, check=True)
        with pytest.raises((VariantQuarantined, VariantNotFound), match=seen):
            registry.resolve("default", "a")
    assert not registry.is_live(record)


def test_collection_beside_publications_of_the_same_bytes_takes_nothing_that_is_needed(root: Path) -> None:
    registry = Registry(root)
    processes = [start("churn", root, name, 25) for name in ("a", "b")]
    num_collected = 0
    while any(process.poll() is None for process in processes):
        num_collected += len(registry.gc().objects)
    assert results(processes) == [[], []]  # and each found its object after every publication
    num_collected += len(registry.gc().objects)
    assert num_collected > 0
    assert registry.usage().num_objects == 0
    assert registry.check().notes == ()


def test_an_upload_in_progress_is_not_collected(root: Path) -> None:
    registry = Registry(root)
    with registry.open_upload(None) as upload:
        upload.write(artifact(1))
        assert Registry(root).gc().num_partials == 0
        registry.publish(upload.seal(), FACTS, tenant="default", name="a")
    assert registry.object_path(stored(1)).read_bytes() == artifact(1)


def test_an_upload_whose_file_was_collected_before_it_was_locked_begins_again(root: Path) -> None:
    collected: list[int] = []

    class CollectedStorage(Storage):
        def create(self, path: Path, mode: int = MODE) -> int:
            fd = super().create(path, mode)
            if path.suffix == ".part" and not collected:
                collected.append(Registry(root).gc().num_partials)
            return fd

    push(Registry(root, CollectedStorage()), artifact(1), "a")
    assert collected == [1]
    assert Registry(root).check().notes == ()
