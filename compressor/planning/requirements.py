"""Memory, time and disk space that one run of `compress` needs, from headers alone.

Reads no weights and refuses nothing. `fitting/cost.py` predicts memory and work of a fit.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compressor.config import CompressConfig
from compressor.fitting.shapes import shapes_of
from compressor.fitting.stage_cost import MemoryItem, StageCost
from compressor.io.pairs import Pairs
from compressor.planning.machine import free_memory, measure_rate
from deltastore.format.plan import FP16_BYTES, one_bit_plan

if TYPE_CHECKING:  # brings transformers, which takes seconds
    from compressor.fitting.fit_settings import FitSettings

CODING_BYTES = 110 << 20  # of the threads that code weights alone, as measured
CODING_PASSES = 12  # over all bytes: fingerprints, differences, the artifact's signs and errors


@dataclass(frozen=True, slots=True)
class Requirements:
    """Memory, time and disk space of one run."""

    stages: Sequence[StageCost]
    seconds: Sequence[float]  # of each stage
    disk_bytes: int  # beside --out, at most
    free: Mapping[str, int]  # bytes of `host` and `device` memory and of the `disk`

    def peak(self, where: str, *, least: bool = False) -> int:
        """Return the bytes of one kind of memory of the largest stage; with `least`, what it cannot do without."""
        return max(stage.num_bytes(where, least=least) for stage in self.stages)

    @property
    def memory_kinds(self) -> list[str]:
        """Kinds of memory that the run uses."""
        return [where for where in ("host", "device") if self.peak(where)]


def requirements_of(
    config: CompressConfig, pairs: Pairs, coded: Collection[str], files: Mapping[str, bytes]
) -> Requirements:
    """Return the requirements of a run, measuring this machine's rate, which takes a second or two.

    Args:
        coded: names of the tensors that are coded at one bit where they differ.
        files: the fine-tune's own files that the artifact stores.
    """
    device = device_of(config)
    stages, rate = stage_costs(config, config.fit_settings, pairs, coded), measure_rate(device)
    return Requirements(
        stages,
        [rate.seconds(stage) for stage in stages],
        disk_bytes(config, pairs, coded, files),
        {**free_memory(device), "disk": shutil.disk_usage(config.out.parent).free},
    )


def device_of(config: CompressConfig) -> torch.device:
    """Return the device where models run; weights alone are coded on the CPU."""
    return torch.device("cpu") if config.fit_settings is None else config.fit_settings.torch_device()


def stage_costs(
    config: CompressConfig, fit_settings: FitSettings | None, pairs: Pairs, coded: Collection[str]
) -> list[StageCost]:
    """Return the cost of every stage of `config` with the fit's settings replaced by `training`."""
    moved = float(CODING_PASSES * sum(pair.num_bytes for pair in pairs.tensors))
    coding = StageCost("coding", [MemoryItem("row blocks of every thread", CODING_BYTES, "host")], 0.0, moved)
    if fit_settings is None:
        return [coding]
    # They bring transformers, which takes seconds.
    from compressor.fitting.cost import FitCost
    from compressor.fitting.strategies import strategy_of

    shapes = shapes_of(pairs.tensors, coded, pairs.finetune.config)
    device = fit_settings.torch_device()
    free = free_memory(device)["host" if device.type == "cpu" else "device"]
    fit = FitCost(shapes, strategy_of(fit_settings, config.method), device.type == "cpu", free)
    return [*fit.stages(), coding]


def disk_bytes(
    config: CompressConfig, pairs: Pairs, coded: Collection[str], files: Mapping[str, bytes]
) -> int:
    """Return the most bytes beside `--out` at any time.

    The artifact is written to a spool and then in one piece, so it takes its space twice for a moment. The stages that
    calibration keeps for `--resume` take about as much again, and the state of the end-to-end stage comes on top.
    """
    matrices = one_bit_plan({pair.name: pair.shape for pair in pairs.tensors if pair.name in coded})
    whole = sum(pair.tensor.num_bytes for pair in pairs.tensors if pair.name not in coded)
    added = sum(pair.added_rows * pair.row_bytes for pair in pairs.tensors if pair.name in coded)
    budget, copies = (1.0, 2) if config.fit_settings is None else (config.fit_settings.budget, 4)
    needed = int(copies * budget * matrices.device_bytes)
    needed += 2 * (whole + added + sum(map(len, files.values())))
    if config.fit_settings is not None:
        # Deferred, because it imports transformers, which takes seconds.
        from compressor.fitting.strategies import strategy_of

        num_weights = sum(math.prod(pair.shape) for pair in pairs.tensors if pair.name in coded)
        num_scales = matrices.scales_bytes // FP16_BYTES
        needed += strategy_of(config.fit_settings, config.method).state_bytes(num_weights, num_scales)
    return needed
