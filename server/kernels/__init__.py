"""The one-bit products that deltas need, each chosen by the device of its input.

`reference` is plain torch and the oracle of the others; `onebit_cpu` runs on the CPU, `onebit_cuda` on CUDA. A
call takes all deltas of a batch and finds their matrices by address, so that the Python cost of a layer does not grow
with the number of variants. Knows tensors and addresses; no deltas and no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

# `reference` comes first: it digests the source files of kernels before one of them is imported.
from server.kernels import reference

__all__ = ["add_onebit_matmul", "add_onebit_rows", "compile_kernels", "prepare"]


def add_onebit_matmul(
    output: Tensor,  # [rows, out], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    plane_ptrs: Tensor,  # [groups, 3] int64: addresses of signs, factor_out and factor_in
    ranges: Tensor,  # [groups, 2] int32: a group's first row and the row after its last
) -> None:
    """Add ``factor_out * (B @ (factor_in * x))`` of each group's matrix to the group's rows.

    Signs are uint8 ``[out, ceil(in / 8)]``; a set bit is +1 and bit i of byte j belongs to input 8 j + i. Factors are
    float32 ``[out]`` and ``[in]``. A zero address of signs leaves the group's rows unchanged; a zero address of
    `factor_in` means ones. Groups are disjoint and ascending and may be empty. Rows of no group are not touched. Sums
    are float32 and rounded once, to the output's dtype. On the CPU in bfloat16, inputs times `factor_in` and the
    product of a group with many rows may be rounded to bfloat16 before.
    """
    _implementation(x.device.type).add_onebit_matmul(output, x, plane_ptrs, ranges)


def add_onebit_rows(
    output: Tensor,  # [rows, in], any float dtype, changed in place
    ids: Tensor,  # [rows] int64: a row of the group's matrix for each row of the output
    plane_ptrs: Tensor,  # [groups, 3] int64, as in `add_onebit_matmul`
    ranges: Tensor,  # [groups, 2] int32, as in `add_onebit_matmul`
    num_ids: int,  # rows of every matrix
    scale: float,  # the factor by which the embedding multiplies its rows
) -> None:
    """Add ``scale * factor_out[id] * B[id] * factor_in`` to each group's rows, rounded once to the output's dtype."""
    _implementation(output.device.type).add_onebit_rows(output, ids, plane_ptrs, ranges, num_ids, scale)


def prepare(
    device: torch.device,
    shapes: Iterable[tuple[int, int]] = (),  # out and in of the layers that deltas change
    dtype: torch.dtype = torch.float32,  # of the model
) -> None:
    """Compile the kernels of a device at start-up, or load them, and choose among them. Compiling takes seconds."""
    if device.type == "cpu":
        from server.kernels import attention_cpu, onebit_cpu

        onebit_cpu.prepare({in_features for _, in_features in shapes}, dtype)
        attention_cpu.compiled_kernel()
        return
    one = torch.ones(1, 1, device=device)
    signs = torch.ones(1, 1, dtype=torch.uint8, device=device)
    plane_ptrs = torch.tensor([[signs.data_ptr(), one.data_ptr(), 0]], device=device)
    ranges = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    add_onebit_matmul(one.clone(), one, plane_ptrs, ranges)
    add_onebit_rows(one.clone(), torch.zeros(1, dtype=torch.int64, device=device), plane_ptrs, ranges, 1, 1.0)
    if (kernels := _implementation(device.type)).__name__.endswith("cuda"):
        kernels.prepare(device, set(shapes), dtype)


def compile_kernels() -> None:
    """Compile the CPU kernels for this processor and keep them in the user's cache, or load them from it."""
    from server.kernels import attention_cpu, onebit_cpu

    onebit_cpu.compile_kernels()
    attention_cpu.compiled_kernel()


@cache
def _implementation(device_type: str) -> ModuleType:
    """Return the fastest implementation for a device."""
    if device_type == "cpu":
        # A server on CUDA runs without numba, which takes 64 MB.
        from server.kernels import onebit_cpu

        return onebit_cpu
    if device_type == "cuda" and find_spec("triton") is not None:
        # A server on the CPU runs without Triton.
        from server.kernels import onebit_cuda

        return onebit_cuda
    return reference
