"""Time the load of a delta of 1 GB from a local S3 server into a slot, beside its load from a disk.

Three loads end with every byte verified in a slot that was never touched: from a file that is on the disk; from the
bucket, where the object is fetched into an empty local cache first; and from the bucket once more, when the cache holds
it. The server is moto's in a process of its own on the same machine, so each result from the bucket is given beside the
rate at which that server sends the object to a client that drops it. No model runs and no request is made.
"""

from __future__ import annotations

import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import obstore
import torch
from obstore.store import S3Store

from bench.harness import DEVICE, THREADS, Bench, Report, fixed, mb, ms, option, table_of, text
from bench.synthetic import LlamaShapes, write_delta
from deltastore.loader import Loader
from deltastore.registry.bucket.objects import NUM_THREADS, RANGE_BYTES, fetch_object
from deltastore.registry.object_cache import ObjectCache
from deltastore.verified_object import ObjectSource
from peraxis.demo.page_cache import drop
from tests.helpers.s3_server import running_s3_server

# Of a Llama with 8 billion weights.
FULL = LlamaShapes(num_layers=32, hidden=4096, intermediate=14336, kv=1024, vocabulary=128256, head_dim=128)
SMALL = LlamaShapes(num_layers=2, hidden=512, intermediate=1408, kv=128, vocabulary=8000)
KEY = "objects/delta"
RAW, DISK, DISK_DROPPED = (
    "bucket, dropped by the client",
    "disk, in the page cache",
    "disk, page cache dropped",
)
FIRST, SECOND, SECOND_DROPPED = (
    "bucket, first time",
    "bucket, second time",
    "bucket, second time, page cache dropped",
)
COLUMNS = {
    "load": text("load"),
    "MB": mb("bytes"),
    "ms": ms("seconds"),
    "MB/s": mb("bytes_per_second", 0),
    "to disk, dropped": fixed("ratio_to_disk", 2),
    "to the server alone": fixed("ratio_to_server", 2),
}


@dataclass(frozen=True, slots=True)
class StoredDelta:
    """A delta as a file and in a bucket, and the loader of both."""

    directory: Path
    source: ObjectSource
    store: S3Store
    loader: Loader
    device: torch.device


def measure(delta: StoredDelta, repeats: int) -> list[dict[str, Any]]:
    """Run each case in turns, `repeats` times after one time that does not count; return the medians."""
    cases: dict[str, Callable[[], float]] = {
        RAW: partial(_receive, delta),
        DISK: partial(_from_disk, delta, is_dropped=False),
        DISK_DROPPED: partial(_from_disk, delta, is_dropped=True),
        FIRST: partial(_from_bucket, delta, is_new=True, is_dropped=False),
        SECOND: partial(_from_bucket, delta, is_new=False, is_dropped=False),
        SECOND_DROPPED: partial(_from_bucket, delta, is_new=False, is_dropped=True),
    }
    runs: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, run in cases.items():
            seconds = run()
            if turn:
                runs[name].append(seconds)
    medians = {name: median(times) for name, times in runs.items()}
    size = delta.source.size_bytes
    return [
        {
            "load": name,
            "bytes": size,
            "seconds": round(seconds, 6),
            "bytes_per_second": round(size / seconds),
            "ratio_to_disk": round(seconds / medians[DISK_DROPPED], 3),
            "ratio_to_server": round(seconds / medians[RAW], 3),
        }
        for name, seconds in medians.items()
    ]


def _receive(delta: StoredDelta) -> float:
    """Receive the object by ranges as a fetch does, and drop its bytes."""
    size = delta.source.size_bytes
    start = time.perf_counter()

    def receive(position: int) -> int:
        end = min(position + RANGE_BYTES, size)
        return len(obstore.get_range(delta.store, KEY, start=position, end=end))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        received = sum(threads.map(receive, range(0, size, RANGE_BYTES)))
    if received != size:
        raise RuntimeError(f"the server sent {received} bytes of an object of {size}")
    return time.perf_counter() - start


def _from_disk(delta: StoredDelta, *, is_dropped: bool) -> float:
    if is_dropped:
        drop([delta.source.path])
    return _load(delta, lambda: delta.source.path)


def _from_bucket(delta: StoredDelta, *, is_new: bool, is_dropped: bool) -> float:
    directory = delta.directory / "cache"
    if is_new:
        shutil.rmtree(directory, ignore_errors=True)
    cache = ObjectCache(directory, delta.source.size_bytes)
    fetch = partial(fetch_object, delta.store, KEY, delta.source.size_bytes)
    path = partial(cache.path, delta.source.digest, delta.source.size_bytes, fetch)
    if is_dropped:
        drop([path()])
    return _load(delta, path)


def _load(delta: StoredDelta, path: Callable[[], Path]) -> float:
    """Load the delta into new memory from the file that `path` returns; both are timed."""
    size = delta.source.device_bytes
    host = torch.empty(size, dtype=torch.uint8, pin_memory=delta.device.type == "cuda")
    slot = torch.empty(size, dtype=torch.uint8, device=delta.device)
    start = time.perf_counter()
    delta.loader.load(replace(delta.source, path=path()), host, slot)
    return time.perf_counter() - start


def report(args: Namespace) -> Report:
    device, directory = torch.device(args.device), args.directory
    with running_s3_server() as server:
        source = write_delta(directory / "delta.safetensors", SMALL if args.small else FULL)
        store = server.make_bucket().store()
        obstore.put(store, KEY, source.path)
        loader = Loader(device, args.threads)
        try:
            results = measure(StoredDelta(directory, source, store, loader, device), args.repeats)
        finally:
            loader.close()
    settings = {
        "repeats": args.repeats,
        "threads": args.threads,
        "statistic": "median",
        "ranges_at_once": NUM_THREADS,
        "range_bytes": RANGE_BYTES,
        "server": f"moto {version('moto')} in a process of this machine",
        "client": f"obstore {version('obstore')}",
    }
    conditions = f"median of {args.repeats}, {args.threads} threads"
    return Report(settings, results, [table_of(COLUMNS, results)], conditions=conditions, device=device)


OPTIONS = [option("--repeats", 3), THREADS, DEVICE]
main = Bench(
    "objectstore",
    __doc__,
    report,
    OPTIONS,
    small="a delta of some megabytes",
    folder="for the files: a disk, not memory",
)

if __name__ == "__main__":
    sys.exit(main())
