"""The ways to fit deltas to text, one per value of `--solver`."""

from __future__ import annotations

from compressor.codec import Method
from compressor.fit.fit_settings import FitSettings
from compressor.fit.least_squares import LeastSquaresStrategy
from compressor.fit.paper import PaperStrategy
from compressor.fit.strategy import FitStrategy

STRATEGIES: dict[str, type[FitStrategy]] = {"lstsq": LeastSquaresStrategy, "adamw": PaperStrategy}


def strategy_of(fit_settings: FitSettings, method: Method) -> FitStrategy:
    """Return the strategy that fits deltas of `method` by the settings of one run."""
    return STRATEGIES[fit_settings.solver](fit_settings, method)
