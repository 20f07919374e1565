"""Uploads, and the single changes on disk of which every durable change consists."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import pytest

from deltastore.errors import ArtifactTooLarge, RegistryError, RegistryUnavailable, StorageFull, UsageError
from deltastore.registry import Registry
from deltastore.registry.uploads import kernel_id
from tests.conftest import SmallDisk
from tests.deltastore.helpers.crash_storage import FACTS, RefusingStorage, SteppedStorage, artifact, push

CHUNK = 4 << 20


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5])
@pytest.mark.parametrize("piece", [1 << 16, CHUNK, 3 * CHUNK])
def test_digests_do_not_depend_on_the_pieces_that_an_upload_comes_in(
    size: int, piece: int, registry: Registry
) -> None:
    data = artifact(size, size)
    with registry.open_upload(None) as upload:
        for start in range(0, size, piece):
            upload.write(memoryview(data)[start : start + piece])
        assert upload.num_bytes == size
        sealed = upload.seal()
        assert sealed.path.read_bytes() == data
    assert (sealed.size_bytes, sealed.digest) == (size, hashlib.sha256(data).hexdigest())
    chunks = [data[start : start + CHUNK] for start in range(0, size, CHUNK)]
    assert sealed.chunk_sha256 == tuple(hashlib.sha256(chunk).hexdigest() for chunk in chunks)


def test_an_upload_may_have_exactly_the_allowed_size_and_no_byte_more(registry: Registry) -> None:
    with registry.open_upload(10) as upload:
        upload.write(b"0123456789")
        with pytest.raises(ArtifactTooLarge, match="larger than the 10 bytes"):
            upload.write(b"!")
        assert upload.seal().size_bytes == 10


def test_an_upload_that_is_not_published_leaves_nothing(registry: Registry) -> None:
    with registry.open_upload(None) as upload:
        upload.write(b"half")
    with pytest.raises(ConnectionError):
        lose_the_client(registry)
    assert os.listdir(registry.root / "uploads") == []


def lose_the_client(registry: Registry) -> None:
    with registry.open_upload(None) as upload:
        upload.write(b"half")
        raise ConnectionError


def test_abandoned_uploads_are_removed_and_running_ones_are_not(registry: Registry) -> None:
    (registry.root / "uploads" / f"{kernel_id()}-{'0' * 32}.part").write_bytes(
        b"of a process that was killed"
    )
    with registry.open_upload(None) as upload:
        upload.write(b"half")
        assert registry.remove_abandoned_uploads() == 1
        assert len(os.listdir(registry.root / "uploads")) == 1
        upload.seal()


def test_a_published_upload_leaves_no_partial_file(registry: Registry) -> None:
    push(registry, artifact(1), "a")
    assert os.listdir(registry.root / "uploads") == []


def test_a_sealed_upload_takes_no_more_bytes(registry: Registry) -> None:
    with registry.open_upload(None) as upload:
        upload.seal()
        with pytest.raises(UsageError, match="sealed already"):
            upload.write(b"more")


@pytest.mark.parametrize("kind", ["write", "fsync"])
def test_an_upload_that_failed_once_stays_failed(kind: str, tmp_path: Path) -> None:
    Registry(tmp_path)
    storage = RefusingStorage(0, OSError(5, "Input/output error"), (kind,))
    with Registry(tmp_path, storage).open_upload(None) as upload:
        with pytest.raises(RegistryUnavailable, match="Input/output error"):
            upload.seal() if kind == "fsync" else upload.write(b"bytes")
        for again in (upload.seal, lambda: upload.write(b"bytes")):
            with pytest.raises(RegistryError, match="open another one and send the artifact again"):
                again()


def test_a_publication_after_its_upload_was_closed_is_refused(registry: Registry) -> None:
    with registry.open_upload(None) as upload:
        sealed = upload.seal()
    with pytest.raises(RegistryUnavailable, match="No such file"):
        registry.publish(sealed, FACTS, tenant="default", name="a")
    assert registry.variants() == []
    assert registry.check().is_clean


def test_a_full_disk_refuses_an_upload_and_keeps_what_there_was(small_disk: SmallDisk) -> None:
    registry = Registry(small_disk(4 << 20) / "registry")
    push(registry, artifact(1, 3 << 20), "a")
    with pytest.raises(StorageFull, match=f"peraxis registry gc --registry {registry.root}") as caught:
        push(registry, artifact(2, 2 << 20), "a")
    assert "`peraxis registry gc`" in caught.value.public
    assert "/" not in caught.value.public
    assert os.listdir(registry.root / "uploads") == []
    assert [record.version for record in registry.variant("default", "a").versions] == [1]
    assert (registry.check().findings, registry.check().notes) == ((), ())


def test_collection_makes_room_on_a_full_disk(small_disk: SmallDisk) -> None:
    disk = small_disk(4 << 20)
    registry = Registry(disk / "registry")
    push(registry, artifact(1, 3 << 20), "a")
    registry.delete("default", "a")
    with pytest.raises(StorageFull):
        push(registry, artifact(2, 2 << 20), "a")
    fill(disk / "filler")
    assert registry.usage().free_bytes == 0
    assert registry.gc().bytes_freed == 3 << 20
    assert push(registry, artifact(2, 2 << 20), "a").active_version == 2


def test_a_full_disk_still_promotes_deletes_and_quarantines(small_disk: SmallDisk) -> None:
    disk = small_disk(4 << 20)
    registry = Registry(disk / "registry")
    for seed in (1, 2, 3):
        push(registry, artifact(seed, 10_000), "a")
        push(registry, artifact(seed, 10_000), f"b-{seed}")
    fill(disk / "filler")
    assert registry.usage().free_bytes == 0
    registry.activate("default", "a", 1)
    registry.delete("default", "a", 2)
    registry.quarantine(registry.resolve("default", "a"), "a test broke it")
    for name in ("a", "b-1", "b-2", "b-3"):
        registry.delete("default", name)
    free_bytes = registry.usage().free_bytes
    assert free_bytes is not None
    assert free_bytes < 64 << 10
    assert registry.variants() == []
    assert registry.check().findings == ()
    (disk / "filler").unlink()
    registry.gc()
    assert registry.check().notes == ()
    assert (registry.root / "reserve" / "space").stat().st_size == 64 << 10


def test_without_a_reserve_a_full_disk_refuses_a_deletion(small_disk: SmallDisk) -> None:
    disk = small_disk(4 << 20)
    registry = Registry(disk / "registry")
    push(registry, artifact(1), "a")
    # As if another server used it at this moment.
    (registry.root / "reserve" / "space").rename(disk / "filler")
    fill(disk / "filler")
    with pytest.raises(StorageFull):
        registry.delete("default", "a")
    assert registry.resolve("default", "a").version == 1
    assert (registry.check().findings, registry.check().notes) == ((), ())


def test_a_reserve_is_as_large_as_there_is_room_for(small_disk: SmallDisk) -> None:
    disk = small_disk(4 << 20)
    Registry(disk / "registry")
    reserve = disk / "registry" / "reserve" / "space"
    reserve.unlink()
    fill(disk / "filler")
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - (20 << 10))
    Registry(disk / "registry")
    assert reserve.stat().st_size == 16 << 10
    (disk / "filler").unlink()
    Registry(disk / "registry")
    assert reserve.stat().st_size == 64 << 10


def test_replacing_a_file_writes_beside_it_and_renames(tmp_path: Path) -> None:
    path = tmp_path / "state"
    storage = SteppedStorage()
    storage.replace(path, b"old")
    storage.calls.clear()
    storage.replace(path, b"new")
    assert storage.calls == ["create", "write", "fsync", "rename", "unlink", "fsync_dir"]
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"new", ["state"])


def test_directories_are_made_durable_one_by_one_from_the_top(tmp_path: Path) -> None:
    storage = SteppedStorage()
    storage.make_dirs(tmp_path / "a" / "b")
    storage.make_dirs(tmp_path / "a" / "b")
    assert storage.calls == ["make_dir", "fsync_dir"] * 2


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
