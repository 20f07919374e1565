"""Vector code of attention for any processor: one head against a run of tokens that lie a fixed stride apart.

A chunk of a head's dimensions stays in registers for the whole run. LLVM lowers the vectors to the processor's.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

# Dimensions of a vector, and vectors of a long chunk; a short chunk is one vector.
LANES = 16
LONG = 4

_SHORT, _INT, _LONG, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS, _SHORTS = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _INT, _SHORT))


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
