"""The products that deltas need, one operation per name, chosen by the device of their input.

`onebit_reference` is plain torch and the oracle of the others; `onebit_cpu` runs on the CPU, `onebit_cuda` on CUDA.
Each takes all deltas of a batch at once and finds their matrices by address, so that the Python cost of a layer does
not grow with the number of variants.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from server.kernels import onebit_reference

__all__ = ["add_onebit_matmul", "add_onebit_rows", "prepare"]


def add_onebit_matmul(
    output: Tensor,  # [rows, out], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    plane_ptrs: Tensor,  # [groups, 3] int64: addresses of signs, factor_out, factor_in
    ranges: Tensor,  # [groups, 2] int32: first row of a group and the one after its last
) -> None:
    """Add to each group's rows what its delta adds: ``factor_out * (B @ (factor_in * x))``, summed in float32.

    Signs are uint8 [out, ceil(in / 8)], a set bit is +1; factors are float32 [out] and [in]. The address 0 of signs
    leaves a group as it is, that of `factor_in` stands for ones. Groups are disjoint and ascending and may be empty;
    rows of no group are not touched. The sum is rounded once, to the output's dtype.
    """
    _implementation(x.device.type).add_onebit_matmul(output, x, plane_ptrs, ranges)


def add_onebit_rows(
    output: Tensor,  # [rows, in], any float dtype, changed in place
    ids: Tensor,  # [rows] int64, each a row of its group's matrix
    plane_ptrs: Tensor,  # [groups, 3] int64, as above
    ranges: Tensor,  # [groups, 2] int32, as above
    num_ids: int,  # rows of every matrix
    scale: float,  # what the embedding multiplies its rows by
) -> None:
    """Add to each group's rows `scale` times the rows `ids` of its dense delta, rounded once."""
    _implementation(output.device.type).add_onebit_rows(output, ids, plane_ptrs, ranges, num_ids, scale)


def prepare(
    device: torch.device,
    shapes: Iterable[tuple[int, int]] = (),  # out and in of the layers that deltas change
    dtype: torch.dtype = torch.float32,  # of the model
) -> None:
    """Compile what this device's kernels need, which takes seconds that no request should wait for."""
    one = torch.ones(1, 1, device=device)
    signs = torch.ones(1, 1, dtype=torch.uint8, device=device)
    plane_ptrs = torch.tensor([[signs.data_ptr(), one.data_ptr(), 0]], device=device)
    ranges = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    add_onebit_matmul(one.clone(), one, plane_ptrs, ranges)
    add_onebit_rows(one.clone(), torch.zeros(1, dtype=torch.int64, device=device), plane_ptrs, ranges, 1, 1.0)
    if (kernels := _implementation(device.type)).__name__.endswith("cuda"):
        kernels.prepare(device, set(shapes), dtype)


@cache
def _implementation(device: str) -> ModuleType:
    """The fastest there is for a kind of device; each is imported where it is used alone."""
    if device == "cpu":
        from server.kernels import onebit_cpu

        return onebit_cpu
    if device == "cuda" and find_spec("triton") is not None:
        from server.kernels import onebit_cuda

        return onebit_cuda
    return onebit_reference
