"""Cut tensors into row blocks, and map over them on threads. Must not know what is computed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")

BLOCK_NUMEL = 1 << 18  # 1 MiB as float32: a block and its temporaries stay in a core's cache
MAX_WORKERS = 8  # each holds some 6 MB of blocks and temporaries


class Map(Protocol):
    """The builtin `map` over row blocks, or a parallel one that keeps their order."""

    def __call__(self, work: Callable[[slice], T], blocks: Iterable[slice], /) -> Iterator[T]: ...


def row_blocks(shape: tuple[int, ...], block_numel: int = BLOCK_NUMEL) -> Iterator[slice]:
    """Yield blocks of a tensor's first dimension; they depend on its shape alone, so sums round the same everywhere."""
    if not shape:
        yield slice(None)
        return
    step = max(1, block_numel * shape[0] // max(1, math.prod(shape)))
    for first in range(0, shape[0], step):
        yield slice(first, min(first + step, shape[0]))


@contextmanager
def workers() -> Iterator[Map]:
    """Yield a parallel map whose threads each run torch on one core, because row blocks are too small for more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(MAX_WORKERS, len(os.sched_getaffinity(0)))) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(num_threads)
