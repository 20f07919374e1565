"""The one-bit products on the CPU (x86-64 and Arm), for all groups of a batch in one call. Signs stay packed.

Each thread of torch's own team (`openmp`) computes its share of the outputs for all rows. With AVX-512, sums of inputs
are looked up; other processors select inputs by signs (`vectors` has the code of both). The signs of groups with many
rows are expanded where that is faster (`Choice`). Not thread-safe.

A tile of expanded signs fits a second-level cache, is used at once and overwritten by the next one. In bfloat16 the
product runs on the processor's units for it, and rounds inputs times `factor_in` and the product before it is added.

Lookup and expansion are both linear in outputs, so their ratio depends on inputs and rows alone. A measurement may end
otherwise on a busy machine; so it only chooses in bfloat16, where the other rows of a batch change roundings, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from torch import Tensor

from deltastore.compiled import numba_cache
from deltastore.user_cache import CacheDirectory, user_cache_dir
from server.kernels import openmp, reference, vectors
from server.kernels.openmp import array, at
from server.kernels.reference import SOURCES

# Without lookup, groups of at least this many rows are faster in float32 than by selection, measured with AVX2.
MIN_ROWS = 32
# Bytes of a tile of expanded signs. Processors with units for bfloat16 have larger second-level caches.
TILE_BYTES = {torch.float32: 2**19, torch.bfloat16: 2**21}

# The kernel's argument: addresses, and sizes.
EXPANSION_FIELDS = ("signs", "expanded", "numbers", "half", "num_rows", "width")
EXPANSION_JOB = np.dtype([(name, np.int64) for name in EXPANSION_FIELDS])
PACK_EXPANSION = struct.Struct(f"={len(EXPANSION_FIELDS)}q").pack


def add_product(
    output: Tensor,  # [rows, out], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    matrix: tuple[
        Tensor, Tensor, Tensor | None
    ],  # signs [out, ceil(in / 8)] uint8; factor_out, factor_in: float32
    dtype: torch.dtype,  # of the product: float32 or bfloat16
) -> None:
    """Add ``factor_out * (B @ (factor_in * x))``, summed in float32 and rounded to the output's dtype.

    With bfloat16, inputs times `factor_in` and each product are rounded to it before.
    """
    signs, factor_out, factor_in = matrix
    inputs = (x if factor_in is None else x.float() * factor_in).to(dtype)
    width = signs.shape[1]
    num_outputs = max(1, TILE_BYTES[dtype] // (8 * width * dtype.itemsize))
    tile = torch.empty(num_outputs, 8 * width, dtype=dtype)
    for start in range(0, len(signs), num_outputs):
        part = signs[start : start + num_outputs]
        _expand(part, tile)
        product = inputs @ tile[: len(part), : x.shape[1]].T
        block = output[:, start : start + len(part)]
        block.copy_(torch.addcmul(block.float(), product.float(), factor_out[start : start + len(part)]))


def _expand(signs: Tensor, tile: Tensor) -> None:
    numbers = _numbers(tile.dtype)
    is_half = tile.dtype == torch.bfloat16
    job = PACK_EXPANSION(signs.data_ptr(), tile.data_ptr(), numbers.data_ptr(), is_half, *signs.shape)
    compiled_kernel()(job, torch.get_num_threads())


@cache
def _numbers(dtype: torch.dtype) -> Tensor:
    """Return the eight signs of every byte, [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 2 * torch.from_numpy(bits).to(dtype) - 1


@cache
def compiled_kernel() -> Callable[[bytes, int], None]:
    """Compile the kernel that expands signs as ``call(job, num_threads)``, or load it."""
    return openmp.team(_expand_share, EXPANSION_JOB)


@numba.njit(nogil=True, error_model="numpy")
def _expand_share(job: Any, thread: int, num_threads: int) -> None:
    """Expand one thread's share of the rows."""
    signs = array(at(job.signs), (job.num_rows, job.width), np.uint8)
    begin = job.num_rows * thread // num_threads
    end = job.num_rows * (thread + 1) // num_threads
    # Words of 64 bits are copied at once: two for the eight bfloat16 numbers of a byte, four for float32.
    words = 2 if job.half else 4
    numbers = array(at(job.numbers), (256, words), np.uint64)
    expanded = array(at(job.expanded), (job.num_rows, job.width, words), np.uint64)
    for row in range(begin, end):
        for i in range(job.width):
            byte = signs[row, i]
            expanded[row, i, 0] = numbers[byte, 0]
            expanded[row, i, 1] = numbers[byte, 1]
            if words == 4:
                expanded[row, i, 2] = numbers[byte, 2]
                expanded[row, i, 3] = numbers[byte, 3]


log = logging.getLogger(__name__)

# Rows of a group that are measured.
ROWS = (16, 64, 256)
# More rows than any group has.
NEVER = 1 << 62
# Outputs of the matrices that are measured, and how often; the fastest time counts.
NUM_OUTPUTS = 1024
NUM_TURNS = 3
# Expansion replaces lookup, which rounds once, if its time is below this share of lookup's.
MAX_SHARE = 0.95

# Adds the product of one group, which has all rows: ``(output, x, plane_ptrs, ranges)``.
Product = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Choice:
    """How products are computed."""

    by_lookup: bool  # else by selection
    # By inputs: the rows from which a bfloat16 group is expanded to bfloat16; inputs that are missing never are.
    half_rows: Mapping[int, int] = field(default_factory=dict)

    def expansion(self, x: Tensor, output: Tensor) -> tuple[int, torch.dtype]:
        """Return the rows from which a group's signs are expanded, and the dtype of its product."""
        if not self.by_lookup:
            return MIN_ROWS, torch.float32
        if x.dtype == output.dtype == torch.bfloat16:
            return self.half_rows.get(x.shape[1], NEVER), torch.bfloat16
        return NEVER, torch.float32


def half_rows(in_features: Collection[int], by_lookup: Product) -> dict[int, int]:
    """Return `Choice.half_rows`, from the user's cache or measured, which takes milliseconds for each of the inputs."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return {}
    directory, name = CacheDirectory(user_cache_dir() / "choices"), _entry()
    known = _parsed(directory.read(name))
    if missing := sorted(set(in_features) - known.keys()):
        known |= {width: _measured(width, by_lookup) for width in missing}
        try:
            directory.write(name, json.dumps(known).encode())
        except OSError as error:
            log.info("the choice of kernels is not kept (%s): the next start measures again", error)
    return {width: known[width] for width in in_features}


def _entry() -> str:
    """Return the file name for this processor, these versions and this number of threads."""
    parts = (
        *(SOURCES.digest, numba_cache.VERSIONS, torch.__version__, torch.get_num_threads()),
        *(llvm.get_host_cpu_name(), sorted(llvm.get_host_cpu_features().items())),
    )
    return f"onebit-{hashlib.sha256(repr(parts).encode()).hexdigest()}"


def _parsed(content: bytes | None) -> dict[int, int]:
    """Return what the file holds; nothing if it does not exist or is damaged."""
    try:
        return {int(width): int(rows) for width, rows in json.loads(content or b"{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}


@torch.inference_mode()
def _measured(in_features: int, by_lookup: Product) -> int:
    """Return the rows from which expansion is faster, at that number and all larger ones that are measured."""
    generator = torch.Generator().manual_seed(0)
    packed = (NUM_OUTPUTS, (in_features + 7) // 8)
    signs = torch.randint(0, 256, packed, dtype=torch.uint8, generator=generator)
    factor_out, factor_in = torch.ones(NUM_OUTPUTS), torch.ones(in_features)
    plane_ptrs = torch.tensor([[part.data_ptr() for part in (signs, factor_out, factor_in)]])
    found = NEVER
    for rows in reversed(ROWS):
        x = torch.zeros(rows, in_features, dtype=torch.bfloat16)
        output = torch.zeros(rows, NUM_OUTPUTS, dtype=torch.bfloat16)
        ranges = torch.tensor([[0, rows]], dtype=torch.int32)

        def expanded() -> None:
            add_product(output, x, (signs, factor_out, factor_in), torch.bfloat16)  # noqa: B023 - called here

        def looked_up() -> None:
            by_lookup(output, x, plane_ptrs, ranges)  # noqa: B023 - called here

        # In turns, so that other work on the machine slows both.
        turns = [(_seconds(expanded), _seconds(looked_up)) for _ in range(NUM_TURNS)]
        expanded_s, looked_up_s = (min(times) for times in zip(*turns, strict=True))
        if expanded_s >= MAX_SHARE * looked_up_s:
            break
        found = rows
    return found


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# Smaller products run on one thread: waking the others costs more than they save.
PARALLEL_SIGNS = 1 << 19
# Outputs whose sums a thread holds; they share the first-level cache with the tables.
PANEL = 1024
# float32 numbers in a cache line.
LINE = 16
# Rows that share a transposed tile. Their tables fill two thirds of a first-level cache.
MAX_ROWS = 4

# The kernels' argument: addresses, strides in bytes, and sizes.
PRODUCT_FIELDS = (
    *("output", "output_stride", "output_half", "x", "x_stride", "x_half"),
    *("plane_ptrs", "ranges", "num_groups", "out_features", "in_features"),
)
PRODUCT_JOB = np.dtype([(name, np.int64) for name in PRODUCT_FIELDS])
# Makes the bytes of a job in a tenth of numpy's time.
PACK_PRODUCT = struct.Struct(f"={len(PRODUCT_FIELDS)}q").pack
Rows = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], None]
# Dtypes that kernels read and write, by the value of their flags `*_half`. Other dtypes are converted to float32.
HALF = {torch.float32: 0, torch.bfloat16: 1}


# The choice for this processor and the model; set by `prepare`.
_choice = Choice(vectors.supports_lookup())


def compile_kernels() -> None:
    """Compile all kernels that products use on this processor, or load them."""
    _matmul(vectors.supports_lookup())
    _rows()
    compiled_kernel()


def prepare(in_features: Collection[int], dtype: torch.dtype) -> None:
    """Compile all kernels, and choose among them for layers with these inputs in a model of this dtype."""
    global _choice
    compile_kernels()
    if vectors.supports_lookup() and dtype == torch.bfloat16:
        by_lookup = partial(add_onebit_matmul, choice=Choice(by_lookup=True))
        _choice = Choice(True, half_rows(in_features, by_lookup))


def add_onebit_matmul(
    output: Tensor,  # [rows, out], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    plane_ptrs: Tensor,  # [groups, 3] int64
    ranges: Tensor,  # [groups, 2] int32
    choice: Choice | None = None,  # None: the one that was made for this processor
) -> None:
    """Compute `server.kernels.add_onebit_matmul`."""
    if output.dtype not in HALF or output.stride(1) != 1:
        wide = output.float().contiguous()
        add_onebit_matmul(wide, x, plane_ptrs, ranges, choice)
        output.copy_(wide)
        return
    if x.dtype not in HALF or x.stride(1) != 1:
        x = x.float().contiguous()
    choice = choice or _choice
    ranges = _without_expanded(output, x, plane_ptrs, ranges, choice)
    num_threads = 1 if output.numel() * x.shape[1] < PARALLEL_SIGNS else torch.get_num_threads()
    job = PACK_PRODUCT(
        *(output.data_ptr(), output.stride(0) * output.itemsize, HALF[output.dtype]),
        *(x.data_ptr(), x.stride(0) * x.itemsize, HALF[x.dtype]),
        *(plane_ptrs.data_ptr(), ranges.data_ptr(), len(plane_ptrs), output.shape[1], x.shape[1]),
    )
    _matmul(choice.by_lookup)(job, num_threads)


def add_onebit_rows(
    output: Tensor,  # [rows, in], any float dtype, changed in place
    ids: Tensor,  # [rows] int64
    plane_ptrs: Tensor,  # [groups, 3] int64
    ranges: Tensor,  # [groups, 2] int32
    num_ids: int,
    scale: float,
) -> None:
    """Compute `server.kernels.add_onebit_rows`."""
    # A contiguous float32 output is changed in place.
    wide = output.float().contiguous()
    _rows()(
        wide.numpy(), ids.contiguous().numpy(), plane_ptrs.numpy(), ranges.numpy(), num_ids, np.float32(scale)
    )
    if wide is not output:
        output.copy_(wide)


def _without_expanded(
    output: Tensor, x: Tensor, plane_ptrs: Tensor, ranges: Tensor, choice: Choice
) -> Tensor:
    """Add the products of groups with many rows by expansion. Return the ranges with those groups empty."""
    min_rows, dtype = choice.expansion(x, output)
    if len(x) < min_rows:
        return ranges
    is_long = ranges[:, 1] - ranges[:, 0] >= min_rows
    if not is_long.any():
        return ranges
    shape = (output.shape[1], x.shape[1])
    for rows, matrix in reference.matrices(plane_ptrs[is_long], ranges[is_long], *shape):
        add_product(output[rows], x[rows], matrix, dtype)
    return ranges * ~is_long[:, None]


# The loops over elements below compile in half the time of array expressions.


@numba.njit(error_model="numpy")
def _load(values: np.ndarray, address: int, half: int, factor_in: int) -> None:
    """Read the inputs at an address as float32, times the factors at `factor_in` unless that is 0."""
    if half:
        short = array(at(address), values.shape, np.uint16)
        for i in range(len(values)):
            values[i] = np.uint32(np.uint32(short[i]) << np.uint32(16)).view(np.float32)
    else:
        full = array(at(address), values.shape, np.float32)
        for i in range(len(values)):
            values[i] = full[i]
    if factor_in:
        factors = array(at(factor_in), values.shape, np.float32)
        for i in range(len(values)):
            values[i] *= factors[i]


@numba.njit(error_model="numpy")
def _store(sums: np.ndarray, address: int, half: int, factor_out: int) -> None:
    """Add sums times their factors to the outputs at an address, rounded to nearest even."""
    factors = array(at(factor_out), sums.shape, np.float32)
    if half:
        short = array(at(address), sums.shape, np.uint16)
        for i in range(len(sums)):
            value = np.uint32(np.uint32(short[i]) << np.uint32(16)).view(np.float32) + sums[i] * factors[i]
            bits = np.float32(value).view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            short[i] = np.uint16(rounded) if value == value else np.uint16(0x7FC0)
    else:
        output = array(at(address), sums.shape, np.float32)
        for i in range(len(sums)):
            output[i] += sums[i] * factors[i]


_TILE_1, _TILE_2, _TILE_4 = vectors.add_tile(1), vectors.add_tile(2), vectors.add_tile(4)


@numba.njit(error_model="numpy")
def _fill(job: Any, row: int, first: int, factor_in: int, values: np.ndarray, tables: np.ndarray) -> None:
    """Fill the tables of a row's vectors.TILE_INPUTS inputs from `first` on. Inputs beyond the last one are zero."""
    num = min(vectors.TILE_INPUTS, job.in_features - first)
    address = job.x + row * job.x_stride + first * (2 if job.x_half else 4)
    _load(values[:num], address, job.x_half, factor_in + 4 * first if factor_in else 0)
    for i in range(num, vectors.TILE_INPUTS):
        values[i] = 0
    num_words = (num + vectors.WORD - 1) // vectors.WORD
    vectors.fill_tables(values.ctypes.data, tables.ctypes.data, num_words * vectors.WORD // vectors.PER_TABLE)


@numba.njit(error_model="numpy")
def _add_panel(
    job: Any,
    plane_ptr: np.ndarray,  # [3] int64
    rows: tuple[int, int],  # the first row and their number: 1, 2 or MAX_ROWS
    outputs: tuple[int, int],  # the first output and the one after the last
    memory: tuple[np.ndarray, np.ndarray, np.ndarray],  # buffers of inputs, tables and sums
) -> None:
    """Add the products of a few rows of one group for the outputs of one panel, by tables."""
    values, tables, sums = memory
    row, num_rows = rows
    start, stop = outputs
    for r in range(num_rows):
        for i in range(PANEL):
            sums[r, i] = 0
    width = (job.in_features + 7) // 8
    # Inputs whose tables are made at a time: fewer rows leave memory for more of them.
    span = vectors.TILE_INPUTS * (MAX_ROWS // num_rows)
    for first in range(0, job.in_features, span):
        last = min(job.in_features, first + span)
        for chunk in range(first, last, vectors.TILE_INPUTS):
            for r in range(num_rows):
                table = (chunk - first) // vectors.TILE_INPUTS * num_rows + r
                _fill(job, row + r, chunk, plane_ptr[2], values, tables[table])
        for o in range(start, stop, vectors.TILE_OUTPUTS):
            num, into, stride = (
                min(vectors.TILE_OUTPUTS, stop - o),
                sums.ctypes.data + 4 * (o - start),
                4 * PANEL,
            )
            for chunk in range(first, last, vectors.TILE_INPUTS):
                signs = plane_ptr[0] + o * width + chunk // 8
                num_bytes = min(vectors.TILE_INPUTS // 8, width - chunk // 8)
                own = tables[(chunk - first) // vectors.TILE_INPUTS * num_rows].ctypes.data
                if num_rows == 4:
                    _TILE_4(own, signs, width, num, num_bytes, into, stride)
                elif num_rows == 2:
                    _TILE_2(own, signs, width, num, num_bytes, into, stride)
                else:
                    _TILE_1(own, signs, width, num, num_bytes, into, stride)
    for r in range(num_rows):
        address = job.output + (row + r) * job.output_stride + start * (2 if job.output_half else 4)
        _store(sums[r, : stop - start], address, job.output_half, plane_ptr[1] + 4 * start)


@numba.njit(nogil=True, error_model="numpy")
def _lookup_share(job: Any, thread: int, num_threads: int) -> None:
    """Compute one thread's share of the outputs by lookup: a whole number of tiles."""
    plane_ptrs = array(at(job.plane_ptrs), (job.num_groups, 3), np.int64)
    ranges = array(at(job.ranges), (job.num_groups, 2), np.int32)
    num_tiles = (job.out_features + vectors.TILE_OUTPUTS - 1) // vectors.TILE_OUTPUTS
    begin = num_tiles * thread // num_threads * vectors.TILE_OUTPUTS
    end = min(job.out_features, num_tiles * (thread + 1) // num_threads * vectors.TILE_OUTPUTS)
    sizes = vectors.TILE_INPUTS // vectors.PER_TABLE * vectors.SUMS, PANEL, vectors.TILE_INPUTS
    buffer = np.empty(MAX_ROWS * (sizes[0] + sizes[1]) + sizes[2] + LINE, np.float32)
    # A table across two cache lines is read at half the speed.
    begin_tables = -(buffer.ctypes.data // 4) % LINE
    begin_sums = begin_tables + MAX_ROWS * sizes[0]
    begin_values = begin_sums + MAX_ROWS * sizes[1]
    memory = (
        buffer[begin_values : begin_values + sizes[2]],
        buffer[begin_tables:begin_sums].reshape((MAX_ROWS, sizes[0])),
        buffer[begin_sums:begin_values].reshape((MAX_ROWS, sizes[1])),
    )
    for group in range(job.num_groups):
        row, last = int(ranges[group, 0]), int(ranges[group, 1])
        while plane_ptrs[group, 0] and row < last:
            num_rows = 4 if last - row >= 4 else 2 if last - row >= 2 else 1
            for start in range(begin, end, PANEL):
                _add_panel(job, plane_ptrs[group], (row, num_rows), (start, min(end, start + PANEL)), memory)
            row += num_rows


@numba.njit(nogil=True, error_model="numpy")
def _select_share(job: Any, thread: int, num_threads: int) -> None:
    """Compute one thread's share of the outputs by selection, on any processor."""
    plane_ptrs = array(at(job.plane_ptrs), (job.num_groups, 3), np.int64)
    ranges = array(at(job.ranges), (job.num_groups, 2), np.int32)
    begin = job.out_features * thread // num_threads
    end = job.out_features * (thread + 1) // num_threads
    width, num_blocks = (job.in_features + 7) // 8, job.in_features // vectors.SELECT_BLOCK
    values, sums = np.empty(job.in_features, np.float32), np.empty(end - begin, np.float32)
    for group in range(job.num_groups):
        if plane_ptrs[group, 0] == 0:
            continue
        signs = array(at(plane_ptrs[group, 0]), (job.out_features, width), np.uint8)
        for row in range(ranges[group, 0], ranges[group, 1]):
            _load(values, job.x + row * job.x_stride, job.x_half, plane_ptrs[group, 2])
            total = np.float32(0)
            for value in values:
                total += value
            for o in range(begin, end):
                positive = vectors.masked_sum(values.ctypes.data, signs[o].ctypes.data, num_blocks)
                for i in range(num_blocks * vectors.SELECT_BLOCK, job.in_features):
                    if signs[o, i >> 3] >> (i & 7) & 1:
                        positive += values[i]
                sums[o - begin] = np.float32(2) * positive - total
            address = job.output + row * job.output_stride + begin * (2 if job.output_half else 4)
            _store(sums, address, job.output_half, plane_ptrs[group, 1] + 4 * begin)


@cache
def _matmul(by_lookup: bool) -> Callable[[bytes, int], None]:
    """Compile the product as ``call(job, num_threads)``."""
    return openmp.team(_lookup_share if by_lookup else _select_share, PRODUCT_JOB)


@cache
def _rows() -> Callable[..., None]:
    """Compile `_add_rows`."""
    signature = "void(float32[:, ::1], int64[::1], int64[:, ::1], int32[:, ::1], int64, float32)"
    return numba_cache.function(_add_rows, signature, SOURCES, nogil=True, error_model="numpy")


def _add_rows(
    output: np.ndarray,
    ids: np.ndarray,
    plane_ptrs: np.ndarray,
    ranges: np.ndarray,
    num_ids: int,
    scale: float,
) -> None:
    """Add rows of dense deltas to float32 outputs."""
    in_features = output.shape[1]
    width = (in_features + 7) // 8
    for group in range(len(plane_ptrs)):
        if plane_ptrs[group, 0] == 0:
            continue
        signs = array(at(plane_ptrs[group, 0]), (num_ids, width), np.uint8)
        factor_out = array(at(plane_ptrs[group, 1]), (num_ids,), np.float32)
        for row in range(ranges[group, 0], ranges[group, 1]):
            own, factor = signs[ids[row]], factor_out[ids[row]]
            for i in range(in_features):
                delta = factor if own[i >> 3] >> (i & 7) & 1 else -factor
                if plane_ptrs[group, 2]:
                    delta *= array(at(plane_ptrs[group, 2]), (in_features,), np.float32)[i]
                output[row, i] += delta * scale
