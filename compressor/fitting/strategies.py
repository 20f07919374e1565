"""The strategy of each value of `--solver`."""

from __future__ import annotations

from compressor.codec import Method
from compressor.fitting.least_squares import LeastSquaresStrategy
from compressor.fitting.paper.strategy import PaperStrategy
from compressor.fitting.strategy import FitStrategy
from compressor.fitting.training import Training

STRATEGIES: dict[str, type[FitStrategy]] = {"lstsq": LeastSquaresStrategy, "adamw": PaperStrategy}


def strategy_of(training: Training, method: Method) -> FitStrategy:
    """Return the strategy that fits deltas of `method` by the settings of one run."""
    return STRATEGIES[training.solver](training, method)
