"""Time work on a device, and capture it as a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

WARM_UPS = 3


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median of `repeats` runs after warm-ups, between CUDA events or by a CPU's clock."""
    for _ in range(WARM_UPS if device.type == "cuda" else 1):
        run()
    return median((_between_events if device.type == "cuda" else once)(run, device) for _ in range(repeats))


def once(run: Callable[[], object], device: torch.device) -> float:
    """Time one run until the device is idle."""
    settle(device)
    start = time.perf_counter()
    run()
    settle(device)
    return time.perf_counter() - start


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def captured(run: Callable[[], object], device: torch.device) -> tuple[Callable[[], object], str]:
    """Capture `run` as a CUDA graph after warm-ups; return what replays it and a note, or `run` and the reason."""
    if device.type != "cuda":
        return run, "no graphs on a CPU"
    for _ in range(WARM_UPS):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        return run, f"without a graph, capture failed: {str(error).splitlines()[0]}"
    return graph.replay, "CUDA graph"


def _between_events(run: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
