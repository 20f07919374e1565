"""Local copies of objects: one fetch at a time, bounded by bytes, whole after any process's death."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from deltastore.errors import RegistryError, StorageFull
from deltastore.registry import object_cache
from deltastore.registry.object_cache import ObjectCache
from tests.conftest import SmallDisk
from tests.deltastore.helpers.fetching_process import content, fetch_of, half_fetched

SIZE = 100_000
A, B, C, D = (hashlib.sha256(name.encode()).hexdigest() for name in "abcd")


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    """A cache of three objects."""
    return ObjectCache(tmp_path / "cache", 3 * SIZE)


def put(cache: ObjectCache, digest: str, size: int = SIZE) -> Path:
    return cache.path(digest, size, fetch_of(digest, size))


def not_fetched(fd: int) -> None:
    raise AssertionError("fetched")


def used_bytes(cache: ObjectCache) -> int:
    # Under the lock that renames and evictions take, so that no file is missed, or counted twice.
    with cache._space():
        return sum(path.stat().st_size for path in cache.directory.rglob("*") if path.is_file())


def test_an_object_is_fetched_once(cache: ObjectCache) -> None:
    assert not cache.holds(A)
    assert put(cache, A).read_bytes() == content(A, SIZE)
    assert cache.holds(A)
    assert cache.path(A, SIZE, not_fetched).read_bytes() == content(A, SIZE)


def test_another_process_finds_the_copy(cache: ObjectCache) -> None:
    with half_fetched(cache, A, SIZE) as process:
        process.communicate("go on\n")
    assert process.returncode == 0
    assert cache.path(A, SIZE, not_fetched).read_bytes() == content(A, SIZE)


def test_a_failed_fetch_leaves_nothing_and_is_repeated(cache: ObjectCache) -> None:
    def fail(fd: int) -> None:
        os.pwrite(fd, b"some", 0)
        raise FileNotFoundError(errno.ENOENT, "no such object")

    with pytest.raises(FileNotFoundError, match="no such object"):
        cache.path(A, SIZE, fail)
    assert used_bytes(cache) == 0
    assert put(cache, A).read_bytes() == content(A, SIZE)


def test_a_process_waits_for_the_fetch_of_another(cache: ObjectCache) -> None:
    with half_fetched(cache, A, SIZE) as process, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(cache.path, A, SIZE, not_fetched)
        # An object that no other process fetches waits for none.
        put(cache, B)
        assert not waiting.done()
        process.communicate("go on\n")
        assert waiting.result().read_bytes() == content(A, SIZE)


def test_the_fetch_of_a_killed_process_is_begun_anew_by_one_that_waits(cache: ObjectCache) -> None:
    with half_fetched(cache, A, SIZE) as process, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(put, cache, A)
        process.kill()
        assert waiting.result().read_bytes() == content(A, SIZE)


def test_a_killed_process_leaves_no_copy_and_gives_its_space_back(cache: ObjectCache) -> None:
    with half_fetched(cache, A, 3 * SIZE) as process:
        process.kill()
        process.wait()
    assert not cache.holds(A)
    for digest in (B, C, D):
        put(cache, digest)
    assert used_bytes(cache) == 3 * SIZE


def test_an_opened_cache_drops_what_dead_processes_left(cache: ObjectCache) -> None:
    with half_fetched(cache, A, SIZE) as process:
        process.kill()
        process.wait()
    assert used_bytes(ObjectCache(cache.directory, cache.max_bytes)) == 0


def test_the_least_recently_used_copy_is_evicted_first(cache: ObjectCache) -> None:
    for digest in (A, B, C):
        put(cache, digest)
    cache.path(A, SIZE, not_fetched)
    put(cache, D)
    assert [cache.holds(digest) for digest in (A, B, C, D)] == [True, False, True, True]


def test_a_copy_that_is_evicted_while_it_is_read_keeps_its_bytes(cache: ObjectCache) -> None:
    with put(cache, A).open("rb") as file:
        first = file.read(SIZE // 2)
        for digest in (B, C, D):
            put(cache, digest)
        assert not cache.holds(A)
        assert first + file.read() == content(A, SIZE)


def test_many_threads_stay_within_the_bound(cache: ObjectCache) -> None:
    digests = [hashlib.sha256(bytes([number])).hexdigest() for number in range(24)]
    most = 0

    def fetch_and_look(digest: str) -> bytes:
        def fetch(fd: int) -> None:
            nonlocal most
            most = max(most, used_bytes(cache))
            fetch_of(digest, SIZE)(fd)

        cache.path(digest, SIZE, fetch)
        return digest.encode()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(fetch_and_look, digests * 2))
    assert 0 < most <= cache.max_bytes
    assert used_bytes(cache) == cache.max_bytes


def test_an_object_waits_for_space_that_others_fetch_into(cache: ObjectCache) -> None:
    began, go_on = Event(), Event()

    def fetch(fd: int) -> None:
        began.set()
        go_on.wait()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.path, A, 2 * SIZE, fetch)
        began.wait()
        second = threads.submit(put, cache, B, 2 * SIZE)
        # It fits beside the first.
        put(cache, C)
        assert not second.done()
        go_on.set()
        first.result()
        assert second.result().read_bytes() == content(B, 2 * SIZE)
    assert not cache.holds(A)


def test_an_object_that_finds_no_space_in_time_is_refused(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "WAIT_S", 0.0)
    refused = pytest.raises(StorageFull, match="being fetched take all space")
    with half_fetched(cache, A, 2 * SIZE), refused:
        put(cache, B, 2 * SIZE)


def test_an_object_larger_than_the_cache_is_refused(cache: ObjectCache) -> None:
    put(cache, A)
    with pytest.raises(StorageFull, match="raise --registry-cache-gb"):
        put(cache, B, 3 * SIZE + 1)
    assert cache.holds(A)


def test_a_full_disk_takes_the_space_of_older_copies(small_disk: SmallDisk) -> None:
    disk = small_disk(4 << 20)
    cache = ObjectCache(disk / "cache", 1 << 30)
    for digest in (A, B):
        put(cache, digest, 1 << 20)
    assert put(cache, C, 3 << 20).stat().st_size == 3 << 20
    assert cache.holds(C)
    assert not cache.holds(A)


def test_a_disk_that_others_fill_is_an_error_with_a_way_out(small_disk: SmallDisk) -> None:
    disk = small_disk(2 << 20)
    cache = ObjectCache(disk / "cache", 1 << 30)
    (disk / "other").write_bytes(bytes(1 << 20))
    with pytest.raises(StorageFull, match=f"the disk of the cache {cache.directory} is full"):
        put(cache, A, 3 << 19)
    (disk / "other").unlink()
    assert put(cache, A, 3 << 19).read_bytes() == content(A, 3 << 19)


def test_an_object_that_no_eviction_makes_room_for_evicts_nothing(small_disk: SmallDisk) -> None:
    disk = small_disk(4 << 20)
    cache = ObjectCache(disk / "cache", 1 << 30)
    put(cache, A, 1 << 20)
    (disk / "other").write_bytes(bytes(2 << 20))
    with pytest.raises(StorageFull, match="is full"):
        put(cache, B, 3 << 20)
    assert cache.path(A, 1 << 20, not_fetched).read_bytes() == content(A, 1 << 20)


def test_copies_on_a_disk_that_became_read_only_are_found(small_disk: SmallDisk) -> None:
    disk = small_disk(1 << 20)
    cache = ObjectCache(disk / "cache", 1 << 30)
    put(cache, A)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert cache.path(A, SIZE, not_fetched).read_bytes() == content(A, SIZE)
    with pytest.raises(RegistryError, match="Read-only file system"):
        put(cache, B)


def test_a_directory_that_was_removed_is_made_again(cache: ObjectCache) -> None:
    put(cache, A)
    shutil.rmtree(cache.directory)
    assert put(cache, A).read_bytes() == content(A, SIZE)


def test_an_upload_becomes_the_copy_of_its_object(cache: ObjectCache) -> None:
    for digest in (B, C, D):
        put(cache, digest)
    file = cache.directory / "upload"
    file.write_bytes(content(A, SIZE))
    cache.adopt(A, file)
    assert not file.exists()
    assert cache.path(A, SIZE, not_fetched).read_bytes() == content(A, SIZE)
    assert not cache.holds(B)


def test_an_upload_larger_than_the_cache_is_left(cache: ObjectCache) -> None:
    put(cache, A)
    file = cache.directory / "upload"
    file.write_bytes(bytes(4 * SIZE))
    cache.adopt(B, file)
    assert file.exists()
    assert cache.holds(A)


def test_a_discarded_copy_is_fetched_again_and_a_newer_one_is_kept(cache: ObjectCache) -> None:
    old = put(cache, A).stat()
    cache.discard(A, old)
    assert not cache.holds(A)
    with put(cache, A).open("rb") as file:
        newer = os.fstat(file.fileno())
        cache.discard(A)
        put(cache, A)
        cache.discard(A, newer)
        assert cache.holds(A)


def test_a_cache_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RegistryError, match="give --registry-cache a directory"):
        ObjectCache(tmp_path / "file", SIZE)
