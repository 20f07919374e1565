"""The products that deltas need, one operation per name, chosen by the device of their input.

`reference` is plain torch and the oracle of every other implementation; `numba` runs on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.kernels import reference
from server.kernels.reference import onebit_rows

__all__ = ["onebit_matmul", "onebit_rows", "prepare"]


def onebit_matmul(
    x: Tensor,  # [rows, in], any float dtype
    signs: Tensor,  # [out, ceil(in / 8)] uint8; a set bit is +1
    factor_out: Tensor,  # [out] float32
    factor_in: Tensor | None,  # [in] float32
) -> Tensor:  # [rows, out] float32
    """What one delta adds to a linear layer's output: ``factor_out * (B @ (factor_in * x))``, summed in float32."""
    if x.device.type == "cpu":
        from server.kernels import numba  # compiles on import, which a server on another device never needs

        return numba.onebit_matmul(x, signs, factor_out, factor_in)
    return reference.onebit_matmul(x, signs, factor_out, factor_in)


def prepare(device: torch.device) -> None:
    """Compile what this device's kernels need, which takes seconds that no request should wait for."""
    one = torch.ones(1, 1, device=device)
    onebit_matmul(one, one.to(torch.uint8), one[0], None)
