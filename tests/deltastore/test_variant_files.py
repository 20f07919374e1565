"""Files of a variant are read from verified chunks only; damage quarantines the object."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deltastore.errors import RegistryError, VariantNotFound, VariantQuarantined
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.registry.uploads import CHUNK_BYTES
from deltastore.verified_object import read_files
from tests.deltastore.helpers.stored import (
    EMBEDDING,
    ROWS,
    WIDTH,
    flip_byte,
    publish_file,
    write_stored,
)

REPOSITORY = Path(__file__).resolve().parents[2]
CHANCE = random.Random(0)
FILES = {
    "tokenizer.json": CHANCE.randbytes(CHUNK_BYTES + 12345),  # in two chunks
    "chat_template.jinja": b"",
    "tokenizer_config.json": CHANCE.randbytes(100),
    "generation_config.json": CHANCE.randbytes(77),
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "a.safetensors"
    write_stored(path, FILES)
    return path


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


@pytest.fixture
def record(registry: Registry, artifact: Path) -> VersionRecord:
    return publish_file(registry, artifact)


def test_files_and_shapes_are_those_of_the_artifact(registry: Registry, record: VersionRecord) -> None:
    found = read_files(registry, record)
    assert found.files == FILES
    assert found.shapes == {EMBEDDING: (ROWS, WIDTH)}


def test_an_artifact_without_files_has_none(registry: Registry, tmp_path: Path) -> None:
    write_stored(tmp_path / "bare", {})
    assert read_files(registry, publish_file(registry, tmp_path / "bare")).files == {}


def test_every_needed_chunk_is_read_once(
    registry: Registry, record: VersionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, offsets = os.preadv, []

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        if count:
            offsets.append(offset)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    read_files(registry, record)
    assert offsets == [0, CHUNK_BYTES]


REGIONS: dict[str, Callable[[VersionRecord], int]] = {
    "header length": lambda record: 0,
    "header": lambda record: 100,
    "padding of the header": lambda record: record.data_start - 1,
    "device section": lambda record: record.data_start + 1000,
    "a file": lambda record: record.data_start + record.device_bytes + 5,
    "the last byte": lambda record: record.size_bytes - 1,
}


@pytest.mark.parametrize("region", REGIONS)
def test_a_changed_byte_quarantines_wherever_it_is(
    region: str, registry: Registry, record: VersionRecord
) -> None:
    flip_byte(registry.object_path(record), REGIONS[region](record))
    with pytest.raises(VariantQuarantined, match="default/a@1: its stored object is corrupt"):
        read_files(registry, record)
    with pytest.raises(VariantQuarantined, match="does not match its SHA-256"):
        registry.resolve("default", "a")
    with pytest.raises(VariantQuarantined, match="does not match its SHA-256"):
        read_files(registry, record)


@pytest.mark.parametrize("size", [0, 8, 5000, CHUNK_BYTES, -1, 1])
def test_an_object_of_another_length_is_quarantined(
    size: int, registry: Registry, record: VersionRecord
) -> None:
    size_bytes = size if size > 1 or size == 0 else record.size_bytes + size
    os.truncate(registry.object_path(record), size_bytes)
    with pytest.raises(VariantQuarantined):
        read_files(registry, record)
    with pytest.raises(VariantQuarantined, match=f"has {size_bytes} bytes where its record says"):
        registry.resolve("default", "a")


def test_a_missing_object_is_not_found_and_not_quarantined(registry: Registry, record: VersionRecord) -> None:
    registry.object_path(record).unlink()
    with pytest.raises(VariantNotFound, match="default/a@1: its object is no longer in the registry"):
        read_files(registry, record)
    assert not registry.is_quarantined(record)


def test_an_object_that_is_put_back_after_a_quarantine_is_read_if_its_bytes_are_right(
    registry: Registry, record: VersionRecord, artifact: Path
) -> None:
    path = registry.object_path(record)
    registry.quarantine(record, "a test says so")
    shutil.copy(artifact, path)
    assert read_files(registry, record).files
    registry.quarantine(record, "a test says so")
    shutil.copy(artifact, path)
    flip_byte(path, record.size_bytes - 1)
    with pytest.raises(VariantQuarantined, match="is corrupt and was quarantined"):
        read_files(registry, record)
    assert registry.is_quarantined(record)


def test_a_file_that_another_machine_replaced_while_it_was_read_is_opened_again(
    registry: Registry, record: VersionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, stale = os.preadv, [1, 1]

    def stale_first(fd: int, buffers: list[memoryview], offset: int) -> int:
        if stale:
            stale.pop()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", stale_first)
    assert read_files(registry, record).files
    stale += [1] * 100
    with pytest.raises(RegistryError, match="cannot be read"):
        read_files(registry, record)


def test_an_object_that_is_healed_while_it_is_read_is_served_and_not_quarantined(
    registry: Registry, record: VersionRecord, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_byte(registry.object_path(record), record.size_bytes - 1)
    real = os.preadv

    def heal_first(fd: int, buffers: list[memoryview], offset: int) -> int:
        monkeypatch.setattr(os, "preadv", real)
        publish_file(registry, artifact, "b")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", heal_first)
    assert read_files(registry, record).files == FILES
    assert registry.resolve("default", "a") == record


def test_an_object_that_is_removed_while_its_corruption_is_found_is_not_found(
    registry: Registry, record: VersionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = registry.object_path(record)
    flip_byte(path, 0)
    real = os.preadv

    def remove_first(fd: int, buffers: list[memoryview], offset: int) -> int:
        path.unlink(missing_ok=True)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", remove_first)
    with pytest.raises(VariantNotFound):
        read_files(registry, record)


def test_no_file_is_left_open(registry: Registry, record: VersionRecord) -> None:
    before = len(os.listdir("/proc/self/fd"))
    read_files(registry, record)
    flip_byte(registry.object_path(record), 0)
    with pytest.raises(VariantQuarantined):
        read_files(registry, record)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_that_fails_to_read_is_a_registry_error(
    registry: Registry, record: VersionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(RegistryError, match="cannot be read: Input/output error: check the registry's disk"):
        read_files(registry, record)
    assert not registry.is_quarantined(record)


def test_a_record_that_contradicts_itself_is_refused(registry: Registry, record: VersionRecord) -> None:
    with pytest.raises(RegistryError, match=r"default/a@1: the version record of .* contradicts itself"):
        read_files(registry, replace(record, chunk_sha256=record.chunk_sha256[:1]))


def test_reading_files_imports_no_torch(registry: Registry, record: VersionRecord) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from deltastore.registry import Registry\n"
        "from deltastore.verified_object import read_files\n"
        "registry = Registry(Path(sys.argv[1]))\n"
        "print(sorted(read_files(registry, registry.resolve('default', 'a')).files))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(registry.root)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(sorted(FILES))
