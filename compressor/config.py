"""The settings of one `compress` run: two checkpoints, an output and options.

Reads no files; the settings of fitting to text are `fit/fit_settings.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from compressor.codec import Method
from deltastore.errors import UsageError

if TYPE_CHECKING:  # brings transformers, which takes seconds
    from compressor.fit.fit_settings import FitSettings


@dataclass(frozen=True, slots=True)
class CompressConfig:
    """Settings of one run.

    Raises:
        UsageError: a `min_agreement` out of its range, or without text to measure it on.
    """

    base: str  # a directory or a hub id
    finetune: str  # the same, or an adapter's
    out: Path
    method: Method = "both"
    embeddings: Literal["compress", "whole"] = "compress"
    progress: bool = False
    fit_settings: FitSettings | None = None  # None fits the weights alone
    min_agreement: float | None = None  # of most likely tokens, on text held out; less of it is a failure
    resume: bool = False
    report: Path | None = None  # a directory for a model card

    def __post_init__(self) -> None:
        if self.min_agreement is None:
            return
        if not 0 <= self.min_agreement <= 1:
            raise UsageError(f"--min-agreement {self.min_agreement}: give a share from 0 to 1")
        if self.fit_settings is None:
            raise UsageError(
                "--min-agreement is measured on text: give it with a --calibration other than none"
            )

    def settings(self) -> dict[str, Any]:
        """Return the settings that change the artifact's bytes."""
        settings = {"method": self.method, "calibration": "none", "embeddings": self.embeddings}
        if self.fit_settings is None:
            return settings
        # Deferred, because it imports transformers, which takes seconds.
        from compressor.fit.strategies import strategy_of

        return settings | strategy_of(self.fit_settings, self.method).settings()
