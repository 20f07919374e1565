"""Publications into a bucket while the machine's cache is full, damaged or removed at any of their calls."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest

from deltastore.errors import PeraxisError, VariantNotFound
from deltastore.registry import Publication, Registry
from deltastore.registry.object_cache import ObjectCache
from tests.deltastore.helpers.buckets import CACHE_BYTES
from tests.deltastore.helpers.crash_storage import artifact, push
from tests.helpers.s3_server import Bucket

CALLS = ("put", "get", "head", "list", "list_with_delimiter", "delete")
SIZE = 3000


def machine(bucket: Bucket, directory: Path, cache_bytes: int = CACHE_BYTES) -> Registry:
    return Registry.open(bucket.url, ObjectCache(directory, cache_bytes))


def fill(cache: Path) -> None:
    """Take all space of the cache with a fetch that another process seems to be in."""
    with (cache / "fetches" / ("0" * 64)).open("wb") as fetched:
        fetched.truncate(CACHE_BYTES)


def damage(cache: Path) -> None:
    for copy in (cache / "objects").iterdir():
        copy.write_bytes(bytes(copy.stat().st_size))


def replace_by_a_file(cache: Path) -> None:
    shutil.rmtree(cache / "objects")
    (cache / "objects").write_text("")


FAULTS: tuple[Callable[[Path], None], ...] = (fill, damage, shutil.rmtree, replace_by_a_file)


class Calls:
    """Counts the calls to the bucket, and lets a fault happen before one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_made = 0
        self.fault_at: int | None = None
        self.fault: Callable[[], None] = lambda: None
        for name in CALLS:
            monkeypatch.setattr(obstore, name, self._counted(getattr(obstore, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.num_made += 1
            if self.num_made == self.fault_at:
                self.fault()
            return call(*args, **options)

        return counted


@pytest.fixture
def calls(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patches:
        yield Calls(patches)


def attempt(registry: Registry, data: bytes) -> Publication | None:
    """Publish; return None if it is not acknowledged."""
    try:
        return push(registry, data, "a")
    except PeraxisError:
        return None


def bytes_of(registry: Registry) -> bytes | None:
    """Return the bytes of the active version; None if there is none."""
    try:
        return registry.object_path(registry.resolve("default", "a")).read_bytes()
    except VariantNotFound:
        return None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_publication_is_there_if_it_was_acknowledged_and_otherwise_whole_or_not_at_all(
    bucket: Bucket, calls: Calls, tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    push(machine(bucket, tmp_path / "counted"), artifact(0), "a")
    before = calls.num_made
    push(machine(bucket, tmp_path / "counted"), artifact(1), "a")
    num_calls = calls.num_made - before
    assert num_calls > 2
    there, newest = machine(bucket, tmp_path / "there"), artifact(1)
    for step in range(1, num_calls + 1):
        cache = tmp_path / f"cache-{step}"
        here, data = machine(bucket, cache), artifact(1 + step)
        # A copy that may be damaged.
        assert bytes_of(here) == newest
        calls.fault_at, calls.fault = calls.num_made + step, lambda cache=cache: fault(cache)  # type: ignore[misc]
        publication = attempt(here, data)
        calls.fault_at = None
        found = bytes_of(there)
        assert found == data if publication is not None else found in (data, newest)
        # The same call again, by a machine with a cache in order.
        again = push(machine(bucket, tmp_path / "again"), data, "a")
        assert again.created is (found != data)
        assert bytes_of(there) == data
        newest = data
    there.gc()
    assert there.check().is_clean


def test_a_copy_that_was_damaged_or_removed_after_the_acknowledgement_is_fetched_again(
    bucket: Bucket, calls: Calls, tmp_path: Path
) -> None:
    registry = machine(bucket, tmp_path)
    record = push(registry, artifact(1), "a").record
    damage(tmp_path)
    copy = registry.object_path(record)
    assert copy.read_bytes() != artifact(1)
    # The reader's report: the bucket has the right bytes.
    assert not registry.quarantine(record, "a test broke it", copy.stat())
    assert bytes_of(registry) == artifact(1)
    shutil.rmtree(tmp_path)
    assert bytes_of(registry) == artifact(1)


def test_an_artifact_larger_than_the_cache_of_its_publisher_is_there_for_others(
    bucket: Bucket, calls: Calls, tmp_path: Path
) -> None:
    small = machine(bucket, tmp_path / "small", cache_bytes=SIZE - 1)
    assert push(small, artifact(1, SIZE), "a").created
    with pytest.raises(PeraxisError, match="raise --registry-cache-gb"):
        bytes_of(small)
    assert bytes_of(machine(bucket, tmp_path / "large")) == artifact(1, SIZE)
