"""Compile the one-bit products for Hopper, which needs no GPU. A program of its own: Triton must not interpret."""

from __future__ import annotations

import re

import torch
from triton import compile as build
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from server.kernels import onebit_cuda

TYPES = {
    "output": "*bf16",
    "x": "*bf16",
    "scaled": "*bf16",
    "sums": "*fp32",
    "blocks": "*i32",
    "table": "*i64",
    "order": "*i32",
    "ranges": "*i32",
    "partial": "*fp32",
    "counters": "*i32",
}
ALIGNED = ("x", "x_stride", "scaled", "sums", "counters")
# Inputs and outputs.
SIZE = 1024


def sign_operand(tiling: onebit_cuda.Tiling, num_shares: int) -> str:
    """Return ``registers`` if all products of the kernel take their signs from registers, else ``shared``.

    Products of a warp always do; those of a warp group may take them from either.
    """
    kernel = onebit_cuda._add_product
    sizes = {"IN": SIZE, "SHARES": num_shares, "SLOTS": onebit_cuda.SLOTS, "CHUNK": onebit_cuda.CHUNK}
    sizes |= {"AS_BITS": True, "IN_FLOAT32": False, "SUMS": tiling.num_sums}
    sizes |= {"ROWS": tiling.rows, "OUTPUTS": tiling.outputs, "BYTES": tiling.num_bytes}
    sizes |= {"MINUS_ONE": onebit_cuda.MINUS_ONE[torch.bfloat16]}
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in sizes else TYPES.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in sizes.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED},
    )
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    built = build(source, target=GPUTarget("cuda", 90, 32), options=options)
    # Whole tensors and low-rank parts multiply in float32, without tensor cores.
    products = re.findall(r"warp_group_dot (?:.*?) : (\S+)", built.asm["ttgir"])
    assert bool(products) == (tiling.num_warps % 4 == 0)
    return "registers" if all(first.startswith("tensor") for first in products) else "shared"


if __name__ == "__main__":
    print("decode", sign_operand(onebit_cuda.DECODE, 2))
    print("prefill", sign_operand(onebit_cuda.PREFILL, 1))
