"""A volume on which nothing can be locked, and uploads of other machines."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from deltastore.errors import RegistryError
from deltastore.registry import Registry
from deltastore.registry.storage import Storage
from deltastore.registry.uploads import ABANDONED_AFTER_S, kernel_id
from tests.deltastore.helpers.crash_storage import artifact, digest_of, make_world, push, stored

TOKEN = "0" * 32


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def grow_old(path: Path) -> None:
    then = path.stat().st_mtime - ABANDONED_AFTER_S - 1
    os.utime(path, (then, then))


@pytest.mark.usefixtures("no_locks")
def test_without_locks_every_change_is_made(tmp_path: Path) -> None:
    make_world(tmp_path / "registry")
    registry = Registry(tmp_path / "registry")
    assert push(registry, artifact(9), "a").record.version == 4
    registry.activate("default", "a", 1)
    registry.delete("default", "a", 2)
    assert digest_of(5) in registry.gc().objects
    assert registry.check().is_clean


@pytest.mark.usefixtures("no_locks")
def test_without_locks_an_upload_counts_as_abandoned_after_a_day(registry: Registry) -> None:
    with registry.open_upload(None) as upload:
        upload.write(artifact(1))
        (partial,) = (registry.root / "uploads").iterdir()
        assert registry.gc().num_partials == 0
        grow_old(partial)
        assert registry.remove_abandoned_uploads() == 1


def test_an_upload_of_another_machine_counts_as_abandoned_after_a_day(registry: Registry) -> None:
    partial = registry.root / "uploads" / f"{'f' * 16}-{TOKEN}.part"
    partial.write_bytes(b"half")
    assert registry.gc().num_partials == 0
    assert registry.check().notes == ()
    grow_old(partial)
    assert len(registry.check().notes) == 1
    assert registry.gc().num_partials == 1


def test_an_upload_whose_lock_died_on_this_machine_is_abandoned_at_once(registry: Registry) -> None:
    (registry.root / "uploads" / f"{kernel_id()}-{TOKEN}.part").write_bytes(b"half")
    assert registry.gc().num_partials == 1


@pytest.mark.parametrize("name", [f"{TOKEN}.part", f"{TOKEN}.{'0' * 64}.part", "notes.part"])
def test_a_file_that_is_no_upload_is_found_by_the_check_and_left_by_gc(name: str, registry: Registry) -> None:
    path = registry.root / "uploads" / name
    path.write_bytes(b"half")
    grow_old(path)
    (finding,) = registry.check().findings
    assert (finding.path, finding.problem) == (path, "not a file of the registry: move it away")
    assert registry.gc().num_partials == registry.remove_abandoned_uploads() == 0
    assert path.exists()


def test_an_object_is_kept_while_another_machine_is_about_to_publish_it(registry: Registry) -> None:
    push(registry, artifact(1), "a")
    registry.delete("default", "a")
    sealed = registry.root / "uploads" / f"{'f' * 16}-{TOKEN}.{digest_of(1)}.part"
    sealed.write_bytes(artifact(1))
    assert registry.gc().objects == ()
    assert registry.object_path(stored(1)).exists()
    grow_old(sealed)
    registry.gc()
    assert registry.gc().objects == ()
    assert not registry.object_path(stored(1)).exists()


def test_a_publication_puts_an_object_back_that_a_collection_removed_before_there_was_a_version(
    tmp_path: Path,
) -> None:
    class Collected(Storage):
        """As if another machine were suspended in a collection that began before the upload."""

        def link(self, source: Path, target: Path) -> None:
            if target.name == "1.json":
                (tmp_path / "objects" / digest_of(1)).unlink()
            super().link(source, target)

    registry = Registry(tmp_path, Collected())
    assert push(registry, artifact(1), "a").created
    assert registry.object_path(stored(1)).read_bytes() == artifact(1)


def test_an_object_that_a_dead_collection_set_aside_is_put_back(registry: Registry) -> None:
    record = push(registry, artifact(1), "a").record
    aside = registry.root / "objects" / f"{record.digest}.{'0' * 16}"
    registry.object_path(record).rename(aside)
    assert registry.check().findings == ()
    assert len(registry.check().notes) == 1
    assert registry.recover(record)
    assert registry.object_path(record).read_bytes() == artifact(1)
    registry.object_path(record).rename(aside)
    assert registry.gc().objects == ()
    assert registry.object_path(record).read_bytes() == artifact(1)
    assert not aside.exists()
    assert not registry.recover(stored(2))


def test_a_registry_of_a_newer_version_is_refused(registry: Registry) -> None:
    path = registry.root / "format.json"
    assert json.loads(path.read_bytes()) == {"format": 3}
    path.write_text('{"format": 4}')
    with pytest.raises(
        RegistryError, match=r"format 4, written by a newer version of Peraxis.*run the newer version"
    ):
        Registry(registry.root)
    path.write_text("{")
    with pytest.raises(RegistryError, match="is damaged"):
        Registry(registry.root)


@pytest.mark.parametrize("stated", ['{"format": 1}', '{"format": 2}', None])
def test_a_registry_of_an_older_version_is_refused_with_the_way_out(
    stated: str | None, registry: Registry
) -> None:
    push(registry, artifact(1), "a")
    path = registry.root / "format.json"
    path.unlink() if stated is None else path.write_text(stated)
    with pytest.raises(RegistryError, match=r"publish the variants again, into a new directory or prefix$"):
        Registry(registry.root)
