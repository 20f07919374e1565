"""Draws the next tokens of a batch on the CPU, compiled by numba: each row by its own parameters, without a sort.

The least logit that top-k or top-p keeps is looked for among the few between two bounds: the greatest logits of blocks
give them, or a sample of the row suggests them, and if it is not there, all are looked at. They are divided by their
bits until one value is left, so the cost has a bound whatever the logits are. The draw walks through the weights in the
order of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from server.kernels import openmp
from server.kernels.attention_cpu import exp
from server.kernels.openmp import array, at
from server.kernels.reference import Draw

# Logits that are added up at a time.
BLOCK = 512
# Logits of a row's first and second sample, and the bins of the second. A row of fewer than twice as many has none.
FEW, MANY, BINS = 256, 4096, 256
# How many standard deviations of a sample's sums the bounds are apart from the target.
DEVIATIONS = 3.0
# The bits of a logit's key that divide what is between the bounds: of these many each, from the highest on.
LEVELS = ((21, 11), (10, 11), (0, 10))
LEAST = np.finfo(np.float32).min
INFINITE = np.float32(np.inf)
# The bits of infinity: those of a NaN without its sign are greater.
INFINITE_BITS = np.int32(0x7F800000)
PLACES = np.uint64(0x0001020304050607)
# Smaller batches are drawn on one thread: waking the others costs more than they save.
PARALLEL_LOGITS = 1 << 16

# The greatest logit, and what multiplies a logit's distance from it: its weight is e to the power of the product.
Weigh = tuple[np.float32, np.float32]
# Room for as many places, keys, weights and copies of weights as a row has logits, and for a block's flags.
Memory = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]

# A `Draw`, with the addresses of its lists.
ROW = np.dtype(
    [
        (name, np.int64)
        for name in ("num_tokens", "top_k", "seen", "num_seen", "biased", "num_biased", "biases")
    ]
    + [(name, np.float64) for name in ("temperature", "top_p", "min_p", "penalty", "uniform")]
)
_packed_row = Struct("7q5d").pack
# The kernels' arguments: addresses, and sizes.
_ROWS = [(name, np.int64) for name in ("logits", "stride", "num_rows")]
JOB = np.dtype(_ROWS + [(name, np.int64) for name in ("rows", "tokens", "least")])
SCORE_JOB = np.dtype(
    _ROWS + [(name, np.int64) for name in ("num_tokens", "num_top", "tokens", "own", "values", "ids")]
)


def draw(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Compute `server.kernels.draw`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows = np.frombuffer(b"".join(map(_row, draws)), np.uint8)
    tokens, least = np.empty(len(draws), np.int64), np.empty(len(draws), np.float32)
    addresses = rows.ctypes.data, tokens.ctypes.data, least.ctypes.data
    job = np.array((logits.data_ptr(), logits.stride(0), len(draws), *addresses), JOB)
    draw_rows, _ = compiled_kernels()
    draw_rows(job.tobytes(), _num_threads(logits))
    return tokens.tolist(), least.tolist()


def score(
    logits: Tensor, tokens: Sequence[int], num_top: int
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Compute `server.kernels.score`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, num_top = len(tokens), min(num_top, logits.shape[1])
    wanted, own = np.array(tokens, np.int64), np.empty(num_rows, np.float32)
    values, ids = np.empty((num_rows, num_top), np.float32), np.empty((num_rows, num_top), np.int64)
    addresses = tuple(each.ctypes.data for each in (wanted, own, values, ids))
    sizes = logits.data_ptr(), logits.stride(0), num_rows, logits.shape[1], num_top
    job = np.array((*sizes, *addresses), SCORE_JOB)
    _, score_rows = compiled_kernels()
    score_rows(job.tobytes(), _num_threads(logits))
    return own.tolist(), ids.tolist(), values.tolist()


def _row(one: Draw) -> bytes:
    seen, num_seen = one.seen.buffer_info()
    biased, num_biased = one.biased.buffer_info()
    return _packed_row(
        *(one.num_tokens, one.top_k, seen, num_seen, biased, num_biased, one.biases.buffer_info()[0]),
        *(one.temperature, one.top_p, one.min_p, one.penalty, one.uniform),
    )


def _num_threads(logits: Tensor) -> int:
    return 1 if logits.numel() < PARALLEL_LOGITS else min(len(logits), torch.get_num_threads())


@numba.njit(error_model="numpy")
def _key(x: np.float32) -> np.uint32:
    """Return an integer that orders as the logits do."""
    bits = np.float32(x + np.float32(0)).view(np.uint32)
    return ~bits if bits >> np.uint32(31) else bits | np.uint32(0x80000000)


@numba.njit(error_model="numpy")
def _logit(key: np.uint32) -> np.float32:
    """Return the logit that has a key."""
    bits = key & np.uint32(0x7FFFFFFF) if key >> np.uint32(31) else ~key
    return np.uint32(bits).view(np.float32)


@numba.njit(error_model="numpy")
def _extremes(bits: np.ndarray) -> tuple[np.int32, np.int32]:
    """Return the greatest logit's signed key, and the greatest bits without a sign, of logits given as int32."""
    # In integers, which LLVM compares in vectors whatever a NaN is.
    greatest, largest = np.int32(-0x80000000), np.int32(0)
    for i in range(len(bits)):
        size = bits[i] & np.int32(0x7FFFFFFF)
        greatest = max(greatest, np.int32(bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))))
        largest = max(largest, size)
    return greatest, largest


@numba.njit(error_model="numpy")
def _maxima(x: np.ndarray, maxima: np.ndarray) -> np.float32:
    """Compute the greatest logit of each block, and return that of all; NaN if any is."""
    bits = x.view(np.int32)
    greatest, largest = -INFINITE, np.int32(0)
    for block in range(len(maxima)):
        key, size = _extremes(bits[block * BLOCK : (block + 1) * BLOCK])
        largest = max(largest, size)
        maxima[block] = np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)
        greatest = max(greatest, maxima[block])
    return greatest if largest <= INFINITE_BITS else np.float32(np.nan)


@numba.njit(error_model="numpy", fastmath={"nsz", "reassoc"})
def _sum_from(x: np.ndarray, weigh: Weigh, least: np.float32) -> np.float32:
    """Return the sum of the weights of logits that are not below `least`."""
    # Not kept: to write a row of weights takes longer than to compute it again.
    greatest, factor = weigh
    total = np.float32(0)
    for i in range(len(x)):
        total += exp((x[i] - greatest) * factor) if x[i] >= least else np.float32(0)
    return total


@numba.njit(error_model="numpy")
def _count_from(x: np.ndarray, least: np.float32) -> np.int32:
    """Return how many logits are not below `least`."""
    count = np.int32(0)
    for i in range(len(x)):
        count += np.int32(x[i] >= least)
    return count


@numba.njit(error_model="numpy")
def _find(counts: np.ndarray, sums: np.ndarray, target: float, by_sum: bool) -> tuple[int, int, float]:
    """Return the bin in which the count or sum from the last bin on reaches `target`, and both of those behind it.

    Sums in another order differ in their last bits, so that the first bin with something in it may have to do.
    """
    count, total = 0, 0.0
    found, before_count, before_total = 0, 0, 0.0
    for step in range(len(counts)):
        j = len(counts) - 1 - step
        if counts[j] == 0:
            continue
        found, before_count, before_total = j, count, total
        count += counts[j]
        total += sums[j]
        if (total if by_sum else float(count)) >= target:
            break
    return found, before_count, before_total


@numba.njit(error_model="numpy")
def _least_of(
    keys: np.ndarray,  # [number] uint32, overwritten
    weights: np.ndarray,  # [number] float32: theirs, overwritten
    target: float,
    by_sum: bool,
) -> np.float32:
    """Return the logit with which the greatest ones reach `target`."""
    counts, sums = np.empty(1 << 11, np.int64), np.empty(1 << 11)
    number = len(keys)
    for shift, num_bits in LEVELS:
        size = 1 << num_bits
        counts[:size], sums[:size] = 0, 0
        for i in range(number):
            j = (keys[i] >> np.uint32(shift)) & np.uint32(size - 1)
            counts[j] += 1
            sums[j] += weights[i]
        found, count, total = _find(counts[:size], sums[:size], target, by_sum)
        target -= total if by_sum else count
        kept = 0
        for i in range(number):
            if (keys[i] >> np.uint32(shift)) & np.uint32(size - 1) == np.uint32(found):
                keys[kept], weights[kept] = keys[i], weights[i]
                kept += 1
        number = kept
    return _logit(keys[0])


@numba.njit(error_model="numpy")
def _between(
    x: np.ndarray,  # [at most BLOCK] float32
    low: np.float32,
    high: np.float32,
    first: int,
    places: np.ndarray,
    number: np.uintp,
    flags: np.ndarray,  # [BLOCK] uint8, overwritten
) -> np.uintp:
    """Note the places of logits from `low` to below `high` behind `number` others; return how many there are now."""
    # Compared in vectors; of eight flags at a time, only those that are set are looked at.
    for i in range(len(x)):
        flags[i] = np.uint8(x[i] >= low) & np.uint8(x[i] < high)
    flags[len(x) :] = 0
    eights = flags.view(np.uint64)
    for eight in range((len(x) + 7) // 8):
        left = eights[eight]
        while left != 0:
            lowest = left & (~left + np.uint64(1))
            # The highest byte of the product is the place of the one byte that is set.
            places[number] = first + 8 * eight + np.intp((lowest * PLACES) >> np.uint64(56))
            number += np.uintp(1)
            left ^= lowest
    return number


@numba.njit(error_model="numpy")
def _sample(
    x: np.ndarray, size: int, weigh: Weigh, by_sum: bool, floor: np.float32, is_sorted: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits of a row that are evenly apart, and the weights of those that are not below `floor`."""
    logits, weights = np.empty(size, np.float32), np.ones(size, np.float32)
    step = len(x) // size
    for i in range(size):
        logits[i] = x[i * step]
    if is_sorted:
        logits.sort()
    greatest, factor = weigh
    if by_sum:
        for i in range(size):
            weights[i] = exp((logits[i] - greatest) * factor) if logits[i] >= floor else np.float32(0)
    return logits, weights


@numba.njit(error_model="numpy")
def _deviation(amount: float, squares: float, size: int) -> float:
    """Return how far the sum of a sample's weights may be from what the row has, with the sum of their squares."""
    return DEVIATIONS * math.sqrt(max(squares - amount * amount / size, 0.0))


@numba.njit(error_model="numpy")
def _bounds(
    x: np.ndarray,  # [tokens] float32
    weigh: Weigh,
    below: float,
    by_sum: bool,
    floor: np.float32,
) -> tuple[np.float32, np.float32]:
    """Return bounds: the first logit at which the least ones add up to `below` is from the first to below the second,
    most likely.

    They are added up from the least on, because rare logits with large weights, which a sample may lack, come last
    then. Few of them, in their order, give bounds, in which bins of many give narrower ones.
    """
    low, high = floor, INFINITE
    if len(x) < 2 * MANY:
        return low, high
    logits, weights = _sample(x, FEW, weigh, by_sum, floor, True)
    goal, amount, squares = below * FEW / len(x), 0.0, 0.0
    for i in range(FEW):
        before = amount
        amount += weights[i]
        squares += weights[i] * weights[i]
        deviation = _deviation(amount, squares, FEW)
        if amount + deviation <= goal:
            low = max(low, logits[i])
        if before - deviation >= goal:
            high = np.nextafter(logits[i], INFINITE)
            break
    # Not the floor: a few logits that are far below the others would leave them one bin.
    first = low if low > floor else max(floor, logits[0])
    width = (min(high, weigh[0]) - first) / BINS
    if not 0 < width < INFINITE:
        return low, high
    logits, weights = _sample(x, MANY, weigh, by_sum, floor, False)
    amounts, all_squares = np.zeros(BINS + 1), np.zeros(BINS + 1)
    for i in range(MANY):
        if logits[i] < high:
            # The first is what lies below all bins.
            j = 0 if logits[i] < first else min(1 + int((logits[i] - first) / width), BINS)
            amounts[j] += weights[i]
            all_squares[j] += weights[i] * weights[i]
    goal, amount, squares = below * MANY / len(x), 0.0, 0.0
    for j in range(BINS + 1):
        edge = np.float32(first + j * width)
        amount += amounts[j]
        squares += all_squares[j]
        deviation = _deviation(amount, squares, MANY)
        if amount + deviation <= goal:
            low = max(low, edge)
        if amount - deviation >= goal:
            return low, min(high, np.nextafter(edge, INFINITE))
    return low, high


@numba.njit(error_model="numpy")
def _least_kept(
    x: np.ndarray,  # [tokens] float32
    maxima: np.ndarray,  # [blocks] float32
    weigh: Weigh,
    target: float,
    total: float,  # the sum or the number of all from `floor` on
    by_sum: bool,
    floor: np.float32,
    memory: Memory,
    sums: np.ndarray,  # [blocks] float64: becomes the sum of each block's weights that are kept, with `by_sum`
) -> np.float32:
    """Return the greatest logit down to which weights or logits add up to `target`, and at least `floor`."""
    places, keys, weights, copies, flags = memory
    greatest, factor = weigh
    if by_sum or target > len(maxima):
        low, high = _bounds(x, weigh, total - target, by_sum, floor)
    else:
        # So many blocks have a logit that is not below it.
        first = len(maxima) - np.intp(target)
        low, high = max(floor, np.partition(maxima, first)[first]), INFINITE
    while True:
        above, number = 0.0, np.uintp(0)
        for block in range(len(maxima)):
            sums[block] = 0
            if maxima[block] < low:
                continue
            own = x[block * BLOCK : (block + 1) * BLOCK]
            if maxima[block] >= high:
                sums[block] = _sum_from(own, weigh, high) if by_sum else _count_from(own, high)
                above += sums[block]
            number = _between(own, low, high, block * BLOCK, places, number, flags)
        for i in range(number):
            keys[i], weights[i] = _key(x[places[i]]), x[places[i]]
        for i in range(number):
            weights[i] = exp((weights[i] - greatest) * factor) if by_sum else np.float32(1)
        inside = 0.0
        for i in range(number):
            inside += float(weights[i])
        if (low == floor and high == INFINITE) or above < target <= above + inside:
            break
        low, high = floor, INFINITE
    copies[:number] = weights[:number]
    least = _least_of(keys[:number], weights[:number], target - above, by_sum)
    if by_sum:
        for i in range(number):
            if x[places[i]] >= least:
                sums[places[i] // BLOCK] += copies[i]
    return least


@numba.njit(error_model="numpy")
def _walk(x: np.ndarray, weigh: Weigh, least: np.float32, target: float) -> int:
    """Return the first kept token with which the sum of weights exceeds `target`, or else the last one; -1 for none."""
    greatest, factor = weigh
    token, total = -1, 0.0
    for i in range(len(x)):
        if x[i] >= least:
            token = i
            total += float(exp((x[i] - greatest) * factor))
            if total > target:
                break
    return token


@numba.njit(error_model="numpy")
def _sum_blocks(
    x: np.ndarray, maxima: np.ndarray, weigh: Weigh, least: np.float32, sums: np.ndarray
) -> float:
    """Compute the sum of each block's weights that are kept, and return that of all."""
    total = 0.0
    for block in range(len(maxima)):
        sums[block] = 0
        if maxima[block] >= least:
            sums[block] = _sum_from(x[block * BLOCK : (block + 1) * BLOCK], weigh, least)
        total += sums[block]
    return total


@numba.njit(error_model="numpy")
def _memory(size: int) -> Memory:
    places, keys = np.empty(size, np.int32), np.empty(size, np.uint32)
    return places, keys, np.empty(size, np.float32), np.empty(size, np.float32), np.empty(BLOCK, np.uint8)


@numba.njit(error_model="numpy")
def _draw(x: np.ndarray, row: Any, memory: Memory) -> tuple[int, np.float32]:
    """Return the token of one row, and the least logit that is kept."""
    num_blocks = (len(x) + BLOCK - 1) // BLOCK
    maxima, sums = np.empty(num_blocks, np.float32), np.empty(num_blocks)
    greatest = _maxima(x, maxima)
    if not np.isfinite(greatest):
        return -1, greatest
    if row.temperature == 0:
        block = 0
        while maxima[block] < greatest:
            block += 1
        first = block * BLOCK
        while x[first] < greatest:
            first += 1
        return first, greatest
    weigh, least = (greatest, np.float32(1 / row.temperature)), np.float32(LEAST)
    if 0 < row.top_k < len(x):
        least = _least_kept(x, maxima, weigh, float(row.top_k), float(len(x)), False, least, memory, sums)
    total = _sum_blocks(x, maxima, weigh, least, sums)
    if row.top_p < 1:
        least = _least_kept(x, maxima, weigh, row.top_p * total, total, True, least, memory, sums)
        total = sums.sum()
    if row.min_p > 0:
        least = max(least, np.float32(greatest + row.temperature * np.log(row.min_p)))
        total = _sum_blocks(x, maxima, weigh, least, sums)
    target, chosen = row.uniform * total, -1
    for block in range(num_blocks):
        if sums[block] > 0:
            chosen = block
            if target < sums[block]:
                break
            target -= sums[block]
    first = chosen * BLOCK
    return first + _walk(x[first : first + BLOCK], weigh, least, target), least


@numba.njit(nogil=True, error_model="numpy")
def _draw_share(job: Any, thread: int, num_threads: int) -> None:
    """Draw one thread's rows. A row's logits are changed by its biases and its penalty, and restored."""
    rows = array(at(job.rows), (job.num_rows,), ROW)
    tokens = array(at(job.tokens), (job.num_rows,), np.int64)
    least = array(at(job.least), (job.num_rows,), np.float32)
    size = 0
    for number in range(thread, job.num_rows, num_threads):
        size = max(size, rows[number].num_tokens)
    # Once for all rows: memory of this size comes from the system, page by page, and pages only when they are written.
    memory = _memory(size)
    for number in range(thread, job.num_rows, num_threads):
        row = rows[number]
        x = array(at(job.logits + 4 * number * job.stride), (row.num_tokens,), np.float32)
        biased = array(at(row.biased), (row.num_biased,), np.int32)
        biases = array(at(row.biases), (row.num_biased,), np.float32)
        seen = array(at(row.seen), (row.num_seen,), np.int32)
        before_biases, before_penalty = x[biased], np.empty(0, np.float32)
        for i in range(len(biased)):
            x[biased[i]] += biases[i]
        if row.penalty != 1:
            before_penalty = x[seen]
            for token in seen:
                x[token] = np.float32(x[token] * row.penalty if x[token] < 0 else x[token] / row.penalty)
        tokens[number], least[number] = _draw(x, row, memory)
        if row.penalty != 1:
            x[seen] = before_penalty
        x[biased] = before_biases


@numba.njit(error_model="numpy")
def _best(x: np.ndarray, maxima: np.ndarray, least: np.float32, values: np.ndarray, ids: np.ndarray) -> None:
    """Find the greatest logits, in their order; of equal ones the first tokens. None of them is below `least`."""
    number = 0
    for block in range(len(maxima)):
        if maxima[block] < least:
            continue
        for i in range(block * BLOCK, min((block + 1) * BLOCK, len(x))):
            if x[i] < least or (number == len(values) and x[i] <= values[-1]):
                continue
            place = min(number, len(values) - 1)
            while place > 0 and values[place - 1] < x[i]:
                values[place], ids[place] = values[place - 1], ids[place - 1]
                place -= 1
            values[place], ids[place] = x[i], i
            number = min(number + 1, len(values))


@numba.njit(nogil=True, error_model="numpy")
def _score_share(job: Any, thread: int, num_threads: int) -> None:
    """Compute the log-probabilities of one thread's rows."""
    tokens = array(at(job.tokens), (job.num_rows,), np.int64)
    own = array(at(job.own), (job.num_rows,), np.float32)
    values = array(at(job.values), (job.num_rows, job.num_top), np.float32)
    ids = array(at(job.ids), (job.num_rows, job.num_top), np.int64)
    size = job.num_tokens
    num_blocks = (size + BLOCK - 1) // BLOCK
    maxima, sums = np.empty(num_blocks, np.float32), np.empty(num_blocks)
    memory = _memory(size)
    for number in range(thread, job.num_rows, num_threads):
        x = array(at(job.logits + 4 * number * job.stride), (size,), np.float32)
        greatest = _maxima(x, maxima)
        weigh = greatest, np.float32(1)
        log_total = np.float32(greatest + math.log(_sum_blocks(x, maxima, weigh, np.float32(LEAST), sums)))
        own[number] = x[tokens[number]] - log_total
        values[number], ids[number] = -INFINITE, 0
        if job.num_top == 0 or not np.isfinite(greatest):
            continue
        least, target = -INFINITE, float(job.num_top)
        if job.num_top < size:
            least = _least_kept(x, maxima, weigh, target, float(size), False, np.float32(LEAST), memory, sums)
        _best(x, maxima, least, values[number], ids[number])
        values[number] -= log_total


@cache
def compiled_kernels() -> tuple[Callable[[bytes, int], None], Callable[[bytes, int], None]]:
    """Return the kernels as ``call(job, num_threads)``: `draw` and `score`."""
    return openmp.team(_draw_share, JOB), openmp.team(_score_share, SCORE_JOB)
