"""Vector code for any processor: sixteen signs select sixteen inputs. LLVM lowers it to the processor's instructions.

A signed sum is ``2 * (sum of x where the sign is +1) - sum of x``; the masked sum is one select and one addition per
sixteen inputs.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

# Signs per select.
LANES = 16
# Independent accumulators, so that additions overlap.
UNROLL = 4
BLOCK = LANES * UNROLL

_LONG, _FLOATS = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)


def _masked_sum(typing_context: Any, values: Any, mask: Any, num_blocks: Any) -> Any:
    """Return the sum of the float32 at `values` whose bit at `mask` is set, over ``num_blocks * BLOCK`` of them.

    `values` and `mask` are addresses. The bits are read as little-endian uint16 words.
    """
    signature = types.float32(types.uintp, types.uintp, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums = _block_sums(builder, *arguments)
        return _lane_sum(
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


def _lane_sum(builder: Any, vector: Any) -> Any:
    """Add up the lanes of a vector, in their order."""
    result = ir.Constant(ir.FloatType(), 0.0)
    for lane in range(LANES):
        result = builder.fadd(result, builder.extract_element(vector, ir.Constant(ir.IntType(32), lane)))
    return result


masked_sum: Any = intrinsic(_masked_sum)
