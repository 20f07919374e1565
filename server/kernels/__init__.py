"""The products that deltas need, and the draw of tokens, each chosen by the device of its input.

`reference` is plain torch and the oracle of the others; `onebit_cpu` runs on the CPU, `onebit_cuda` on CUDA. A
call takes all deltas of a batch and finds them by address in a table (`reference` describes its rows), so that the
Python cost of a layer does not grow with the number of variants. Knows tensors and addresses; no deltas and no model.

Both products are also operations of torch, ``torch.ops.peraxis``, which torch.compile takes as they are. They read
nothing of the device on the host, and launches on CUDA depend on shapes alone, so that a CUDA graph can hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

# `reference` comes first: it digests the source files of kernels before one of them is imported.
from server.kernels import reference
from server.kernels.reference import Draw

__all__ = ["Draw", "add_planes", "add_rows", "compile_kernels", "draw", "prepare", "score"]


def add_planes(
    output: Tensor,  # [rows, out of all parts], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    table: Tensor,  # [parts, slots, FIELDS] int64, contiguous: what each slot's delta adds, by part
    order: Tensor,  # [positions] int32: rows sorted by slot
    ranges: Tensor,  # [slots, 2] int32: a slot's first position in `order`, and the position after its last
    ends: Sequence[int],  # [parts]: the output after each part's last one
) -> None:
    """Add to each row the products of its slot's delta: ``factor_out * (B @ (factor_in * x))`` of each plane,
    ``left @ (right @ x)`` and the difference of biases; or replace it by the product with a whole tensor.

    Parts are tensors of the checkpoint that share a layer's inputs, such as q, k and v. A slot whose row of the table
    is all zeros changes nothing, and rows of no slot are not touched. Sums are float32 and rounded once, to the
    output's dtype. In bfloat16, inputs times `factor_in` and the product of a slot with many rows may be rounded to
    bfloat16 before.
    """
    _implementation(x.device.type).add_planes(output, x, table, order, ranges, ends)


def add_rows(
    output: Tensor,  # [rows, in], any float dtype, changed in place
    ids: Tensor,  # [rows] int64: a row of the slot's tensor for each row of the output
    table: Tensor,  # [1 or 2, slots, FIELDS] int64, contiguous; the second part has the rows that the base lacks
    order: Tensor,  # [positions] int32, as in `add_planes`
    ranges: Tensor,  # [slots, 2] int32, as in `add_planes`
    num_ids: int,  # rows of the base's tensor
    scale: float,  # the factor by which the embedding multiplies its rows
) -> None:
    """Add ``scale`` times row `id` of each row's delta, or replace it by a row stored whole; rounded once."""
    _implementation(output.device.type).add_rows(output, ids, table, order, ranges, num_ids, scale)


def draw(
    logits: Tensor,  # [rows, vocab] float32, each row contiguous
    draws: Sequence[Draw],  # of each row
) -> tuple[list[int], list[float]]:
    """Return each row's next token, and the least logit that its parameters keep.

    A row's token depends on its own logits and parameters, not on the batch. Logits that equal the least one are all
    kept. The token is -1 where none can be drawn: a logit is NaN, or the greatest one with biases and penalty is not
    finite. On the CPU, logits are changed while they are read, and restored.
    """
    if logits.device.type == "cpu":
        from server.kernels import sampling_cpu

        return sampling_cpu.draw(logits, draws)
    tokens, least = reference.draw(logits, draws)
    return tokens.tolist(), least.tolist()


def score(
    logits: Tensor,  # [rows, vocab] float32, each row contiguous
    tokens: Sequence[int],  # of each row
    num_top: int,
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Return the log-probability of each row's token, and its `num_top` likeliest tokens with theirs, in order."""
    if logits.device.type == "cpu":
        from server.kernels import sampling_cpu

        return sampling_cpu.score(logits, tokens, num_top)
    # Only the results leave the device: those of a prompt are thousands of rows.
    own, ids, values = reference.score(logits, tokens, num_top)
    return own.tolist(), ids.tolist(), values.tolist()


_TABLE = "Tensor table, Tensor order, Tensor ranges"
torch.library.define("peraxis::add_planes", f"(Tensor(a!) output, Tensor x, {_TABLE}, int[] ends) -> ()")
torch.library.define(
    "peraxis::add_rows", f"(Tensor(a!) output, Tensor ids, {_TABLE}, int num_ids, float scale) -> ()"
)
for _name, _function in (("peraxis::add_planes", add_planes), ("peraxis::add_rows", add_rows)):
    torch.library.impl(_name, ("cpu", "cuda"), _function)
    torch.library.register_fake(_name, lambda *arguments: None)


def prepare(
    device: torch.device,
    shapes: Iterable[tuple[int, int]] = (),  # out and in of the layers that deltas change
    dtype: torch.dtype = torch.float32,  # of the model
) -> None:
    """Compile the kernels of a device at start-up, or load them, and choose among them. Compiling takes seconds."""
    if device.type == "cpu":
        from server.kernels import attention_cpu, onebit_cpu, sampling_cpu

        onebit_cpu.prepare({in_features for _, in_features in shapes}, dtype)
        attention_cpu.compiled_kernel()
        sampling_cpu.compiled_kernels()
    elif (kernels := _implementation(device.type)).__name__.endswith("cuda"):
        kernels.prepare(device, set(shapes), dtype)


def compile_kernels() -> None:
    """Compile the CPU kernels for this processor and keep them in the user's cache, or load them from it."""
    from server.kernels import attention_cpu, onebit_cpu, sampling_cpu

    onebit_cpu.compile_kernels()
    attention_cpu.compiled_kernel()
    sampling_cpu.compiled_kernels()


@cache
def _implementation(device_type: str) -> ModuleType:
    """Return the fastest implementation for a device."""
    if device_type == "cpu":
        # A server on CUDA runs without numba, which takes 64 MB.
        from server.kernels import onebit_cpu

        return onebit_cpu
    if device_type == "cuda" and find_spec("triton") is not None:
        # A server on the CPU runs without Triton.
        from server.kernels import onebit_cuda

        return onebit_cuda
    return reference
