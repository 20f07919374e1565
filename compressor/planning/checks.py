"""Refuse a run that has too little memory, with the first option that needs less.

`requirements.py` computes the needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from compressor.config import CompressConfig
from compressor.io.pairs import Pairs
from compressor.planning.machine import free_memory
from compressor.planning.rendering import size_text
from compressor.planning.requirements import device_of, stage_costs
from deltastore.errors import MemoryTooSmall

if TYPE_CHECKING:  # brings transformers, which takes seconds
    from compressor.fitting.training import Training

FEWEST_SAMPLES = 32  # that are proposed


def check_memory(config: CompressConfig, pairs: Pairs, coded: Collection[str]) -> None:
    """Refuse a run for which there is too little memory.

    Raises:
        MemoryTooSmall: how much is missing, and which options need less.
    """
    if config.training is None:
        return
    free = free_memory(device_of(config))
    needed = _least_bytes(config, config.training, pairs, coded, free)
    for where, num_bytes in needed.items():
        missing = num_bytes - free[where]
        if missing > 0:
            raise MemoryTooSmall(
                f"fitting needs about {size_text(num_bytes)} of {where} memory and {size_text(free[where])} are free, "
                f"{size_text(missing)} too little: {_way_out(config, config.training, pairs, coded)}"
            )


def _least_bytes(
    config: CompressConfig,
    training: Training,
    pairs: Pairs,
    coded: Collection[str],
    kinds: Collection[str],
) -> dict[str, int]:
    """By kind of memory, the bytes without which a run fails."""
    stages = stage_costs(config, training, pairs, coded)
    return {where: max(stage.num_bytes(where, least=True) for stage in stages) for where in kinds}


def _way_out(config: CompressConfig, training: Training, pairs: Pairs, coded: Collection[str]) -> str:
    """Name the first options that need little enough."""
    device = device_of(config)
    free = free_memory(device)
    for options, cheaper in _cheaper(config, training):
        needed = _least_bytes(config, cheaper, pairs, coded, free)
        if all(needed[where] <= free[where] for where in free):
            return f"give {options}"
    elsewhere = "" if device.type == "cpu" else ", or --device cpu"
    return f"give --calibration none, which reads no text{elsewhere}"


def _cheaper(config: CompressConfig, training: Training) -> Iterator[tuple[str, Training]]:
    """Yield options that need less memory: fewer samples, signs that stay, and both."""
    from compressor.fitting.strategies import strategy_of  # brings transformers, which takes seconds

    calibration, samples = training.calibration, training.calibration.samples
    while samples // 2 >= FEWEST_SAMPLES:
        samples //= 2
        yield f"--samples {samples}", replace(training, calibration=replace(calibration, samples=samples))
    if strategy_of(training, config.method).distillation.moves_signs:
        fixed = replace(training, learn_signs=False)
        yield "--no-learn-signs", fixed
        fewest = replace(fixed, calibration=replace(calibration, samples=samples))
        yield f"--no-learn-signs and --samples {samples}", fewest
