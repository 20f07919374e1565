"""Free memory and speed of this machine. Independent of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import torch

from compressor.fitting.stage_cost import MachineRate

MEASURING_S = 1.0
# Shape of the products that are measured: one batch's tokens, and a layer's features.
PRODUCT_SHAPE = (1536, 2048)
COPY_NUMEL = 1 << 25
# Part of large products' rate that a block reaches with its norms, attention and small matrices.
REACHED = 0.7


def free_memory(device: torch.device) -> dict[str, int]:
    """Return free bytes of ``host`` memory and, if models run on a GPU, of the ``device``."""
    from compressor.blockwise.sampling import free_bytes  # brings transformers, which takes seconds

    free = {"host": free_bytes(torch.device("cpu"))}
    return free if device.type == "cpu" else free | {"device": free_bytes(device)}


@cache
def measure_rate(device: torch.device) -> MachineRate:
    """Measure float32 matrix products and copies for `MEASURING_S` each, once in a process."""
    rows, features = PRODUCT_SHAPE
    left, right = torch.ones(rows, features, device=device), torch.ones(features, features, device=device)
    out = torch.empty_like(left)
    product_s = _fastest_s(lambda: torch.mm(left, right, out=out), device)
    large = torch.ones(COPY_NUMEL, device=device)
    copy_s = _fastest_s(lambda: large.clone(), device)
    return MachineRate(REACHED * 2 * rows * features**2 / product_s, 2 * large.nbytes / copy_s)


def _fastest_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several runs, for `MEASURING_S` in all."""
    best, begun = math.inf, time.perf_counter()
    while time.perf_counter() - begun < MEASURING_S:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
