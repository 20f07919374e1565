"""A process that fetches an object into a cache and stops in the middle, and the object's bytes.

A program, `python -m tests.deltastore.helpers.fetching_process DIRECTORY MAX_BYTES DIGEST SIZE`. It prints a line when
half of the object is written, and goes on when it reads one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltastore.registry.object_cache import Fetch, ObjectCache


def content(digest: str, size_bytes: int) -> bytes:
    """Return bytes that no other digest has."""
    return (digest.encode() * (size_bytes // len(digest) + 1))[:size_bytes]


def fetch_of(digest: str, size_bytes: int) -> Fetch:
    def fetch(fd: int) -> None:
        assert os.fstat(fd).st_size == size_bytes
        os.pwrite(fd, content(digest, size_bytes), 0)

    return fetch


@contextmanager
def half_fetched(cache: ObjectCache, digest: str, size_bytes: int) -> Iterator[subprocess.Popen[str]]:
    """Run a process that has fetched half of an object; a line lets it go on."""
    arguments = [str(cache.directory), str(cache.max_bytes), digest, str(size_bytes)]
    with subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            yield process
        finally:
            process.kill()


def main() -> None:
    directory, max_bytes, digest, size = sys.argv[1:]

    def fetch(fd: int) -> None:
        os.pwrite(fd, content(digest, int(size) // 2), 0)
        print("half", flush=True)
        sys.stdin.readline()
        fetch_of(digest, int(size))(fd)

    ObjectCache(Path(directory), int(max_bytes)).path(digest, int(size), fetch)


if __name__ == "__main__":
    main()
