"""Compile paged attention for Hopper, which needs no GPU. A program of its own: Triton must not interpret."""

from __future__ import annotations

from typing import Any

import torch
from triton import compile as build
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from server.kernels import attention_cuda
from server.kernels.reference import AttentionParams

POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}


class Compiled:
    """Replaces a kernel: a launch compiles it for its arguments and prints name, size and number of matrix products."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: object) -> Any:
        return self._compile

    def _compile(self, *args: Any, **constants: int) -> None:
        names = self.kernel.arg_names
        types = {name: type_of(value) for name, value in zip(names, args, strict=False)}
        signature = {name: types.get(name, "constexpr") for name in names}
        aligned = {
            (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")
        }
        values = {(names.index(name),): value for name, value in constants.items()}
        built = build(ASTSource(self.kernel, signature, values, aligned), target=GPUTarget("cuda", 90, 32))
        print(self.kernel.__name__, len(built.asm["cubin"]), built.asm["ptx"].count("mma.sync"))


def type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


if __name__ == "__main__":
    for name in ("_attend_part", "_add_parts"):
        setattr(attention_cuda, name, Compiled(getattr(attention_cuda, name)))
    query, key = (torch.zeros(1, heads, 128, dtype=torch.bfloat16) for heads in (32, 8))
    attention_cuda.prepare(
        query, key, key, AttentionParams(None, 64, 30.0, torch.zeros(32, dtype=torch.bfloat16))
    )
