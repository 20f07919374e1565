"""`check` tells damage from leftovers of crashes, and `gc` removes leftovers alone."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

import pytest

from deltastore.errors import RegistryError, RegistryUnavailable
from deltastore.registry import Registry
from deltastore.registry.checker import records_in_use
from deltastore.registry.directory.files import DirectoryFiles, DirectoryObjects
from deltastore.registry.directory.store import Collector
from deltastore.registry.records import VersionRecord
from deltastore.registry.uploads import kernel_id
from tests.deltastore.helpers.crash_storage import (
    SteppedStorage,
    artifact,
    digest_of,
    make_world,
    push,
    stored,
    view,
)

HOME = "variants/default/a"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Variant `a` with versions 1 to 3, of which 2 is active and 1 deleted; `b` shares the bytes of version 2."""
    registry = Registry(tmp_path / "registry", SteppedStorage())
    for seed in (1, 2, 3):
        push(registry, artifact(seed), "a", activate=seed < 3)
    push(registry, artifact(2), "b")
    registry.delete("default", "a", 1)
    registry.gc()
    return registry


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "an object with a flipped bit": (
        lambda root: (root / "objects" / digest_of(2)).write_bytes(artifact(2)[:-1] + b"!"),
        f"objects/{digest_of(2)}",
        "its bytes have the digest",
    ),
    "a truncated object": (
        lambda root: os.truncate(root / "objects" / digest_of(2), 5),
        f"objects/{digest_of(2)}",
        "its bytes have the digest",
    ),
    "a missing object": (
        lambda root: (root / "objects" / digest_of(3)).unlink(),
        f"{HOME}/3.json",
        f"its object {digest_of(3)} is missing: upload the artifact again",
    ),
    "a record that is no JSON": (
        lambda root: (root / HOME / "3.json").write_bytes(b"{"),
        f"{HOME}/3.json",
        "restore the file, or delete a@3",
    ),
    "a record of another format": (
        lambda root: edit(root / HOME / "3.json", format=2),
        f"{HOME}/3.json",
        "format: Input should be 3",
    ),
    "a record under another number": (
        lambda root: edit(root / HOME / "3.json", version=4),
        f"{HOME}/3.json",
        "it is the record of default/a@4",
    ),
    "a record with other chunk digests": (
        lambda root: edit(root / HOME / "3.json", chunk_sha256=["0" * 64]),
        f"{HOME}/3.json",
        "its size or chunk digests are not its object's",
    ),
    "a record with another size": (
        lambda root: edit(root / HOME / "3.json", size_bytes=1),
        f"{HOME}/3.json",
        "its size or chunk digests are not its object's",
    ),
    "a lost record": (
        lambda root: (root / HOME / "2.json").unlink(),
        f"{HOME}/2.json",
        "this version's record is missing: restore it, or delete a@",
    ),
    "a state that is no JSON": (
        lambda root: (root / HOME / "state-000001.json").write_bytes(b""),
        f"{HOME}/state-000001.json",
        "restore the file, or delete the variant 'a'",
    ),
    "a state that names a deleted version": (
        lambda root: edit(root / HOME / "state-000001.json", active=1),
        f"{HOME}/state-000001.json",
        "its active version 1 is deleted",
    ),
    "a state that names a version that never was": (
        lambda root: edit(root / HOME / "state-000001.json", active=4, as_of=4),
        f"{HOME}/4.json",
        "this version's record is missing: restore it, or delete a@",
    ),
    "a foreign file among the objects": (
        lambda root: (root / "objects" / "README").write_text(""),
        "objects/README",
        "not a file of the registry",
    ),
    "a foreign file among the records": (
        lambda root: (root / HOME / "01.json").write_text("{}"),
        f"{HOME}/01.json",
        "not a file of the registry",
    ),
    "a file where a tenant should be": (
        lambda root: (root / "variants" / "acme").write_text(""),
        "variants/acme",
        "not a file of the registry",
    ),
    "a foreign directory": (lambda root: (root / "backup").mkdir(), "backup", "not a file of the registry"),
}


def test_an_undamaged_registry_is_clean(registry: Registry) -> None:
    report = registry.check()
    assert report.is_clean
    assert (report.notes, report.num_objects, report.num_versions) == ((), 2, 3)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_once_where_it_is(damage: str, registry: Registry) -> None:
    do, path, problem = DAMAGE[damage]
    do(registry.root)
    (finding,) = registry.check().findings
    assert finding.path == registry.root / path
    assert problem in finding.problem


def test_what_file_systems_put_into_a_volume_is_no_finding(registry: Registry) -> None:
    (registry.root / "lost+found").mkdir()
    (registry.root / "objects" / ".nfs00000000000a").write_text("")
    assert registry.check().is_clean


def test_what_a_crash_leaves_is_noted_and_collected(registry: Registry) -> None:
    leftovers = [f"uploads/{kernel_id()}-{'0' * 32}.part", f"objects/{digest_of(8)}", f"{HOME}/.0.tmp"]
    leftovers += ["quarantine/.0.tmp", f"quarantine/{digest_of(2)}", f"quarantine/{digest_of(9)}"]
    for name in leftovers:
        (registry.root / name).write_bytes(artifact(8))
        os.utime(registry.root / name, (0, 0))
    report = registry.check()
    assert report.is_clean
    assert {str(note.path.relative_to(registry.root)) for note in report.notes} == set(leftovers)
    collected = registry.gc()
    assert collected.bytes_freed == len(leftovers) * len(artifact(8))
    assert (collected.num_partials, collected.num_leftovers) == (1, 3)
    assert collected.objects == tuple(sorted([digest_of(8), digest_of(9)]))
    assert not any((registry.root / name).exists() for name in leftovers)
    assert registry.check().notes == ()


def test_a_dry_run_says_the_same_and_removes_nothing(tmp_path: Path) -> None:
    make_world(tmp_path)
    registry = Registry(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    promised = registry.gc(dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    done = registry.gc()
    assert (promised.objects, promised.num_partials, promised.bytes_freed) == (
        done.objects,
        done.num_partials,
        done.bytes_freed,
    )
    assert done.objects == tuple(sorted([digest_of(5), digest_of(7)]))


def test_collection_changes_nothing_that_users_see(tmp_path: Path) -> None:
    make_world(tmp_path)
    registry = Registry(tmp_path)
    before = view(registry)
    registry.gc()
    assert view(registry) == before
    needed = {record.digest for variant in registry.variants() for record in variant.versions}
    assert set(os.listdir(tmp_path / "objects")) == needed - {digest_of(6)}  # which is quarantined


def test_a_quarantined_object_without_a_version_is_collected_with_its_mark(registry: Registry) -> None:
    registry.quarantine(stored(3), "rotten")
    registry.delete("default", "a", 3)
    assert registry.gc().objects == (digest_of(3),)
    assert os.listdir(registry.root / "quarantine") == []


@pytest.mark.parametrize("name", ["3.json", "state-000001.json"])
def test_nothing_is_collected_while_a_damaged_file_hides_what_it_needs(name: str, registry: Registry) -> None:
    push(registry, artifact(7), "c")
    registry.delete("default", "c")
    (registry.root / HOME / name).write_bytes(b"damaged")
    before = sorted(registry.root.rglob("*"))
    with pytest.raises(RegistryError, match=rf"nothing was collected: .*{name}"):
        registry.gc()
    assert sorted(registry.root.rglob("*")) == before


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), RegistryError("damaged"), KeyboardInterrupt()]
)
def test_a_gc_that_fails_while_it_reads_leaves_no_object_aside(
    error: BaseException, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[None] = []

    def read(files: DirectoryFiles) -> Iterator[VersionRecord]:
        readings.append(None)
        if len(readings) == 1:
            return iter(list(records_in_use(files)))
        # After the first, which found an object that nothing refers to, one was published.
        monkeypatch.undo()
        push(registry, artifact(3), "c")
        raise error

    registry.delete("default", "a", 3)
    monkeypatch.setattr("deltastore.registry.directory.store.records_in_use", read)
    with pytest.raises((RegistryUnavailable, RegistryError, KeyboardInterrupt)):
        registry.gc()
    assert len(readings) == 2
    assert registry.object_path(registry.resolve("default", "c")).read_bytes() == artifact(3)
    assert not [path.name for path in (registry.root / "objects").iterdir() if "." in path.name]


def test_a_gc_that_fails_puts_back_each_object_that_it_can(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (6, 7, 8):
        push(registry, artifact(seed), "c")
    registry.delete("default", "c")
    failures = iter([OSError(5, "Input/output error")])
    put_back = DirectoryObjects.put_back

    def fail_once(self: DirectoryObjects, aside: Path) -> None:
        for error in failures:
            raise error
        put_back(self, aside)

    def fail(self: Collector, except_for: Path | None = None) -> set[str]:
        monkeypatch.setattr(Collector, "_in_use", fail_always)
        return set()

    def fail_always(self: Collector, except_for: Path | None = None) -> set[str]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DirectoryObjects, "put_back", fail_once)
    monkeypatch.setattr(Collector, "_in_use", fail)
    before = len(os.listdir(registry.root / "objects"))
    with pytest.raises(RegistryUnavailable):
        registry.gc()
    names = os.listdir(registry.root / "objects")
    assert (len(names), sum("." in name for name in names)) == (before, 1)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_record_that_cannot_be_read_stays_behind_in_no_deletion(
    name: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.set_visibility("default", name, "public")
    read = DirectoryFiles.read
    spoilt = PurePath(f"variants/default/{name}/{2 if name == 'a' else 1}.json")

    def fail(self: DirectoryFiles, path: PurePath, *, is_fresh: bool = False) -> bytes:
        if path.is_relative_to(registry.root) and path.relative_to(registry.root) == spoilt:
            raise OSError(5, "Input/output error")
        return read(self, path, is_fresh=is_fresh)

    monkeypatch.setattr(DirectoryFiles, "read", fail)
    deleted = registry.delete("default", name)
    assert deleted.versions == ([2, 3] if name == "a" else [1])
    assert [record.version for record in deleted.records] == ([3] if name == "a" else [])
    monkeypatch.undo()
    assert registry.public_names() == []
    assert name not in registry.names("default")


def test_a_damaged_version_can_be_deleted_and_then_the_registry_is_clean(registry: Registry) -> None:
    (registry.root / HOME / "3.json").write_bytes(b"damaged")
    registry.delete("default", "a", 3)
    assert registry.check().is_clean
    assert registry.gc().objects == (digest_of(3),)


def test_a_variant_with_a_damaged_state_can_be_deleted_as_a_whole(registry: Registry) -> None:
    (registry.root / HOME / "state-000001.json").write_bytes(b"damaged")
    registry.delete("default", "a")
    assert [variant.name for variant in registry.variants()] == ["b"]
    assert registry.check().is_clean


def test_a_damaged_variant_does_not_hide_the_others(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    (registry.root / HOME / "3.json").write_bytes(b"damaged")
    with caplog.at_level(logging.ERROR):
        assert [variant.name for variant in registry.variants()] == ["b"]
    assert "default/a is left out" in caplog.text
    assert registry.resolve("default", "a").version == 2
