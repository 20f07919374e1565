"""The least-squares problem of one layer's delta: what it minimizes, and the moments that this needs.

With the student's inputs X ``[n, in]``, the teacher's X_t, and the residual targets R = X_t W_f' - X W_b' that the base
leaves, a delta costs

    ||R - X delta'||^2 = ||R||^2 - 2 <G, delta> + <delta H, delta>,    H = X'X ``[in, in]``, G = R'X ``[out, in]``.

A ridge draws the delta toward the weight difference, which decides where the inputs do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_WEIGHTS = 2**26  # of one row chunk; a chunk has up to five float32 buffers of this many numbers
FLOAT64_INPUTS = 4096  # Cholesky factors of matrices up to this size are float64
# Ridge added per in / n. Without it, signs fit the noise of few inputs and lose on other text.
NOISE = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """The difference to code in one layer, and the moments that weigh its error; all finite, on one device.

    Raises:
        ValueError: shapes that do not go together.
    """

    difference: Tensor  # [out, in] float32: fine-tune less base, which the delta codes
    gram: Tensor  # [in, in] float32 or float64: H
    cross: Tensor  # [out, in] float32: G
    count: int  # rows of X that the moments sum over; losses are sums over them

    def __post_init__(self) -> None:
        in_features = self.difference.shape[1]
        if self.difference.shape != self.cross.shape or self.gram.shape != (in_features, in_features):
            raise ValueError(
                f"difference {tuple(self.difference.shape)}, cross {tuple(self.cross.shape)} and gram "
                f"{tuple(self.gram.shape)} are not of one layer"
            )

    def chunks(self) -> Iterator[slice]:
        """Row ranges, first to last, of at most `CHUNK_WEIGHTS` weights."""
        out_features, in_features = self.difference.shape
        step = max(1, CHUNK_WEIGHTS // in_features)
        for start in range(0, out_features, step):
            yield slice(start, min(start + step, out_features))

    def ridge(self, part: float) -> float:
        """Return `part` of H's mean diagonal; 1 where every input was zero, so that the weights decide."""
        mean = float(self.gram.diagonal().mean(dtype=torch.float64))
        return part * mean if mean > 0 else 1.0

    def noise_ridge(self, part: float) -> float:
        """Return the ridge of `part` plus `NOISE * in / n`, which grows as inputs become few."""
        return self.ridge(part + NOISE * len(self.gram) / max(self.count, 1))

    def ridge_cross(self, rows: slice, ridge: float) -> Tensor:  # [len(rows), in] float32
        """G of the loss with ``ridge * ||delta - difference||^2`` added; its H is ``H + ridge * I``."""
        return self.cross[rows].float().add(self.difference[rows], alpha=ridge)

    def expand_in(self, scale_in: Tensor | None) -> Tensor:  # [in] float32
        """Return `scale_in`, or ones where an axis has none."""
        return self.difference.new_ones(self.difference.shape[1]) if scale_in is None else scale_in.float()

    def expand_out(self, scale_out: Tensor | None, rows: slice) -> Tensor:  # [len(rows)] float32
        """Return the rows of `scale_out`, a single scale repeated, or ones where an axis has none."""
        num_rows = rows.stop - rows.start
        if scale_out is None:
            return self.difference.new_ones(num_rows)
        return scale_out[rows].float() if scale_out.numel() > 1 else scale_out.float().expand(num_rows)


def cholesky(matrix: Tensor, ridge: float) -> Tensor:  # lower, [in, in]
    """Cholesky factor of ``matrix + ridge * I``, with a larger ridge where rounding has made that indefinite.

    The last try makes the diagonal dominant, for which any finite symmetric matrix has a factor. The factor is float64
    up to `FLOAT64_INPUTS` inputs, else float32.
    """
    dtype = torch.float64 if len(matrix) <= FLOAT64_INPUTS else torch.float32
    damped = matrix.to(dtype, copy=True)
    damped.diagonal().add_(ridge)
    mean, largest = damped.diagonal().mean(), damped.abs().sum(1).max()
    for more in (1e-5 * mean, 1e-3 * mean, 1e-1 * mean, largest):
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            break
        damped.diagonal().add_(more.abs())
    else:
        factor = torch.linalg.cholesky(damped)
    return factor
