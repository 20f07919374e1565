"""The result of fitting one matrix. Shared by fitting and its files; imports neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltastore.format.matrix import MatrixDelta


@dataclass(frozen=True, slots=True, eq=False)
class FittedMatrix:
    """A matrix's delta at one bit per weight, and the upgrades that spare bytes can replace it with."""

    delta: MatrixDelta
    upgrades: Sequence[MatrixDelta] = ()
