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


def _masked_sum(typing_context: Any, values: Any, mask: Any, num_blocks: Any) -> Any:
    """Return the sum of the float32 at `values` whose bit at `mask` is set, over ``num_blocks * BLOCK`` of them.

    `values` and `mask` are addresses. The bits are read as little-endian uint16 words.
    """
    signature = types.float32(types.uintp, types.uintp, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, mask, num_blocks = arguments
        word, index = ir.IntType(LANES), ir.IntType(64)
        vector = ir.VectorType(ir.FloatType(), LANES)
        values = builder.inttoptr(values, vector.as_pointer())
        mask = builder.inttoptr(mask, word.as_pointer())
        zero = ir.Constant(vector, [0.0] * LANES)

        before = builder.block
        loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", num_blocks, ir.Constant(num_blocks.type, 0)), loop, done)

        builder.position_at_end(loop)
        step = builder.phi(index)
        step.add_incoming(ir.Constant(index, 0), before)
        sums = []
        for _ in range(UNROLL):
            total = builder.phi(vector)
            total.add_incoming(zero, before)
            sums.append(total)
        grown = []
        for lane, total in enumerate(sums):
            position = builder.add(builder.mul(step, ir.Constant(index, UNROLL)), ir.Constant(index, lane))
            block = builder.load(builder.gep(values, [position]))
            block.align = 4
            bits = builder.load(builder.gep(mask, [position]))
            bits.align = 1
            chosen = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
            grown.append(builder.fadd(total, builder.select(chosen, block, zero)))
        following = builder.add(step, ir.Constant(index, 1))
        step.add_incoming(following, loop)
        for total, sum_ in zip(sums, grown, strict=True):
            total.add_incoming(sum_, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_blocks), loop, done)

        builder.position_at_end(done)
        final = []
        for sum_ in grown:
            total = builder.phi(vector)
            total.add_incoming(zero, before)
            total.add_incoming(sum_, loop)
            final.append(total)
        vector_sum = builder.fadd(builder.fadd(final[0], final[1]), builder.fadd(final[2], final[3]))
        result = ir.Constant(ir.FloatType(), 0.0)
        for lane in range(LANES):
            result = builder.fadd(
                result, builder.extract_element(vector_sum, ir.Constant(ir.IntType(32), lane))
            )
        return result

    return signature, codegen


masked_sum: Any = intrinsic(_masked_sum)
