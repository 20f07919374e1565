"""Fetches an object of a bucket into a file by ranges, several at a time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import obstore
from obstore.store import S3Store

from deltastore.errors import CorruptObject

RANGE_BYTES = 8 << 20
# Ranges of one object at once. One connection to S3 gives 50 to 100 MB/s.
NUM_THREADS = 8


def fetch_object(store: S3Store, key: str, size_bytes: int, fd: int) -> None:
    """Write an object to an open file from the file's beginning.

    Args:
        store: The store of the bucket.
        key: The object's key below the store's prefix.
        size_bytes: The size that its record gives.
        fd: The file.

    Raises:
        CorruptObject: The object has another size.
        FileNotFoundError: There is no such object.
        obstore.exceptions.BaseError: The store failed.
        OSError: The file cannot be written.
    """

    def fetch(start: int) -> None:
        end = min(start + RANGE_BYTES, size_bytes)
        found = obstore.get(store, key, options={"range": (start, end)})
        if found.meta["size"] != size_bytes:
            raise CorruptObject(
                f"{key} has {found.meta['size']} bytes where its record says {size_bytes}: upload it again"
            )
        _write(fd, memoryview(found.bytes()), start)

    threads = ThreadPoolExecutor(NUM_THREADS, "object-fetch")
    try:
        for running in [threads.submit(fetch, start) for start in range(0, size_bytes, RANGE_BYTES)]:
            running.result()
    finally:
        # No thread may write to the file when the caller has it back.
        threads.shutdown(wait=True, cancel_futures=True)


def _write(fd: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(fd, data, position)
        data, position = data[count:], position + count
