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
from compressor.planning.requirements import device_of, stage_costs
from deltastore.errors import MemoryTooSmall
from deltastore.quantities import size_text

if TYPE_CHECKING:  # brings transformers, which takes seconds
    from compressor.fitting.fit_settings import FitSettings

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
    elsewhere = "" if device.type == "cpu" else ", or --device cpu"
    return f"give --calibration none, which reads no text{elsewhere}"


def _cheaper(config: CompressConfig, fit_settings: FitSettings) -> Iterator[tuple[str, FitSettings]]:
    """Yield options that need less memory: fewer samples, signs that stay, and both."""
    # Deferred, because it imports transformers, which takes seconds.
    from compressor.fitting.strategies import strategy_of

    calibration, samples = fit_settings.calibration, fit_settings.calibration.samples
    while samples // 2 >= FEWEST_SAMPLES:
        samples //= 2
        yield f"--samples {samples}", replace(fit_settings, calibration=replace(calibration, samples=samples))
    if strategy_of(fit_settings, config.method).distillation.moves_signs:
        fixed = replace(fit_settings, learn_signs=False)
        yield "--no-learn-signs", fixed
        fewest = replace(fixed, calibration=replace(calibration, samples=samples))
        yield f"--no-learn-signs and --samples {samples}", fewest
