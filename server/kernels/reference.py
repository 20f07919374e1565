"""The arguments of kernels, and the one-bit products in plain torch: the oracle of every kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltastore.compiled.sources import Sources

SOURCES = Sources.of(Path(__file__).parent)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """The options that a model passes to attention beside queries, keys and values."""

    scaling: float | None  # None is ``key_dim ** -0.5``
    window: int | None  # keys that a token sees, itself included; None is all
    softcap: float | None  # scores s become ``softcap * tanh(s / softcap)``
    sinks: Tensor | None  # [heads]: a score per head that enters the softmax and has no value


@dataclass(frozen=True, slots=True, eq=False)
class AttentionGroup:
    """Sequences of a step with equally many new tokens, for one call. The cache has the new tokens' keys."""

    row_index: Tensor  # [sequences, new tokens] int64: rows of the flat batch
    page_table: Tensor  # [sequences, pages] int64, padded with any page
    positions: Tensor  # [sequences, new tokens] int64
    # By window, made on first use: [sequences, 1, new tokens, keys] bool.
    masks: dict[int | None, Tensor] = field(default_factory=dict)


def add_onebit_matmul(
    output: Tensor,  # [rows, out], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    plane_ptrs: Tensor,  # [groups, 3] int64: addresses of signs, factor_out, factor_in
    ranges: Tensor,  # [groups, 2] int32: first row and the row after the last
) -> None:
    """Compute `server.kernels.add_onebit_matmul` with unpacked copies of the signs."""
    shape = (output.shape[1], x.shape[1])
    for rows, matrix in matrices(plane_ptrs, ranges, *shape):
        product = onebit_matmul(x[rows], *matrix)
        output[rows] = torch.add(output[rows].float(), product).to(output.dtype)


def add_onebit_rows(
    output: Tensor,  # [rows, in], any float dtype, changed in place
    ids: Tensor,  # [rows] int64: rows of the group's matrix
    plane_ptrs: Tensor,  # [groups, 3] int64
    ranges: Tensor,  # [groups, 2] int32
    num_ids: int,
    scale: float,
) -> None:
    """Compute `server.kernels.add_onebit_rows` with unpacked copies of the signs."""
    for rows, matrix in matrices(plane_ptrs, ranges, num_ids, output.shape[1]):
        delta = onebit_rows(ids[rows], *matrix, output.shape[1]) * scale
        output[rows] = torch.add(output[rows].float(), delta).to(output.dtype)


def matrices(
    plane_ptrs: Tensor, ranges: Tensor, out_features: int, in_features: int
) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor | None]]]:
    """Yield the rows of each group that changes the layer, and views of its signs, factor_out and factor_in."""
    width, device = (in_features + 7) // 8, plane_ptrs.device
    for (signs, factor_out, factor_in), (first, last) in zip(
        plane_ptrs.tolist(), ranges.tolist(), strict=True
    ):
        if signs and first < last:
            matrix = (
                _at(signs, (out_features, width), "|u1", device),
                _at(factor_out, (out_features,), "<f4", device),
                _at(factor_in, (in_features,), "<f4", device) if factor_in else None,
            )
            yield slice(first, last), matrix


def onebit_matmul(
    x: Tensor,  # [rows, in], any float dtype
    signs: Tensor,  # [out, ceil(in / 8)] uint8; a set bit is +1
    factor_out: Tensor,  # [out] float32
    factor_in: Tensor | None,  # [in] float32
) -> Tensor:  # [rows, out] float32
    """Return ``factor_out * (B @ (factor_in * x))``, with an unpacked copy of the signs."""
    inputs = x.float() if factor_in is None else x.float() * factor_in
    return inputs @ _unpack(signs, x.shape[-1]).T * factor_out


def onebit_rows(
    ids: Tensor,  # [rows] int64: rows of `signs`
    signs: Tensor,  # [num, ceil(in / 8)] uint8
    factor_out: Tensor,  # [num] float32
    factor_in: Tensor | None,  # [in] float32
    in_features: int,
) -> Tensor:  # [rows, in] float32
    """Return rows of the dense delta, with the order of operations of `SignPlane.dense`."""
    delta = _unpack(signs[ids], in_features) * factor_out[ids, None]
    return delta if factor_in is None else delta * factor_in


class _Memory:
    """An array at an address, for numpy and torch. It does not own the memory: the slot outlives the call."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        interface: dict[str, Any] = {
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
        }
        self.__array_interface__ = self.__cuda_array_interface__ = interface


def _at(address: int, shape: tuple[int, ...], typestr: str, device: torch.device) -> Tensor:
    memory = _Memory(address, shape, typestr)
    if device.type == "cpu":
        return torch.from_numpy(np.asarray(memory))
    return torch.as_tensor(memory, device=device)


def _unpack(packed: Tensor, in_features: int) -> Tensor:
    """Return signs as float32, [rows, in]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[:, :, None] >> shifts & 1).flatten(1)[:, :in_features]
    return bits.float().mul_(2).sub_(1)
