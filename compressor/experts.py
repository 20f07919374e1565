"""Experts of mixture-of-experts models: which tensors are stacks of them, and one form of two for base and fine-tune.

transformers has all matrices of one kind of a layer in one parameter ``[experts, out, in]``. Checkpoints hold such
stacks, or a matrix per expert, which transformers stacks when it loads them. Reads headers only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.names import converters_of, model_without_weights, stored_targets
from deltastore.checkpoint import TORCH_DTYPE, Checkpoint, StoredTensor
from deltastore.errors import CheckpointError
from deltastore.experts import expert_stacks, is_stack

# Of the tensors that a quantised stack is stored as.
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"


def check_not_mxfp4(checkpoint: Checkpoint) -> None:
    """Refuse experts in 4 bits, and say how they become bfloat16.

    Raises:
        CheckpointError: there are some.
    """
    stacks = (name.removesuffix(MXFP4_BLOCKS) for name in checkpoint.tensors if name.endswith(MXFP4_BLOCKS))
    found = next((name for name in stacks if name + MXFP4_SCALES in checkpoint.tensors), None)
    if found is not None:
        raise CheckpointError(
            f"{checkpoint.path}: its experts are in MXFP4 ({found}): {_dequantizing(checkpoint.path)}"
        )


def _dequantizing(path: Path) -> str:
    """Return the command that writes a checkpoint in bfloat16.

    In the original format transformers would name bfloat16 stacks as it names blocks of 4 bits.
    """
    out = f"{path}-bf16"
    return (
        "make them bfloat16 with "
        f'python -c "import transformers as t; m = t.AutoModelForCausalLM.from_pretrained({str(path)!r}, '
        "quantization_config=t.Mxfp4Config(dequantize=True), dtype='bfloat16'); "
        f"m.save_pretrained({out!r}, save_original_format=False); "
        f't.AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({out!r})"'
    )


def stacks_of(checkpoint: Checkpoint) -> dict[str, bool]:
    """Return the names of a checkpoint's stacks of experts, and if they are transposed.

    They are parameters of transformers' modules of experts. Where it builds no model, none is known.
    """
    candidates = [name for name, stored in checkpoint.tensors.items() if is_stack(stored.shape)]
    model = model_without_weights(checkpoint.config) if candidates else None
    if model is None:
        return {}
    stacks = expert_stacks(model)
    return {
        name: stacks[target]
        for name, target, pattern in stored_targets(model, candidates)
        if target in stacks and pattern is None
    }


def in_base_form(base: Checkpoint, finetune: Checkpoint) -> Checkpoint:
    """Return the fine-tune with experts as the base stores them: stacked, or a matrix for each.

    Raises:
        CheckpointError: the two have other numbers or sizes of experts.
    """
    foreign, wanted = (
        finetune.tensors.keys() - base.tensors.keys(),
        base.tensors.keys() - finetune.tensors.keys(),
    )
    if not any(is_stack(finetune.tensors[name].shape) for name in foreign) and not any(
        is_stack(base.tensors[name].shape) for name in wanted
    ):
        return finetune
    model = model_without_weights(base.config)
    if model is None:
        return finetune
    tensors, pieces = dict(finetune.tensors), dict[str, Sequence[StoredTensor]]()
    ours, theirs = _forms(model, finetune, foreign), _forms(model, base, wanted)
    for target in ours.keys() & theirs.keys():
        own, other = ours[target], theirs[target]
        if own.whole is not None and other.whole is not None:
            del tensors[own.whole.name]
            tensors[other.whole.name] = replace(own.whole, name=other.whole.name)
        elif own.whole is not None:
            _check_sizes(finetune, own.whole, other.matrices)
            del tensors[own.whole.name]
            tensors |= _cut(own.whole, other.matrices)
        elif other.whole is not None:
            _check_sizes(finetune, other.whole, own.matrices)
            parts = [matrix for expert in own.matrices for matrix in expert]
            for matrix in parts:
                del tensors[matrix.name]
            pieces[other.whole.name] = parts
            num_bytes = sum(matrix.num_bytes for matrix in parts)
            first = parts[0]
            tensors[other.whole.name] = replace(
                other.whole, dtype=first.dtype, file=first.file, offset=first.offset, num_bytes=num_bytes
            )
    if not pieces:
        return replace(finetune, tensors=tensors)
    return _Stacked(finetune.path, finetune.config, tensors, finetune.tied, finetune.wrapper, pieces)


@dataclass(frozen=True, slots=True)
class _Form:
    """The stored tensors of one parameter: itself, or of a stack the matrices of each expert, one below the other."""

    whole: StoredTensor | None = None
    matrices: Sequence[Sequence[StoredTensor]] = ()


def _forms(model: Any, checkpoint: Checkpoint, names: Collection[str]) -> dict[str, _Form]:
    """Return tensors by the parameters that they go to.

    Leaves out those that transformers converts otherwise than by putting matrices of experts below each other.
    """
    patterns = {
        pattern: index
        for converter in converters_of(model)
        if [type(step).__name__ for step in converter.operations]
        in (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
        and [getattr(step, "dim", None) for step in converter.operations] in ([0], [0, 1])
        for index, pattern in enumerate(converter.source_patterns)
    }
    stacks, forms = expert_stacks(model), dict[str, _Form]()
    found: dict[str, dict[int, list[StoredTensor]]] = {}
    for name, target, pattern in stored_targets(model, names):
        stored = checkpoint.tensors[name]
        if pattern is None:
            forms[target] = _Form(stored)
        elif target in stacks and pattern in patterns and len(stored.shape) == 2:
            found.setdefault(target, {}).setdefault(patterns[pattern], []).append(stored)
    for target, kinds in found.items():
        if len({len(kind) for kind in kinds.values()}) == 1:
            forms[target] = _Form(None, list(zip(*(kinds[index] for index in sorted(kinds)), strict=True)))
    return forms


def _check_sizes(
    finetune: Checkpoint, stack: StoredTensor, experts: Sequence[Sequence[StoredTensor]]
) -> None:
    dtypes = {matrix.dtype for expert in experts for matrix in expert}
    shapes = {
        (sum(matrix.shape[0] for matrix in expert), *{matrix.shape[1] for matrix in expert})
        for expert in experts
    }
    if {(len(experts), *shape) for shape in shapes} != {stack.shape} or len(dtypes) != 1:
        first = experts[0][0]
        raise CheckpointError(
            f"{finetune.path}: {stack.name!r} is a stack of experts {list(stack.shape)}, and matrices such as "
            f"{first.name!r} {list(first.shape)} of {len(experts)} experts do not make it: give the base that it was "
            "tuned from"
        )


def _cut(stack: StoredTensor, experts: Sequence[Sequence[StoredTensor]]) -> dict[str, StoredTensor]:
    """Return the parts of a stack under the names of the base's matrices."""
    itemsize, offset, parts = TORCH_DTYPE[stack.dtype].itemsize, stack.offset, dict[str, StoredTensor]()
    for expert in experts:
        for matrix in expert:
            num_bytes = math.prod(matrix.shape) * itemsize
            parts[matrix.name] = StoredTensor(
                matrix.name, stack.dtype, matrix.shape, stack.file, offset, num_bytes
            )
            offset += num_bytes
    return parts


@dataclass(frozen=True, slots=True)
class _Stacked(Checkpoint):
    """A checkpoint whose matrices of experts are read as stacks."""

    # By name of the stack, matrices one below the other.
    pieces: Mapping[str, Sequence[StoredTensor]] = field(default_factory=dict)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        if name not in self.pieces:
            return Checkpoint.read(self, name, rows)
        num_experts, num_rows, columns = self.tensors[name].shape
        first, last, _ = rows.indices(num_experts)
        flat = self.read_flat(name, slice(first * num_rows, last * num_rows))
        return flat.view(-1, num_rows, columns)

    def read_flat(self, name: str, rows: slice) -> Tensor:
        if name not in self.pieces:
            return Checkpoint.read_flat(self, name, rows)
        parts, start = [], 0
        for piece in self.pieces[name]:
            own = slice(max(rows.start - start, 0), min(rows.stop - start, piece.shape[0]))
            if own.start < own.stop:
                parts.append(self.read_stored(piece, own))
            start += piece.shape[0]
        return torch.cat(parts)
