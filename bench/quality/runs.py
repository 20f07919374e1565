"""Methods that the quality bench compares, and a compression in a process of its own.

Knows settings and costs; nothing of the quality of a delta.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.process_tree import memory_of, reset_peak
from bench.quality.text import Amount
from compressor.codec import Method
from compressor.config import CompressConfig
from compressor.fitting.calibration import Calibration
from compressor.fitting.fit_settings import FitSettings
from compressor.pipeline import compress
from deltastore.base.base import architecture

Text = Literal["none", "self", "in-domain", "general"]  # that a delta is fitted to
# Before the clock starts.
IMPORTED = (
    "bench.quality.runs",
    "compressor.fitting.fit",
    "transformers.models.llama.modeling_llama",
)


@dataclass(frozen=True, slots=True)
class Run:
    """One way to make a delta."""

    method: str  # what tables call it
    text: Text
    delta: Method = "both"
    solver: Literal["lstsq", "adamw"] = "lstsq"
    rate: float = 1e-4  # of adamw
    distill_epochs: int | None = None
    embeddings: Literal["compress", "whole"] = "whole"
    budget: float = 1.0

    @property
    def name(self) -> str:
        """A unique name for the run's files."""
        rate = f"-{self.rate:g}" if self.solver == "adamw" else ""
        method = self.method.replace(", ", "-").replace(" ", "-")
        return f"{method}-{self.text}{rate}-{self.embeddings}-{self.budget:.2f}"

    def config(
        self, base: Path, finetune: Path, out: Path, files: Mapping[Text, Path], amount: Amount
    ) -> CompressConfig:
        """Return the settings of `peraxis compress`.

        Args:
            files: the calibration text of each kind that is a file.
        """
        fit_settings = None
        if self.text != "none":
            source = str(files.get(self.text, self.text))
            fit_settings = FitSettings(
                Calibration(source, amount.samples, amount.length),
                solver=self.solver,
                distill_epochs=self.distill_epochs,
                budget=self.budget,
                rate=self.rate,
                device="cpu",
            )
        return CompressConfig(
            str(base), str(finetune), out, self.delta, embeddings=self.embeddings, fit_settings=fit_settings
        )


SCALAR = Run("scalar", "none", delta="scalar")
BITDELTA = Run("BitDelta", "in-domain", delta="scalar", solver="adamw")
PAPER = Run("paper", "in-domain", delta="per-axis", solver="adamw")
UNTRAINED = Run("ours without training", "in-domain", distill_epochs=0)
OURS = Run("ours", "in-domain")
# As many bytes as the paper's also where matrices are so small that a second vector is some percent of them.
ONE_VECTOR = Run("ours, one vector each", "in-domain", delta="per-axis")


@dataclass(frozen=True, slots=True)
class Cost:
    """Size of a delta, and time and memory of making it."""

    artifact_bytes: int
    seconds: float
    peak_memory_bytes: int  # by how much the process's own memory grew at its peak, its imports done


def compress_apart(config: CompressConfig) -> Cost:
    """Compress in a fresh process that has done nothing but its imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(compress_here, config).result()


def compress_here(config: CompressConfig) -> Cost:
    """Compress in this process, and measure the peak of memory from now on."""
    # Makes the lazy imports of transformers.
    architecture(json.loads((Path(config.base) / "config.json").read_text()))
    own = os.getpid()
    reset_peak(own)
    before = memory_of(own)["RssAnon"]
    made = compress(config)
    after = memory_of(own)
    # Pages of files are code that a forked process maps anew; checkpoints are read, not mapped.
    peak = after["VmHWM"] - after["RssFile"] - before
    return Cost(made.artifact_bytes, round(made.seconds, 2), peak)
