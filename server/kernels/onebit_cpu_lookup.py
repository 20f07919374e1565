"""Vector code for processors with AVX-512: signs look up the signed sums of four inputs in one register.

Four inputs have sixteen signed sums: one register of float32. The four signs of sixteen outputs are sixteen 4-bit
indices, so one permutation looks up all sixteen outputs: 64 signs per permutation and addition, against 16 when signs
select inputs. The indices of sixteen outputs must lie side by side, so a tile of 16 outputs x 512 inputs (16 registers
of packed signs) is transposed in registers. A permutation ignores all but the lowest four bits of each lane, so one
rotation moves on to the next four signs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

# The size of a tile.
OUTPUTS = 16
INPUTS = 512
# Inputs whose signs fill one 32-bit lane.
WORD = 32
# A table holds the signed sums of PER_TABLE inputs.
PER_TABLE = 4
SUMS = 16
# Accumulators per row, so that additions overlap.
NUM_CHAINS = 4
# Tiles to prefetch ahead: hardware prefetchers do not follow the stride between rows of signs.
PREFETCH = 4

# Numba initialises all of LLVM except the parser of inline assembly.
llvm.initialize_native_asmparser()

_BYTE, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, 16), ir.VectorType(_INT, 16)
_BYTES, _BYTE_MASK = ir.VectorType(_BYTE, 64), ir.VectorType(ir.IntType(1), 64)


@cache
def is_supported() -> bool:
    """Return whether the processor has AVX-512 and numba's settings allow it."""
    config: Any = numba.config
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None or not config.ENABLE_AVX:
        return False
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512f") and features.get("avx512bw"))


def _fill_tables(typing_context: Any, values: Any, tables: Any, num_tables: Any) -> Any:
    """Write the SUMS signed sums of each PER_TABLE float32 at `values`. Bit k of a sum's index is the k-th sign."""
    signature = types.void(types.intp, types.intp, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = builder.inttoptr(arguments[0], _FLOAT.as_pointer())
        tables = builder.inttoptr(arguments[1], _FLOATS.as_pointer())
        add = _function(builder, "llvm.fma.v16f32", _FLOATS, [_FLOATS] * 3)
        before, loop, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        table = builder.phi(_LONG)
        table.add_incoming(_long(0), before)
        total = ir.Constant(_FLOATS, [0.0] * SUMS)
        for k in range(PER_TABLE):
            position = builder.add(builder.mul(table, _long(PER_TABLE)), _long(k))
            value = _broadcast(builder, builder.load(builder.gep(values, [position])))
            signs = ir.Constant(_FLOATS, [1.0 if number >> k & 1 else -1.0 for number in range(SUMS)])
            total = builder.call(add, [value, signs, total])
        builder.store(total, builder.gep(tables, [table])).align = 4
        following = builder.add(table, _long(1))
        table.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, arguments[2]), loop, done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return signature, codegen


fill_tables: Any = intrinsic(_fill_tables)


def add_tile(num_rows: int) -> Any:
    """Make the intrinsic that adds a tile's products with `num_rows` rows of inputs to their sums.

    Its arguments are addresses and counts: ``(tables, signs, stride, num_outputs, num_bytes, sums, sums_stride)``.
    `tables` are those of INPUTS inputs of each row, one row after the other. `signs` are `num_bytes` bytes of each of
    `num_outputs` rows, `stride` bytes apart; nothing beyond them is read. `sums` are OUTPUTS float32 per row of
    inputs, `sums_stride` bytes apart. The order of additions in a row does not depend on `num_rows`.
    """

    @intrinsic
    def tile(
        typing_context: Any,
        tables: Any,
        signs: Any,
        stride: Any,
        num_outputs: Any,
        num_bytes: Any,
        sums: Any,
        sums_stride: Any,
    ) -> Any:
        signature = types.void(*[types.intp] * 7)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            tables, signs, stride, num_outputs, num_bytes, sums, sums_stride = arguments
            words = _words(builder, signs, stride, num_outputs, num_bytes)
            num_words = builder.sdiv(builder.add(num_bytes, _long(3)), _long(4))
            totals = _lookups(builder, tables, words, num_words, num_rows)
            for row, total in enumerate(totals):
                address = builder.add(sums, builder.mul(sums_stride, _long(row)))
                pointer = builder.inttoptr(address, _FLOATS.as_pointer())
                before = builder.load(pointer)
                before.align = 4
                builder.store(builder.fadd(before, total), pointer).align = 4
            return context.get_dummy_value()

        return signature, codegen

    return tile


def _words(builder: Any, signs: Any, stride: Any, num_outputs: Any, num_bytes: Any) -> Any:
    """Put the transposed signs on the stack: word `w` holds inputs 32 w to 32 w + 31 of all outputs of the tile."""
    with builder.goto_entry_block():
        words = builder.alloca(_INTS, OUTPUTS)
        words.align = 64
    rows = [builder.add(signs, builder.mul(stride, _long(k))) for k in range(OUTPUTS)]
    whole, part, join = (builder.append_basic_block() for _ in range(3))
    is_whole = builder.and_(
        builder.icmp_signed("==", num_outputs, _long(OUTPUTS)),
        builder.icmp_signed("==", num_bytes, _long(INPUTS // 8)),
    )
    builder.cbranch(is_whole, whole, part)
    builder.position_at_end(whole)
    loaded = [builder.load(builder.inttoptr(row, _BYTES.as_pointer())) for row in rows]
    for load in loaded:
        load.align = 1
    builder.branch(join)
    builder.position_at_end(part)
    masked = _masked_loads(builder, rows, num_outputs, num_bytes)
    builder.branch(join)
    builder.position_at_end(join)
    chosen = []
    for load, other in zip(loaded, masked, strict=True):
        row = builder.phi(_BYTES)
        row.add_incoming(load, whole)
        row.add_incoming(other, part)
        chosen.append(row)
    for number, word in enumerate(_transposed(builder, [builder.bitcast(row, _INTS) for row in chosen])):
        builder.store(word, builder.gep(words, [_long(number)])).align = 64
    _prefetch(builder, rows, stride)
    return words


def _masked_loads(builder: Any, rows: list[Any], num_outputs: Any, num_bytes: Any) -> list[Any]:
    """Load the first `num_bytes` bytes of the first `num_outputs` rows, and zeros for the rest, which is not read."""
    load = _function(
        builder, "llvm.masked.load.v64i8.p0", _BYTES, [_BYTES.as_pointer(), _INT, _BYTE_MASK, _BYTES]
    )
    some = builder.sub(builder.shl(_long(1), num_bytes), _long(1))
    bits = builder.select(builder.icmp_signed("<", num_bytes, _long(64)), some, _long(-1))
    loaded = []
    for number, row in enumerate(rows):
        own = builder.select(builder.icmp_signed(">", num_outputs, _long(number)), bits, _long(0))
        arguments = [
            builder.inttoptr(row, _BYTES.as_pointer()),
            # Alignment in bytes.
            ir.Constant(_INT, 1),
            builder.bitcast(own, _BYTE_MASK),
            ir.Constant(_BYTES, [0] * 64),
        ]
        loaded.append(builder.call(load, arguments))
    return loaded


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose sixteen vectors of sixteen words.

    The first two rounds move words inside quarters of vectors, the last two move quarters: processors shuffle inside
    quarters faster than across them.
    """
    words: list[int] = []
    pairs: list[int] = []
    quarters: list[int] = []
    for lane in range(0, 16, 4):
        words += [lane, lane + 16, lane + 1, lane + 17]
        pairs += [lane, lane + 1, lane + 16, lane + 17]
    for start in (0, 8, 16, 24):
        quarters += range(start, start + 4)
    # Distance to the second vector of a shuffle, its lanes, and the offset of its upper half from its lower half.
    for distance, lanes, upper in ((1, words, 2), (2, pairs, 2), (4, quarters, 4), (8, quarters, 4)):
        halves = [ir.Constant(_INTS, [lane + offset for lane in lanes]) for offset in (0, upper)]
        shuffled = list(rows)
        for one in (number for number in range(16) if not number & distance):
            for half, number in zip(halves, (one, one + distance), strict=True):
                shuffled[number] = builder.shuffle_vector(rows[one], rows[one + distance], half)
        rows = shuffled
    return [rows[start + number] for start in range(0, 16, 4) for number in (0, 2, 1, 3)]


def _prefetch(builder: Any, rows: list[Any], stride: Any) -> None:
    fetch = _function(builder, "llvm.prefetch.p0", ir.VoidType(), [_BYTE.as_pointer(), *[_INT] * 3])
    read, keep, data = ir.Constant(_INT, 0), ir.Constant(_INT, 3), ir.Constant(_INT, 1)
    ahead = builder.mul(stride, _long(OUTPUTS * PREFETCH))
    # A prefetch beyond the end of memory has no effect.
    for row in rows:
        builder.call(fetch, [builder.inttoptr(builder.add(row, ahead), _BYTE.as_pointer()), read, keep, data])


def _lookups(builder: Any, tables: Any, words: Any, num_words: Any, num_rows: int) -> list[Any]:
    """Add up the sums that `words` select from each row's tables: OUTPUTS float32 per row of inputs."""
    permute = _function(builder, "llvm.x86.avx512.permvar.sf.512", _FLOATS, [_FLOATS, _INTS])
    per_word = WORD // PER_TABLE
    before, loop, done = (builder.block, builder.append_basic_block(), builder.append_basic_block())
    builder.branch(loop)
    builder.position_at_end(loop)
    word = builder.phi(_LONG)
    word.add_incoming(_long(0), before)
    chains = [[builder.phi(_FLOATS) for _ in range(NUM_CHAINS)] for _ in range(num_rows)]
    grown: list[list[Any]] = [list(own) for own in chains]
    signs = builder.load(builder.gep(words, [word]))
    signs.align = 64
    for k in range(per_word):
        chosen = _rotated(builder, signs, PER_TABLE * k) if k else signs
        for row, own in enumerate(grown):
            number = builder.add(builder.mul(word, _long(per_word)), _long(row * INPUTS // PER_TABLE + k))
            table = builder.load(builder.gep(builder.inttoptr(tables, _FLOATS.as_pointer()), [number]))
            table.align = 4
            own[k % NUM_CHAINS] = builder.fadd(own[k % NUM_CHAINS], builder.call(permute, [table, chosen]))
    following = builder.add(word, _long(1))
    word.add_incoming(following, loop)
    for own, sums in zip(chains, grown, strict=True):
        for chain, total in zip(own, sums, strict=True):
            chain.add_incoming(ir.Constant(_FLOATS, [0.0] * 16), before)
            chain.add_incoming(total, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_words), loop, done)
    builder.position_at_end(done)
    return [builder.fadd(builder.fadd(own[0], own[1]), builder.fadd(own[2], own[3])) for own in grown]


def _rotated(builder: Any, words: Any, bits: int) -> Any:
    """Rotate words right, by inline assembly.

    A shift would select the same bits, and LLVM turns a rotation that it understands into one. On Zen 5, shifts run on
    the units of vector additions and rotations do not.
    """
    rotation = ir.FunctionType(_INTS, [_INTS])
    return builder.asm(rotation, f"vprord $${bits}, $1, $0", "=v,v", [words], side_effect=False)


def _function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Declare an LLVM intrinsic, once in a module."""
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _broadcast(builder: Any, value: Any) -> Any:
    empty = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(_INTS, [0] * 16))


def _long(value: int) -> Any:
    return ir.Constant(_LONG, value)
