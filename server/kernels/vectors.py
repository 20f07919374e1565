"""Vector code of the CPU kernels, written in LLVM's IR: lookups, selections, and attention over runs of tokens.

Attention, for any processor: one head against a run of tokens that lie a fixed stride apart. A chunk of a head's
dimensions stays in registers for the whole run. LLVM lowers the vectors to the processor's.

Selection, for any processor: sixteen signs select sixteen inputs. A signed sum is
``2 * (sum of x where the sign is +1) - sum of x``; the masked sum is one select and one addition per sixteen inputs.

Lookup, for processors with AVX-512: signs look up the signed sums of four inputs in one register.

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

# Dimensions of a vector, or signs per select, and vectors of a long chunk; a short chunk is one vector.
LANES = 16
LONG = 4

_BYTE, _SHORT, _INT, _LONG = (ir.IntType(num_bits) for num_bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_FLOATS, _INTS, _SHORTS = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _INT, _SHORT))
_BYTES, _BYTE_MASK = ir.VectorType(_BYTE, 64), ir.VectorType(ir.IntType(1), 64)


def add_scores(num_vectors: int, is_half: bool) -> Any:
    """Make the intrinsic ``add(query, keys, stride, num_tokens, scores)`` for a chunk of `num_vectors`.

    Its arguments are addresses and counts. It adds the product of the float32 at `query` with each token's key to the
    float32 at `scores`. Keys are bfloat16 or float32, `stride` bytes apart. At least one token is given.
    """

    @intrinsic
    def add(typing_context: Any, query: Any, keys: Any, stride: Any, num_tokens: Any, scores: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            query, keys, stride, num_tokens, scores = arguments
            parts = [_vector(builder, query, part, is_half=False) for part in range(num_vectors)]
            with _Tokens(builder, num_tokens) as token:
                key = builder.add(keys, builder.mul(stride, token))
                total = ir.Constant(_FLOATS, [0.0] * LANES)
                for number, part in enumerate(parts):
                    total = _fmuladd(builder, part, _vector(builder, key, number, is_half), total)
                address = builder.inttoptr(scores, _FLOAT.as_pointer())
                place = builder.gep(address, [token])
                builder.store(builder.fadd(builder.load(place), _lane_sum(builder, total)), place)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), codegen

    return add


def add_values(num_vectors: int, is_half: bool) -> Any:
    """Make the intrinsic ``add(weights, values, stride, num_tokens, sums)`` for a chunk of `num_vectors`.

    Its arguments are addresses and counts. It adds each token's value times its float32 at `weights` to the float32 at
    `sums`. Values are bfloat16 or float32, `stride` bytes apart. At least one token is given.
    """

    @intrinsic
    def add(typing_context: Any, weights: Any, values: Any, stride: Any, num_tokens: Any, sums: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, values, stride, num_tokens, sums = arguments
            begun = [_vector(builder, sums, part, is_half=False) for part in range(num_vectors)]
            before = builder.block
            with _Tokens(builder, num_tokens) as token:
                totals = [builder.phi(_FLOATS) for _ in begun]
                place = builder.gep(builder.inttoptr(weights, _FLOAT.as_pointer()), [token])
                weight = _broadcast(builder, builder.load(place))
                value = builder.add(values, builder.mul(stride, token))
                grown = [
                    _fmuladd(builder, weight, _vector(builder, value, number, is_half), total)
                    for number, total in enumerate(totals)
                ]
                for total, first, following in zip(totals, begun, grown, strict=True):
                    total.add_incoming(first, before)
                    total.add_incoming(following, builder.block)
            for number, total in enumerate(grown):
                pointer = builder.inttoptr(sums, _FLOATS.as_pointer())
                builder.store(total, builder.gep(pointer, [_long(number)])).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), codegen

    return add


class _Tokens:
    """A loop over tokens in one basic block. Entering returns the token's number; leaving goes on behind the loop."""

    def __init__(self, builder: Any, num_tokens: Any) -> None:
        self._builder, self._num_tokens = builder, num_tokens

    def __enter__(self) -> Any:
        before, self._loop = self._builder.block, self._builder.append_basic_block()
        self._builder.branch(self._loop)
        self._builder.position_at_end(self._loop)
        self._token = self._builder.phi(_LONG)
        self._token.add_incoming(_long(0), before)
        return self._token

    def __exit__(self, *_: object) -> None:
        following, done = self._builder.add(self._token, _long(1)), self._builder.append_basic_block()
        self._token.add_incoming(following, self._loop)
        is_left = self._builder.icmp_signed("<", following, self._num_tokens)
        self._builder.cbranch(is_left, self._loop, done)
        self._builder.position_at_end(done)


def _vector(builder: Any, address: Any, number: int, is_half: bool) -> Any:
    """Load the `number`-th vector of bfloat16 or float32 at an address, as float32."""
    kind = _SHORTS if is_half else _FLOATS
    loaded = builder.load(builder.gep(builder.inttoptr(address, kind.as_pointer()), [_long(number)]))
    # Alignment in bytes.
    loaded.align = 2 if is_half else 4
    if not is_half:
        return loaded
    bits = builder.shl(builder.zext(loaded, _INTS), ir.Constant(_INTS, [16] * LANES))
    return builder.bitcast(bits, _FLOATS)


def _fmuladd(builder: Any, one: Any, other: Any, addend: Any) -> Any:
    function = _function(builder, "llvm.fmuladd.v16f32", _FLOATS, [_FLOATS] * 3)
    return builder.call(function, [one, other, addend])


def _lane_sum(builder: Any, vector: Any) -> Any:
    """Add up the lanes of a vector, in any order."""
    function = _function(builder, "llvm.vector.reduce.fadd.v16f32", _FLOAT, [_FLOAT, _FLOATS])
    return builder.call(function, [ir.Constant(_FLOAT, 0.0), vector], fastmath=("reassoc",))


def _broadcast(builder: Any, value: Any) -> Any:
    empty = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(_INTS, [0] * LANES))


def _function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Declare an LLVM intrinsic, once in a module."""
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _long(value: int) -> Any:
    return ir.Constant(_LONG, value)


# Independent accumulators, so that additions overlap.
UNROLL = 4
SELECT_BLOCK = LANES * UNROLL


def _masked_sum(typing_context: Any, values: Any, mask: Any, num_blocks: Any) -> Any:
    """Return the sum of the float32 at `values` whose bit at `mask` is set, over ``num_blocks * BLOCK`` of them.

    `values` and `mask` are addresses. The bits are read as little-endian uint16 words.
    """
    signature = types.float32(types.uintp, types.uintp, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums = _block_sums(builder, *arguments)
        return _sum_in_order(
            builder, builder.fadd(builder.fadd(sums[0], sums[1]), builder.fadd(sums[2], sums[3]))
        )

    return signature, codegen


def _block_sums(builder: Any, values: Any, mask: Any, num_blocks: Any) -> list[Any]:
    """Loop over the blocks and return UNROLL accumulators, zeros if there is no block."""
    values = builder.inttoptr(values, _FLOATS.as_pointer())
    mask = builder.inttoptr(mask, ir.IntType(LANES).as_pointer())
    zero = ir.Constant(_FLOATS, [0.0] * LANES)
    before = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", num_blocks, ir.Constant(num_blocks.type, 0)), loop, done)

    builder.position_at_end(loop)
    step = builder.phi(_LONG)
    step.add_incoming(ir.Constant(_LONG, 0), before)
    sums = [builder.phi(_FLOATS) for _ in range(UNROLL)]
    grown = []
    for part, total in enumerate(sums):
        position = builder.add(builder.mul(step, ir.Constant(_LONG, UNROLL)), ir.Constant(_LONG, part))
        chosen = _selected(builder, builder.gep(values, [position]), builder.gep(mask, [position]))
        grown.append(builder.fadd(total, chosen))
    following = builder.add(step, ir.Constant(_LONG, 1))
    step.add_incoming(following, loop)
    for total, sum_ in zip(sums, grown, strict=True):
        total.add_incoming(zero, before)
        total.add_incoming(sum_, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_blocks), loop, done)

    builder.position_at_end(done)
    return [_phi(builder, (zero, before), (sum_, loop)) for sum_ in grown]


def _selected(builder: Any, values: Any, mask: Any) -> Any:
    """Load LANES inputs and their signs. Return the inputs whose bit is set, and zeros for the others."""
    block = builder.load(values)
    block.align = 4
    bits = builder.load(mask)
    bits.align = 1
    signs = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
    return builder.select(signs, block, ir.Constant(_FLOATS, [0.0] * LANES))


def _phi(builder: Any, *incoming: tuple[Any, Any]) -> Any:
    value = builder.phi(_FLOATS)
    for one, block in incoming:
        value.add_incoming(one, block)
    return value


def _sum_in_order(builder: Any, vector: Any) -> Any:
    """Add up the lanes of a vector, in their order."""
    result = ir.Constant(ir.FloatType(), 0.0)
    for lane in range(LANES):
        result = builder.fadd(result, builder.extract_element(vector, ir.Constant(ir.IntType(32), lane)))
    return result


masked_sum: Any = intrinsic(_masked_sum)


# The size of a tile.
TILE_OUTPUTS = 16
TILE_INPUTS = 512
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


@cache
def supports_lookup() -> bool:
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
    `tables` are those of TILE_INPUTS inputs of each row, one row after the other. `signs` are `num_bytes` bytes of each
    of `num_outputs` rows, `stride` bytes apart; nothing beyond them is read. `sums` are TILE_OUTPUTS float32 per row of
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
        words = builder.alloca(_INTS, TILE_OUTPUTS)
        words.align = 64
    rows = [builder.add(signs, builder.mul(stride, _long(k))) for k in range(TILE_OUTPUTS)]
    whole, part, join = (builder.append_basic_block() for _ in range(3))
    is_whole = builder.and_(
        builder.icmp_signed("==", num_outputs, _long(TILE_OUTPUTS)),
        builder.icmp_signed("==", num_bytes, _long(TILE_INPUTS // 8)),
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
    ahead = builder.mul(stride, _long(TILE_OUTPUTS * PREFETCH))
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
            number = builder.add(
                builder.mul(word, _long(per_word)), _long(row * TILE_INPUTS // PER_TABLE + k)
            )
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
