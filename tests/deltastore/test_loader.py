"""The loader: bytes in host memory and slot after a load, refusals, and the state after a failed load."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltastore.errors import ArtifactError, CorruptObject, RegistryError, UsageError
from deltastore.loader import Loader, LoadReport
from deltastore.registry.uploads import CHUNK_BYTES, ChunkedDigest
from deltastore.verified_object import ObjectSource

SLOT_BYTES = 3 * CHUNK_BYTES
UNTOUCHED = 0xA5
CPU = torch.device("cpu")


def random_bytes(size_bytes: int, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator).numpy().tobytes()


def store(path: Path, size_bytes: int, data_start: int, device_bytes: int, seed: int = 0) -> ObjectSource:
    content = random_bytes(size_bytes, seed)
    path.write_bytes(content)
    digest = ChunkedDigest()
    digest.update(memoryview(content))
    return ObjectSource(path, digest.digest(), size_bytes, data_start, device_bytes, digest.chunk_digests())


def fresh_slot(device: torch.device = CPU) -> Tensor:
    return torch.full((SLOT_BYTES,), UNTOUCHED, dtype=torch.uint8, device=device)


def load(loader: Loader, source: ObjectSource, slot: Tensor) -> LoadReport:
    """Load through newly allocated host memory."""
    return loader.load(source, fresh_slot(), slot)


def is_untouched(slot: Tensor) -> bool:
    return bool((slot == UNTOUCHED).all())


def device_section(source: ObjectSource) -> bytes:
    return source.path.read_bytes()[source.data_start : source.data_end]


def flip_byte(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.fixture
def loader() -> Iterator[Loader]:
    loader = Loader(CPU, num_threads=3)
    yield loader
    loader.close()


@pytest.fixture
def source(tmp_path: Path) -> ObjectSource:
    """Four chunks: the device needs the first three, the last holds files alone."""
    return store(tmp_path / "object", 3 * CHUNK_BYTES + 999, 4096, 2 * CHUNK_BYTES + 12345)


@pytest.mark.parametrize(
    ("size_bytes", "data_start", "device_bytes"),
    [
        pytest.param(5000, 4096, 904, id="smaller than a chunk"),
        pytest.param(5000, 4096, 100, id="files behind it in the same chunk"),
        pytest.param(2 * CHUNK_BYTES, 4096, 2 * CHUNK_BYTES - 4096, id="an exact number of chunks"),
        pytest.param(2 * CHUNK_BYTES, 4096, CHUNK_BYTES - 4096, id="ends with a chunk"),
        pytest.param(2 * CHUNK_BYTES, 4096, CHUNK_BYTES - 4095, id="ends one byte into a chunk"),
        pytest.param(2 * CHUNK_BYTES + 777, 8192, 2 * CHUNK_BYTES - 7500, id="the last chunk is a part"),
        pytest.param(3 * CHUNK_BYTES, CHUNK_BYTES + 4096, CHUNK_BYTES, id="a header of more than a chunk"),
        pytest.param(5000, 4096, 0, id="nothing for the device"),
        pytest.param(2 * CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES, id="data begins with a chunk"),
    ],
)
def test_a_slot_receives_the_device_section_and_no_other_byte(
    tmp_path: Path, loader: Loader, size_bytes: int, data_start: int, device_bytes: int
) -> None:
    source = store(tmp_path / "object", size_bytes, data_start, device_bytes)
    slot = fresh_slot()
    load(loader, source, slot)
    assert slot[:device_bytes].numpy().tobytes() == device_section(source)
    assert is_untouched(slot[device_bytes:])


def test_the_report_says_what_was_moved(loader: Loader, source: ObjectSource) -> None:
    report = load(loader, source, fresh_slot())
    assert (report.device_bytes, report.source) == (source.device_bytes, "disk")
    assert report.total_s == pytest.approx(report.read_s + report.copy_s)


def test_the_header_comes_with_the_report(tmp_path: Path, loader: Loader) -> None:
    source = store(tmp_path / "object", 3 * CHUNK_BYTES, CHUNK_BYTES + 4096, CHUNK_BYTES)
    assert load(loader, source, fresh_slot()).header == source.path.read_bytes()[: source.data_start]


def test_host_memory_holds_what_a_load_verified_and_can_be_copied_again_without_a_read(
    loader: Loader, source: ObjectSource
) -> None:
    host, want = fresh_slot(), device_section(source)
    loader.load(source, host, fresh_slot())
    source.path.unlink()
    slot = fresh_slot()
    report = loader.copy(host[: source.device_bytes], slot)
    assert slot[: source.device_bytes].numpy().tobytes() == want
    assert is_untouched(slot[source.device_bytes :])
    assert (report.source, report.device_bytes, report.read_s) == ("host", source.device_bytes, 0.0)
    assert report.copy_s == report.total_s > 0


def test_a_chunk_is_copied_while_the_next_one_is_read(
    loader: Loader, source: ObjectSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, slot = os.preadv, fresh_slot()
    first = CHUNK_BYTES - source.data_start
    copied: list[bool] = []

    def wait_for_the_first(fd: int, buffers: list[memoryview], offset: int) -> int:
        deadline = time.monotonic() + 20
        while (
            offset == CHUNK_BYTES and is_untouched(slot[first - 64 : first]) and time.monotonic() < deadline
        ):
            time.sleep(0.005)
        copied.append(not is_untouched(slot[first - 64 : first]))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", wait_for_the_first)
    load(loader, source, slot)
    assert any(copied)
    assert slot[: source.device_bytes].numpy().tobytes() == device_section(source)


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_corrupt_chunk_is_named_and_never_reaches_the_slot(
    loader: Loader, source: ObjectSource, chunk: int
) -> None:
    flip_byte(source.path, chunk * CHUNK_BYTES + 100)
    slot = fresh_slot()
    with pytest.raises(CorruptObject, match=f"{source.digest}.*chunk {chunk} "):
        load(loader, source, slot)
    assert is_untouched(slot[source.device_range(chunk)])


def test_chunks_that_the_device_does_not_need_are_not_read(loader: Loader, source: ObjectSource) -> None:
    flip_byte(source.path, 3 * CHUNK_BYTES + 10)
    slot = fresh_slot()
    load(loader, source, slot)
    assert slot[: source.device_bytes].numpy().tobytes() == device_section(source)


def test_after_a_failed_load_the_same_memory_takes_the_repaired_object(
    loader: Loader, source: ObjectSource
) -> None:
    host, slot = fresh_slot(), fresh_slot()
    flip_byte(source.path, 0)
    with pytest.raises(CorruptObject):
        loader.load(source, host, slot)
    flip_byte(source.path, 0)
    loader.load(source, host, slot)
    assert slot[: source.device_bytes].numpy().tobytes() == device_section(source)


@pytest.mark.parametrize("size_bytes", [0, 4000, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES + 998])
def test_a_file_truncated_between_two_loads_is_refused(
    loader: Loader, source: ObjectSource, size_bytes: int
) -> None:
    load(loader, source, fresh_slot())
    os.truncate(source.path, size_bytes)
    slot = fresh_slot()
    with pytest.raises(
        ArtifactError, match=f"has {size_bytes} bytes where its record says {source.size_bytes}"
    ):
        load(loader, source, slot)
    assert is_untouched(slot)


def test_a_file_truncated_while_it_is_read_is_refused(
    loader: Loader, source: ObjectSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def truncate_then_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(source.path, CHUNK_BYTES + 7)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", truncate_then_read)
    slot = fresh_slot()
    with pytest.raises(CorruptObject, match="truncated: chunk 1 ends at byte 4194311"):
        load(loader, source, slot)


def test_a_file_that_grew_is_refused(loader: Loader, source: ObjectSource) -> None:
    with source.path.open("ab") as file:
        file.write(b"!")
    with pytest.raises(CorruptObject, match="where its record says"):
        load(loader, source, fresh_slot())


@pytest.mark.parametrize("limit", [1000, 4096, CHUNK_BYTES - 1])
def test_short_reads_are_continued(
    tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    source = store(tmp_path / "object", CHUNK_BYTES + 50_000, 4096, CHUNK_BYTES + 10_000)
    real = os.preadv

    def read_little(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(fd, [buffers[0][:limit]], offset)

    monkeypatch.setattr(os, "preadv", read_little)
    slot = fresh_slot()
    load(loader, source, slot)
    assert slot[: source.device_bytes].numpy().tobytes() == device_section(source)


def test_a_missing_file_is_no_corrupt_object(loader: Loader, source: ObjectSource) -> None:
    source.path.unlink()
    with pytest.raises(RegistryError, match=f"{source.digest} cannot be read: No such file"):
        load(loader, source, fresh_slot())


def test_a_disk_that_fails_is_no_corrupt_object(
    loader: Loader, source: ObjectSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    slot = fresh_slot()
    with pytest.raises(RegistryError, match="Input/output error"):
        load(loader, source, slot)
    assert is_untouched(slot)


def test_a_failed_load_waits_for_its_readers_before_its_memory_is_used_again(
    loader: Loader, source: ObjectSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    begun, failed, finished = threading.Event(), threading.Event(), threading.Event()

    def fail_first_and_delay_second(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0:
            # Another read runs, which is not cancelled any more.
            assert begun.wait(240)
            failed.set()
            raise OSError(5, "Input/output error")
        begun.set()
        failed.wait()
        finished.wait(0.2)  # the load must not return meanwhile
        count = real(fd, buffers, offset)
        finished.set()
        return count

    monkeypatch.setattr(os, "preadv", fail_first_and_delay_second)
    with pytest.raises(RegistryError):
        load(loader, source, fresh_slot())
    assert finished.is_set()


def test_many_threads_load_many_objects_each_into_its_own_slot(tmp_path: Path) -> None:
    sources = [
        store(tmp_path / f"{i}", CHUNK_BYTES + 5000 * i, 4096, CHUNK_BYTES + 4000 * i - 4096, seed=i)
        for i in range(6)
    ]
    loader = Loader(CPU, num_threads=4)
    slots = [fresh_slot() for _ in sources]
    with ThreadPoolExecutor(len(sources)) as threads:
        for _ in range(3):
            list(threads.map(loader.load, sources, [fresh_slot() for _ in sources], slots))
    loader.close()
    assert all(
        slot[: source.device_bytes].numpy().tobytes() == device_section(source)
        for slot, source in zip(slots, sources, strict=True)
    )


def test_a_corrupt_object_does_not_disturb_another_that_loads_beside_it(tmp_path: Path) -> None:
    good = store(tmp_path / "good", 2 * CHUNK_BYTES, 4096, CHUNK_BYTES, seed=1)
    bad = replace(good, chunk_sha256=("0" * 64, "0" * 64))
    loader = Loader(CPU, num_threads=2)
    slots = [fresh_slot() for _ in range(8)]
    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(load, loader, bad if i % 2 else good, slot) for i, slot in enumerate(slots)]
    loader.close()
    assert [type(load.exception()) for load in loads] == [type(None), CorruptObject] * 4
    assert all(slot[: good.device_bytes].numpy().tobytes() == device_section(good) for slot in slots[::2])


def test_a_closed_loader_refuses_and_may_be_closed_again(loader: Loader, source: ObjectSource) -> None:
    loader.close()
    loader.close()
    for _ in range(2):
        with pytest.raises(UsageError, match="closed"):
            load(loader, source, fresh_slot())


def test_closing_waits_for_the_load_that_runs(
    source: ObjectSource, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    reading, go_on = threading.Event(), threading.Event()

    def hold(fd: int, buffers: list[memoryview], offset: int) -> int:
        reading.set()
        go_on.wait()
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", hold)
    slot = fresh_slot()
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(load, loader, source, slot)
        reading.wait()
        closing = threads.submit(loader.close)
        assert not closing.done()
        go_on.set()
    assert running.exception() is None
    assert slot[: source.device_bytes].numpy().tobytes() == device_section(source)


def test_closing_refuses_no_load_whose_first_chunk_is_read(
    source: ObjectSource, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(source.chunk_sha256) > 1
    submit = loader._readers.submit
    begun, go_on = threading.Event(), threading.Event()

    def hold(*args: Any) -> Any:
        future = submit(*args)
        begun.set()
        go_on.wait()
        return future

    monkeypatch.setattr(loader._readers, "submit", hold)
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(load, loader, source, fresh_slot())
        begun.wait()
        closing = threads.submit(loader.close)
        is_closed = bool(wait([closing], 0.1).done)
        go_on.set()
    assert not is_closed
    assert running.exception() is None


@pytest.mark.parametrize(
    "change",
    [
        {"device_bytes": 1 << 40},
        {"device_bytes": -1},
        {"data_start": -4096},
        {"chunk_sha256": ()},
        {"size_bytes": 1},
    ],
)
def test_a_record_that_contradicts_itself_is_refused(source: ObjectSource, change: dict[str, object]) -> None:
    with pytest.raises(RegistryError, match="contradicts itself"):
        replace(source, **change)  # type: ignore[arg-type]


def test_a_loader_without_threads_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        Loader(CPU, num_threads=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_a_loaded_slot_can_be_read_from_any_stream(source: ObjectSource) -> None:
    device = torch.device("cuda")
    loader = Loader(device, num_threads=4)
    slots, host = [fresh_slot(device) for _ in range(2)], fresh_slot().pin_memory()
    loader.load(source, host, slots[0])
    loader.copy(host[: source.device_bytes], slots[1])
    loader.close()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert all(s[: source.device_bytes].cpu().numpy().tobytes() == device_section(source) for s in slots)
