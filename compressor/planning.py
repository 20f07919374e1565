"""The needs of one run of `compress`: memory, time and disk space of this machine, from headers alone.

A run that has too little memory is refused with the first option that needs less. Reads no weights; `fit/cost.py`
predicts memory and work of a fit.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from compressor.config import CompressConfig, FitSettings
from compressor.fit.shapes import FLOAT32_BYTES, LATENT_BYTES, MachineRate, MemoryItem, StageCost, shapes_of
from compressor.pairs import Pairs
from deltastore.console import size_text
from deltastore.errors import MemoryTooSmall
from deltastore.format.sizes import FP16_BYTES, one_bit_plan

if TYPE_CHECKING:  # brings transformers, which takes seconds
    from compressor.fit.distill import DistillSettings

MEASURING_S = 1.0
# Shape of the products that are measured: one batch's tokens, and a layer's features.
PRODUCT_SHAPE = (1536, 2048)
COPY_NUMEL = 1 << 25
# Part of large products' rate that a block reaches with its norms, attention and small matrices.
REACHED = 0.7


def free_memory(device: torch.device) -> dict[str, int]:
    """Return free bytes of ``host`` memory and, if models run on a GPU, of the ``device``."""
    from compressor.decoder.sampling import free_bytes  # brings transformers, which takes seconds

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


CODING_BYTES = 110 << 20  # of the threads that code weights alone, as measured
CODING_PASSES = 12  # over all bytes: fingerprints, differences, the artifact's signs and errors


@dataclass(frozen=True, slots=True)
class Requirements:
    """Memory, time and disk space of one run."""

    stages: Sequence[StageCost]
    seconds: Sequence[float]  # of each stage
    disk_bytes: int  # beside `out`, at most
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
    from compressor.fit.cost import FitCost
    from compressor.fit.fit import recipe_of

    shapes = shapes_of(pairs.tensors, coded, pairs.finetune.config)
    device = fit_settings.torch_device()
    free = free_memory(device)["host" if device.type == "cpu" else "device"]
    recipe = recipe_of(fit_settings, config.scales)
    fit = FitCost(shapes, fit_settings, recipe, device.type == "cpu", free)
    return [*fit.stages(), coding]


def disk_bytes(
    config: CompressConfig, pairs: Pairs, coded: Collection[str], files: Mapping[str, bytes]
) -> int:
    """Return the most bytes beside `out` at any time.

    The artifact is written to a spool and then in one piece, so it takes its space twice for a moment. The stages that
    calibration keeps for a resumed run take about as much again, and the state of the end-to-end stage comes on top.
    """
    matrices = one_bit_plan({pair.name: pair.shape for pair in pairs.tensors if pair.name in coded})
    whole = sum(pair.tensor.num_bytes for pair in pairs.tensors if pair.name not in coded)
    added = sum(pair.added_rows * pair.row_bytes for pair in pairs.tensors if pair.name in coded)
    budget, copies = (1.0, 2) if config.fit_settings is None else (config.fit_settings.budget, 4)
    needed = int(copies * budget * matrices.device_bytes)
    needed += 2 * (whole + added + sum(map(len, files.values())))
    if config.fit_settings is not None:
        # Deferred, because it imports transformers, which takes seconds.
        from compressor.fit.fit import recipe_of

        num_weights = sum(math.prod(pair.shape) for pair in pairs.tensors if pair.name in coded)
        num_scales = matrices.scales_bytes // FP16_BYTES
        distillation = recipe_of(config.fit_settings, config.scales).distillation
        needed += state_bytes(distillation, budget, num_weights, num_scales)
    return needed


def state_bytes(distillation: DistillSettings, budget: float, num_weights: int, num_scales: int) -> int:
    """Return the disk space that a run needs for the state of its end-to-end stage.

    Every scale has two moments, every sign that moves is a latent number, and a new state lies beside the old one.
    """
    scales = 3 * FLOAT32_BYTES * num_scales if distillation.epochs else 0
    latents = LATENT_BYTES * num_weights if distillation.moves_signs else 0
    return int(2 * budget * (scales + latents))


FEWEST_SAMPLES = 32  # that are proposed


def check_memory(config: CompressConfig, pairs: Pairs, coded: Collection[str]) -> None:
    """Refuse a run for which there is too little memory.

    Raises:
        MemoryTooSmall: how much is missing, and which options need less.
    """
    if config.fit_settings is None:
        return
    free = free_memory(device_of(config))
    needed = _least_bytes(config, config.fit_settings, pairs, coded, free)
    for where, num_bytes in needed.items():
        missing = num_bytes - free[where]
        if missing > 0:
            raise MemoryTooSmall(
                f"fitting needs about {size_text(num_bytes)} of {where} memory and {size_text(free[where])} are free, "
                f"{size_text(missing)} too little: {_way_out(config, config.fit_settings, pairs, coded)}"
            )


def _least_bytes(
    config: CompressConfig,
    fit_settings: FitSettings,
    pairs: Pairs,
    coded: Collection[str],
    kinds: Collection[str],
) -> dict[str, int]:
    """By kind of memory, the bytes without which a run fails."""
    stages = stage_costs(config, fit_settings, pairs, coded)
    return {where: max(stage.num_bytes(where, least=True) for stage in stages) for where in kinds}


def _way_out(config: CompressConfig, fit_settings: FitSettings, pairs: Pairs, coded: Collection[str]) -> str:
    """Name the first options that need little enough."""
    device = device_of(config)
    free = free_memory(device)
    for options, cheaper in _cheaper(config, fit_settings):
        needed = _least_bytes(config, cheaper, pairs, coded, free)
        if all(needed[where] <= free[where] for where in free):
            return f"give {options}"
    elsewhere = "" if device.type == "cpu" else ", or `device='cpu'`"
    return f"give `text='none'`, which reads no text{elsewhere}"


def _cheaper(config: CompressConfig, fit_settings: FitSettings) -> Iterator[tuple[str, FitSettings]]:
    """Yield options that need less memory: fewer samples, signs that stay, and both."""
    # Deferred, because it imports transformers, which takes seconds.
    from compressor.fit.fit import recipe_of

    calibration, samples = fit_settings.calibration, fit_settings.calibration.samples
    while samples // 2 >= FEWEST_SAMPLES:
        samples //= 2
        yield f"`samples={samples}`", replace(fit_settings, calibration=replace(calibration, samples=samples))
    if recipe_of(fit_settings, config.scales).distillation.moves_signs:
        fixed = replace(fit_settings, learn_signs=False)
        yield "`learn_signs=False`", fixed
        fewest = replace(fixed, calibration=replace(calibration, samples=samples))
        yield f"`learn_signs=False` and `samples={samples}`", fewest
