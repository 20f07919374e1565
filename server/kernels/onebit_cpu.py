"""The products of deltas on the CPU (x86-64 and Arm), for all rows and parts of a layer in one call. Signs stay packed.

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
from collections.abc import Callable, Collection, Mapping, Sequence
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
from server.kernels.reference import (
    GAIN,
    LEFT,
    MAX_PLANES,
    PLANE_FIELDS,
    RANK,
    RIGHT,
    SCALE_IN,
    SCALE_OUT,
    SIGNS,
    SINGLE,
    SOURCES,
    WHOLE,
    WHOLE_DTYPE,
    WHOLE_ROWS,
    Plane,
)
from server.kernels.terms import (
    add_scaled,
    begin_totals,
    end_totals,
    float_of_half,
    is_empty,
    load,
    read_inputs,
    read_whole,
    row_at,
)

# Without lookup, groups of at least this many rows are faster in float32 than by selection, measured with AVX2.
MIN_ROWS = 32
# Bytes of a tile of expanded signs. Processors with units for bfloat16 have larger second-level caches.
TILE_BYTES = {torch.float32: 2**19, torch.bfloat16: 2**21}

# The kernel's argument: addresses, and sizes.
EXPANSION_FIELDS = ("signs", "expanded", "numbers", "half", "num_rows", "width")
EXPANSION_JOB = np.dtype([(name, np.int64) for name in EXPANSION_FIELDS])
PACK_EXPANSION = struct.Struct(f"={len(EXPANSION_FIELDS)}q").pack


def add_product(
    total: Tensor,  # [rows, out] float32, changed in place
    x: Tensor,  # [rows, in], any float dtype
    plane: Plane,
    dtype: torch.dtype,  # of the product: float32 or bfloat16
) -> None:
    """Add ``factor_out * (B @ (factor_in * x))``, summed in float32.

    With bfloat16, inputs times `factor_in` and each product are rounded to it before.
    """
    inputs = (x if plane.factor_in is None else x.float() * plane.factor_in).to(dtype)
    width = plane.signs.shape[1]
    num_outputs = max(1, TILE_BYTES[dtype] // (8 * width * dtype.itemsize))
    tile = torch.empty(num_outputs, 8 * width, dtype=dtype)
    for start in range(0, len(plane.signs), num_outputs):
        own = slice(start, start + num_outputs)
        part = plane.signs[own]
        _expand(part, tile)
        product = inputs @ tile[: len(part), : x.shape[1]].T
        block = total[:, own]
        block.copy_(torch.addcmul(block, product.float(), plane.factor_out[own]))


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

# `add_planes` with a choice.
Product = Callable[..., None]


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
    scale_out, scale_in = (torch.ones(size, dtype=torch.float16) for size in (NUM_OUTPUTS, in_features))
    gain = torch.ones(1)
    table = reference.row_of([(signs, scale_out, scale_in, gain)]).view(1, 1, -1)
    plane = reference.Plane(signs, scale_out.float(), scale_in.float())
    found = NEVER
    for rows in reversed(ROWS):
        x = torch.zeros(rows, in_features, dtype=torch.bfloat16)
        output = torch.zeros(rows, NUM_OUTPUTS, dtype=torch.bfloat16)
        order = torch.arange(rows, dtype=torch.int32)
        ranges = torch.tensor([[0, rows]], dtype=torch.int32)

        expanded = partial(_expand_and_add, output, x, plane)
        looked_up = partial(by_lookup, output, x, table, order, ranges, [NUM_OUTPUTS])
        # In turns, so that other work on the machine slows both.
        turns = [(_seconds(expanded), _seconds(looked_up)) for _ in range(NUM_TURNS)]
        expanded_s, looked_up_s = (min(times) for times in zip(*turns, strict=True))
        if expanded_s >= MAX_SHARE * looked_up_s:
            break
        found = rows
    return found


def _expand_and_add(output: Tensor, x: Tensor, plane: Plane) -> None:
    total = output.float()
    add_product(total, x, plane, torch.bfloat16)
    output.copy_(total)


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
    *("table", "ends", "num_parts", "num_slots", "order", "ranges", "in_features"),
)
PRODUCT_JOB = np.dtype([(name, np.int64) for name in PRODUCT_FIELDS])
# Makes the bytes of a job in a tenth of numpy's time.
PACK_PRODUCT = struct.Struct(f"={len(PRODUCT_FIELDS)}q").pack
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
        by_lookup = partial(add_planes, choice=Choice(by_lookup=True))
        _choice = Choice(True, half_rows(in_features, by_lookup))


def add_planes(
    output: Tensor,  # [rows, out of all parts], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    table: Tensor,  # [parts, slots, FIELDS] int64, contiguous
    order: Tensor,  # [positions] int32
    ranges: Tensor,  # [slots, 2] int32
    ends: Sequence[int],
    choice: Choice | None = None,  # None: the one that was made for this processor
) -> None:
    """Compute `server.kernels.add_planes`."""
    if output.dtype not in HALF or output.stride(1) != 1:
        wide = output.float().contiguous()
        add_planes(wide, x, table, order, ranges, ends, choice)
        output.copy_(wide)
        return
    if x.dtype not in HALF or x.stride(1) != 1:
        x = x.float().contiguous()
    choice = choice or _choice
    ranges = _without_long(output, x, table, order, ranges, ends, choice)
    num_threads = 1 if output.numel() * x.shape[1] < PARALLEL_SIGNS else torch.get_num_threads()
    ends_of_parts = _packed_ends(*ends)
    job = PACK_PRODUCT(
        *(output.data_ptr(), output.stride(0) * output.itemsize, HALF[output.dtype]),
        *(x.data_ptr(), x.stride(0) * x.itemsize, HALF[x.dtype]),
        *(table.data_ptr(), ends_of_parts.ctypes.data, len(ends), len(ranges)),
        *(order.data_ptr(), ranges.data_ptr(), x.shape[1]),
    )
    _matmul(choice.by_lookup)(job, num_threads)


def add_rows(
    output: Tensor,  # [rows, in], any float dtype, changed in place
    ids: Tensor,  # [rows] int64
    table: Tensor,  # [1 or 2, slots, FIELDS] int64, contiguous
    order: Tensor,  # [positions] int32
    ranges: Tensor,  # [slots, 2] int32
    num_ids: int,
    scale: float,
) -> None:
    """Compute `server.kernels.add_rows`."""
    # A contiguous float32 output is changed in place.
    wide = output.float().contiguous()
    arrays = (ids.contiguous().numpy(), table.numpy(), order.numpy(), ranges.numpy())
    _rows()(wide.numpy(), *arrays, num_ids, np.float32(scale))
    if wide is not output:
        output.copy_(wide)


@cache
def _packed_ends(*ends: int) -> np.ndarray:
    return np.array(ends, dtype=np.int64)


def _without_long(
    output: Tensor,
    x: Tensor,
    table: Tensor,
    order: Tensor,
    ranges: Tensor,
    ends: Sequence[int],
    choice: Choice,
) -> Tensor:
    """Add what slots with many rows get by torch's products. Return the ranges with those slots empty.

    That is where expanded signs are faster, and where a delta has more than planes.
    """
    expanded_rows, dtype = choice.expansion(x, output)
    least = min(MIN_ROWS, expanded_rows)
    if len(x) < least:
        return ranges
    taken = []
    for slot, (first, last) in enumerate(ranges.tolist()):
        if last - first < least:
            continue
        rows = table[:, slot].tolist()
        is_expanded = last - first >= expanded_rows
        if is_expanded or (last - first >= MIN_ROWS and any(row[WHOLE] or row[LEFT] for row in rows)):
            add = partial(add_product, dtype=dtype if is_expanded else torch.float32)
            _add_long(output, x, rows, order[first:last], ends, add)
            taken.append(slot)
    if not taken:
        return ranges
    ranges = ranges.clone()
    ranges[taken] = 0
    return ranges


def _add_long(
    output: Tensor,
    x: Tensor,
    rows: Sequence[Sequence[int]],  # of the table, by part
    order: Tensor,
    ends: Sequence[int],
    add: Callable[[Tensor, Tensor, Plane], None],
) -> None:
    """Add all terms of one slot to its rows."""
    first, last = int(order[0]), int(order[-1]) + 1
    # Rows that follow each other need no copy.
    own: Any = slice(first, last) if last - first == len(order) else order.long()
    own_x, begin = x[own], 0
    for row, end in zip(rows, ends, strict=True):
        terms = reference.Terms.of(row, end - begin, x.shape[1], x.device)
        if not terms.is_empty:
            before = output[own, begin:end]
            output[own, begin:end] = reference.summed(before, own_x, terms, add).to(output.dtype)
        begin = end


_TILE_1, _TILE_2, _TILE_4 = vectors.add_tile(1), vectors.add_tile(2), vectors.add_tile(4)


@numba.njit(error_model="numpy")
def _fill(job: Any, number: int, first: int, scale_in: int, values: np.ndarray, tables: np.ndarray) -> None:
    """Fill the tables of a row's vectors.TILE_INPUTS inputs from `first` on. Inputs beyond the last one are zero."""
    num = min(vectors.TILE_INPUTS, job.in_features - first)
    address = job.x + number * job.x_stride + first * (2 if job.x_half else 4)
    load(values[:num], address, job.x_half, scale_in + 2 * first if scale_in else 0)
    for i in range(num, vectors.TILE_INPUTS):
        values[i] = 0
    num_words = (num + vectors.WORD - 1) // vectors.WORD
    vectors.fill_tables(values.ctypes.data, tables.ctypes.data, num_words * vectors.WORD // vectors.PER_TABLE)


@numba.njit(error_model="numpy")
def _sum_panel(
    job: Any,
    plane: np.ndarray,  # [PLANE_FIELDS] int64
    rows: np.ndarray,  # numbers of 1, 2 or MAX_ROWS rows
    outputs: tuple[int, int],  # the first output and the one after the last
    memory: tuple[np.ndarray, np.ndarray, np.ndarray],  # buffers of inputs, tables and sums
) -> None:
    """Compute the sums of a plane's signed inputs for the outputs of one panel, by tables."""
    values, tables, sums = memory
    start, stop = outputs
    num_rows = len(rows)
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
                _fill(job, rows[r], chunk, plane[SCALE_IN], values, tables[table])
        for o in range(start, stop, vectors.TILE_OUTPUTS):
            num, into, stride = (
                min(vectors.TILE_OUTPUTS, stop - o),
                sums.ctypes.data + 4 * (o - start),
                4 * PANEL,
            )
            for chunk in range(first, last, vectors.TILE_INPUTS):
                signs = plane[SIGNS] + o * width + chunk // 8
                num_bytes = min(vectors.TILE_INPUTS // 8, width - chunk // 8)
                own = tables[(chunk - first) // vectors.TILE_INPUTS * num_rows].ctypes.data
                if num_rows == 4:
                    _TILE_4(own, signs, width, num, num_bytes, into, stride)
                elif num_rows == 2:
                    _TILE_2(own, signs, width, num, num_bytes, into, stride)
                else:
                    _TILE_1(own, signs, width, num, num_bytes, into, stride)


@numba.njit(nogil=True, error_model="numpy")
def _lookup_share(job: Any, thread: int, num_threads: int) -> None:
    """Compute one thread's share of the outputs by lookup: a whole number of tiles of each part."""
    ranges = array(at(job.ranges), (job.num_slots, 2), np.int32)
    ends = array(at(job.ends), job.num_parts, np.int64)
    sizes = vectors.TILE_INPUTS // vectors.PER_TABLE * vectors.SUMS, PANEL, vectors.TILE_INPUTS
    buffer = np.empty(MAX_ROWS * (sizes[0] + 2 * sizes[1]) + sizes[2] + LINE, np.float32)
    # A table across two cache lines is read at half the speed.
    first_table = -(buffer.ctypes.data // 4) % LINE
    first_sum = first_table + MAX_ROWS * sizes[0]
    first_total = first_sum + MAX_ROWS * sizes[1]
    first_value = first_total + MAX_ROWS * sizes[1]
    memory = (
        buffer[first_value : first_value + sizes[2]],
        buffer[first_table:first_sum].reshape((MAX_ROWS, sizes[0])),
        buffer[first_sum:first_total].reshape((MAX_ROWS, sizes[1])),
    )
    totals = buffer[first_total:first_value].reshape((MAX_ROWS, sizes[1]))
    itemsize = 2 if job.output_half else 4
    for part in range(job.num_parts):
        first_output = ends[part - 1] if part else 0
        out_features = ends[part] - first_output
        num_tiles = (out_features + vectors.TILE_OUTPUTS - 1) // vectors.TILE_OUTPUTS
        begin = num_tiles * thread // num_threads * vectors.TILE_OUTPUTS
        for slot in range(job.num_slots):
            position, last = int(ranges[slot, 0]), int(ranges[slot, 1])
            row = row_at(job, part, slot)
            if position >= last or is_empty(row):
                continue
            end = min(out_features, num_tiles * (thread + 1) // num_threads * vectors.TILE_OUTPUTS)
            if row[WHOLE]:
                end = min(end, row[WHOLE_ROWS])
            order = array(at(job.order), last, np.int32)
            x = np.empty((MAX_ROWS, job.in_features if row[WHOLE] or row[LEFT] else 0), np.float32)
            inner = np.empty((MAX_ROWS, row[RANK]), np.float32)
            while position < last:
                num_rows = 4 if last - position >= 4 else 2 if last - position >= 2 else 1
                rows = order[position : position + num_rows]
                position += num_rows
                for r in range(num_rows):
                    read_inputs(job, rows[r], row, x[r], inner[r])
                for start in range(begin, end, PANEL):
                    stop = min(end, start + PANEL)
                    address = job.output + (first_output + start) * itemsize
                    for r in range(num_rows):
                        into = address + rows[r] * job.output_stride
                        begin_totals(totals[r, : stop - start], into, job.output_half, row, x[r], start)
                    for plane in range(MAX_PLANES):
                        if row[PLANE_FIELDS * plane] == 0:
                            break
                        fields = row[PLANE_FIELDS * plane : PLANE_FIELDS * (plane + 1)]
                        _sum_panel(job, fields, rows, (start, stop), memory)
                        for r in range(num_rows):
                            own = totals[r, : stop - start]
                            add_scaled(own, memory[2][r, : stop - start], row, plane, start)
                    for r in range(num_rows):
                        into = address + rows[r] * job.output_stride
                        end_totals(totals[r, : stop - start], into, job.output_half, row, inner[r], start)


@numba.njit(nogil=True, error_model="numpy")
def _select_share(job: Any, thread: int, num_threads: int) -> None:
    """Compute one thread's share of the outputs by selection, on any processor."""
    ranges = array(at(job.ranges), (job.num_slots, 2), np.int32)
    ends = array(at(job.ends), job.num_parts, np.int64)
    width, num_blocks = (job.in_features + 7) // 8, job.in_features // vectors.SELECT_BLOCK
    values, x = np.empty(job.in_features, np.float32), np.empty(job.in_features, np.float32)
    itemsize = 2 if job.output_half else 4
    for part in range(job.num_parts):
        first_output = ends[part - 1] if part else 0
        out_features = ends[part] - first_output
        begin = out_features * thread // num_threads
        for slot in range(job.num_slots):
            position, last = int(ranges[slot, 0]), int(ranges[slot, 1])
            row = row_at(job, part, slot)
            if position >= last or is_empty(row):
                continue
            end = out_features * (thread + 1) // num_threads
            if row[WHOLE]:
                end = min(end, row[WHOLE_ROWS])
            if begin >= end:
                continue
            order = array(at(job.order), last, np.int32)
            sums, totals = np.empty(end - begin, np.float32), np.empty(end - begin, np.float32)
            inner = np.empty(row[RANK], np.float32)
            while position < last:
                number = order[position]
                position += 1
                read_inputs(job, number, row, x, inner)
                into = job.output + number * job.output_stride + (first_output + begin) * itemsize
                begin_totals(totals, into, job.output_half, row, x, begin)
                for plane in range(MAX_PLANES):
                    signs_at = row[PLANE_FIELDS * plane + SIGNS]
                    if signs_at == 0:
                        break
                    signs = array(at(signs_at), (out_features, width), np.uint8)
                    scale_in = row[PLANE_FIELDS * plane + SCALE_IN]
                    load(values, job.x + number * job.x_stride, job.x_half, scale_in)
                    total = np.float32(0)
                    for value in values:
                        total += value
                    for o in range(begin, end):
                        positive = vectors.masked_sum(values.ctypes.data, signs[o].ctypes.data, num_blocks)
                        for i in range(num_blocks * vectors.SELECT_BLOCK, job.in_features):
                            if signs[o, i >> 3] >> (i & 7) & 1:
                                positive += values[i]
                        sums[o - begin] = np.float32(2) * positive - total
                    add_scaled(totals, sums, row, plane, begin)
                end_totals(totals, into, job.output_half, row, inner, begin)


@cache
def _matmul(by_lookup: bool) -> Callable[[bytes, int], None]:
    """Compile the product as ``call(job, num_threads)``."""
    return openmp.team(_lookup_share if by_lookup else _select_share, PRODUCT_JOB)


@cache
def _rows() -> Callable[..., None]:
    """Compile `_add_rows`."""
    signature = (
        "void(float32[:, ::1], int64[::1], int64[:, :, ::1], int32[::1], int32[:, ::1], int64, float32)"
    )
    return numba_cache.function(_add_rows, signature, SOURCES, nogil=True, error_model="numpy")


def _add_rows(
    output: np.ndarray,
    ids: np.ndarray,
    table: np.ndarray,
    order: np.ndarray,
    ranges: np.ndarray,
    num_ids: int,
    scale: float,
) -> None:
    """Add rows of dense deltas to float32 outputs."""
    in_features = output.shape[1]
    width = (in_features + 7) // 8
    own = np.empty(in_features, np.float32)
    for slot in range(len(ranges)):
        for position in range(ranges[slot, 0], ranges[slot, 1]):
            number = order[position]
            # The second part has the rows that the base lacks.
            part = 1 if ids[number] >= num_ids else 0
            if part >= len(table):
                continue
            row, own_id = table[part, slot], ids[number] - part * num_ids
            if own_id < 0 or (row[WHOLE] and own_id >= row[WHOLE_ROWS]):
                continue
            if row[WHOLE]:
                itemsize = 4 if row[WHOLE_DTYPE] == 0 else 2
                read_whole(own, row[WHOLE] + own_id * in_features * itemsize, row[WHOLE_DTYPE])
                for i in range(in_features):
                    output[number, i] = own[i] * scale
            for plane in range(MAX_PLANES):
                fields = row[PLANE_FIELDS * plane : PLANE_FIELDS * (plane + 1)]
                if fields[SIGNS] == 0:
                    break
                signs = array(at(fields[SIGNS] + own_id * width), width, np.uint8)
                factor = array(at(fields[GAIN]), 1, np.float32)[0]
                if fields[SCALE_OUT]:
                    index = 0 if row[SINGLE] >> plane & 1 else own_id
                    factor *= float_of_half(array(at(fields[SCALE_OUT] + 2 * index), 1, np.uint16)[0])
                for i in range(in_features):
                    delta = factor if signs[i >> 3] >> (i & 7) & 1 else -factor
                    if fields[SCALE_IN]:
                        delta *= float_of_half(array(at(fields[SCALE_IN]), in_features, np.uint16)[i])
                    output[number, i] += delta * scale
            if row[LEFT]:
                left = array(at(row[LEFT] + 2 * own_id * row[RANK]), row[RANK], np.uint16)
                right = array(at(row[RIGHT]), (row[RANK], in_features), np.uint16)
                for i in range(in_features):
                    own[i] = 0
                for k in range(row[RANK]):
                    factor = float_of_half(left[k])
                    for i in range(in_features):
                        own[i] += factor * float_of_half(right[k, i])
                for i in range(in_features):
                    output[number, i] += own[i] * scale
