"""The terms of a delta in compiled code: reading and writing numbers, scales, whole tensors, low-rank parts and biases.

A row is a row of a table, as `reference` describes it. The loops over elements compile in half the time of array
expressions.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from server.kernels.openmp import array, at
from server.kernels.reference import (
    BASE_BIAS,
    BIAS,
    FIELDS,
    GAIN,
    LEFT,
    PLANE_FIELDS,
    RANK,
    RIGHT,
    SCALE_OUT,
    SIGNS,
    SINGLE,
    WHOLE,
    WHOLE_DTYPE,
)


@numba.njit(error_model="numpy")
def float_of_half(bits: int) -> np.float32:
    """Return the float16 with these bits as float32."""
    wide = np.uint32(np.uint32(bits & 0x7FFF) << np.uint32(13))
    # The exponents differ by 112; multiplication keeps subnormal numbers.
    value = wide.view(np.float32) * np.float32(2.0**112)
    if bits & 0x7C00 == 0x7C00:
        value = np.uint32(wide | np.uint32(0x7F800000)).view(np.float32)
    return -value if bits & 0x8000 else value


@numba.njit(error_model="numpy")
def float_of_bfloat(bits: int) -> np.float32:
    """Return the bfloat16 with these bits as float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.njit(error_model="numpy")
def load(values: np.ndarray, address: int, half: int, scale_in: int) -> None:
    """Read the inputs at an address as float32, times the float16 scales at `scale_in` unless that is 0."""
    if half:
        short = array(at(address), values.shape, np.uint16)
        for i in range(len(values)):
            values[i] = float_of_bfloat(short[i])
    else:
        full = array(at(address), values.shape, np.float32)
        for i in range(len(values)):
            values[i] = full[i]
    if scale_in:
        scales = array(at(scale_in), values.shape, np.uint16)
        for i in range(len(values)):
            values[i] *= float_of_half(scales[i])


@numba.njit(error_model="numpy")
def store(totals: np.ndarray, address: int, half: int) -> None:
    """Write totals to the outputs at an address, rounded to nearest even."""
    if half:
        short = array(at(address), totals.shape, np.uint16)
        for i in range(len(totals)):
            bits = totals[i : i + 1].view(np.uint32)[0]
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            short[i] = np.uint16(rounded) if totals[i] == totals[i] else np.uint16(0x7FC0)
    else:
        output = array(at(address), totals.shape, np.float32)
        for i in range(len(totals)):
            output[i] = totals[i]


@numba.njit(error_model="numpy")
def add_scaled(totals: np.ndarray, sums: np.ndarray, row: np.ndarray, plane: int, first: int) -> None:
    """Add a plane's sums, from output `first` on, times their factors."""
    gain = array(at(row[PLANE_FIELDS * plane + GAIN]), 1, np.float32)[0]
    scale_out = row[PLANE_FIELDS * plane + SCALE_OUT]
    if scale_out == 0:
        for i in range(len(totals)):
            totals[i] += sums[i] * gain
    elif row[SINGLE] >> plane & 1:
        factor = float_of_half(array(at(scale_out), 1, np.uint16)[0]) * gain
        for i in range(len(totals)):
            totals[i] += sums[i] * factor
    else:
        scales = array(at(scale_out + 2 * first), totals.shape, np.uint16)
        for i in range(len(totals)):
            totals[i] += sums[i] * (float_of_half(scales[i]) * gain)


@numba.njit(error_model="numpy", fastmath={"reassoc"})
def dot(values: np.ndarray, address: int, dtype: int) -> np.float32:
    """Return the product of float32 `values` with numbers at an address; `dtype` is an index of WHOLE_DTYPES."""
    total = np.float32(0)
    if dtype == 0:
        full = array(at(address), values.shape, np.float32)
        for i in range(len(values)):
            total += values[i] * full[i]
        return total
    short = array(at(address), values.shape, np.uint16)
    if dtype == 1:
        for i in range(len(values)):
            total += values[i] * float_of_bfloat(short[i])
    else:
        for i in range(len(values)):
            total += values[i] * float_of_half(short[i])
    return total


@numba.njit(error_model="numpy")
def begin_totals(
    totals: np.ndarray, address: int, half: int, row: np.ndarray, x: np.ndarray, first: int
) -> None:
    """Read outputs from `first` on as float32 totals, or compute those of a tensor that is stored whole."""
    if row[WHOLE]:
        stride = len(x) * (4 if row[WHOLE_DTYPE] == 0 else 2)
        for i in range(len(totals)):
            totals[i] = dot(x, row[WHOLE] + (first + i) * stride, row[WHOLE_DTYPE])
    elif half:
        short = array(at(address), totals.shape, np.uint16)
        for i in range(len(totals)):
            totals[i] = float_of_bfloat(short[i])
    else:
        output = array(at(address), totals.shape, np.float32)
        for i in range(len(totals)):
            totals[i] = output[i]


@numba.njit(error_model="numpy")
def end_totals(
    totals: np.ndarray, address: int, half: int, row: np.ndarray, inner: np.ndarray, first: int
) -> None:
    """Add the low-rank part, whose product with `right` is `inner`, and the bias; then write the outputs."""
    if row[LEFT]:
        for i in range(len(totals)):
            totals[i] += dot(inner, row[LEFT] + 2 * (first + i) * len(inner), 2)
    if row[BIAS] and row[WHOLE]:
        own = array(at(row[BIAS] + 4 * first), totals.shape, np.float32)
        for i in range(len(totals)):
            totals[i] += own[i]
    elif row[BIAS]:
        own = array(at(row[BIAS] + 4 * first), totals.shape, np.float32)
        base = array(at(row[BASE_BIAS] + 4 * first), totals.shape, np.float32)
        for i in range(len(totals)):
            totals[i] += own[i] - base[i]
    elif row[WHOLE] and row[BASE_BIAS]:
        base = array(at(row[BASE_BIAS] + 4 * first), totals.shape, np.float32)
        for i in range(len(totals)):
            totals[i] += base[i]
    store(totals, address, half)


@numba.njit(error_model="numpy")
def read_inputs(job: Any, number: int, row: np.ndarray, x: np.ndarray, inner: np.ndarray) -> None:
    """Read row `number` of the inputs for a whole tensor or a low-rank part, and multiply it with `right`."""
    if row[WHOLE] or row[LEFT]:
        load(x, job.x + number * job.x_stride, job.x_half, 0)
    for k in range(row[RANK]):
        inner[k] = dot(x, row[RIGHT] + 2 * k * len(x), 2)


@numba.njit(error_model="numpy")
def row_at(job: Any, part: int, slot: int) -> Any:
    return array(at(job.table + 8 * FIELDS * (part * job.num_slots + slot)), FIELDS, np.int64)


@numba.njit(error_model="numpy")
def is_empty(row: np.ndarray) -> bool:
    return not (row[SIGNS] or row[LEFT] or row[WHOLE] or row[BIAS])


@numba.njit(error_model="numpy")
def read_whole(values: np.ndarray, address: int, dtype: int) -> None:
    """Read numbers at an address as float32; `dtype` is an index of WHOLE_DTYPES."""
    if dtype == 0:
        full = array(at(address), values.shape, np.float32)
        for i in range(len(values)):
            values[i] = full[i]
        return
    short = array(at(address), values.shape, np.uint16)
    for i in range(len(values)):
        values[i] = float_of_bfloat(short[i]) if dtype == 1 else float_of_half(short[i])
