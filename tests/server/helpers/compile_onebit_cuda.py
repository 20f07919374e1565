"""Compile the one-bit products for Hopper, which needs no GPU. A program of its own: Triton must not interpret."""

from __future__ import annotations

import re
from typing import Any

import torch
from triton import compile as build
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from server.kernels import onebit_cuda

POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
# Arguments in the model's dtype.
OF_MODEL = ("output", "x", "scaled")
TYPES = {
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


def compiled(tiling: onebit_cuda.Tiling, num_shares: int, dtype: torch.dtype, capability: int) -> Any:
    """Compile the product for a compute capability, such as 90."""
    kernel = onebit_cuda._add_product
    sizes = {"IN": SIZE, "SHARES": num_shares, "SLOTS": onebit_cuda.SLOTS, "CHUNK": onebit_cuda.CHUNK}
    sizes |= {"AS_BITS": dtype == torch.bfloat16, "IN_FLOAT32": False}
    sizes |= {"ROWS": tiling.rows, "OUTPUTS": tiling.outputs, "BYTES": tiling.num_bytes}
    sizes |= {"MINUS_ONE": onebit_cuda.MINUS_ONE[dtype]}
    names, types = kernel.arg_names, TYPES | dict.fromkeys(OF_MODEL, POINTERS[dtype])
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in sizes else types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in sizes.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED},
    )
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.stages(dtype)}
    if tiling.max_registers is not None:
        options["maxnreg"] = tiling.max_registers
    return build(source, target=GPUTarget("cuda", capability, 32), options=options)


def sign_operand(tiling: onebit_cuda.Tiling, num_shares: int) -> str:
    """Return ``registers`` if all products of the kernel take their signs from registers, else ``shared``.

    Products of a warp always do; those of a warp group may take them from either.
    """
    # Whole tensors and low-rank parts multiply in float32, without tensor cores.
    products = re.findall(
        r"warp_group_dot (?:.*?) : (\S+)", compiled(tiling, num_shares, torch.bfloat16, 90).asm["ttgir"]
    )
    assert bool(products) == (tiling.num_warps % 4 == 0)
    return "registers" if all(first.startswith("tensor") for first in products) else "shared"


if __name__ == "__main__":
    print("decode", sign_operand(onebit_cuda.DECODE, 2))
    print("prefill", sign_operand(onebit_cuda.PREFILL, 1))
    print("bytes", compiled(onebit_cuda.PREFILL, 1, torch.float32, 86).metadata.shared)
