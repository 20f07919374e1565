"""Open a `.pt` file of BitDelta or the per-axis paper's code, and unpack its modules. No code in the file runs."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from deltastore.errors import CheckpointError, shown
from deltastore.format.sign_plane import SignPlane
from deltastore.format.validate import LARGEST_SCALE

Kind = Literal["bitdelta", "per-axis"]
WORD_BITS = 32
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Raised by torch's restricted reader for a damaged pickle or zip file.
UNREADABLE = (
    OSError, RuntimeError, ValueError, LookupError, AttributeError, TypeError, EOFError, ArithmeticError,
    zipfile.BadZipFile,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CodedForm:
    """Key endings of a coded module's two tensors, and the axis of its coefficients."""

    axis: Literal["scalar", "in", "out"]
    mask: str  # key ending
    coeff: str  # key ending


# The paper's `row` is one per input, because its Algorithm 6 transposes the weight. If a module has both, the first is
# applied, as in its Algorithm 7.
FORMS: Mapping[Kind, tuple[CodedForm, ...]] = {
    "bitdelta": (CodedForm("scalar", ".mask", ".coeff"),),
    "per-axis": (CodedForm("in", ".mask_row", ".coeff_row"), CodedForm("out", ".mask_col", ".coeff_col")),
}


@dataclass(frozen=True, slots=True, eq=False)
class CodedModule:
    """One linear module's delta as stored in the file."""

    path: Path
    module: str
    form: CodedForm
    mask: Tensor  # [in / 32, out] int32; bit i of word j is input 32j + i, a set bit is +1
    coeff: Tensor  # one, [in] or [out], any float dtype

    @property
    def mask_key(self) -> str:
        """The file and key of the mask, for messages."""
        return f"{self.path}: {shown(self.module + self.form.mask)}"

    @property
    def coeff_key(self) -> str:
        """The file and key of the coefficients, for messages."""
        return f"{self.path}: {shown(self.module + self.form.coeff)}"

    def check(self, shape: tuple[int, ...]) -> None:
        """Check dtypes and shapes against the weight's `shape` ``[out, in]``; reads no values.

        Raises:
            CheckpointError: a dtype or shape that does not fit.
        """
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.mask_key}: the base's weight has shape {shape} and is no matrix: {WRONG_BASE}"
            )
        out_features, in_features = shape
        words = (in_features // WORD_BITS, out_features)
        if self.mask.dtype != torch.int32:
            raise CheckpointError(
                f"{self.mask_key} is {_name(self.mask.dtype)} and must be int32, 32 signs in a word: {PACK}"
            )
        if in_features % WORD_BITS or tuple(self.mask.shape) != words:
            raise CheckpointError(
                f"{self.mask_key} has shape {tuple(self.mask.shape)}, 32 inputs in a word, and the base's "
                f"weight has {out_features} outputs and {in_features} inputs: {WRONG_BASE}"
            )
        length = {"scalar": 1, "in": in_features, "out": out_features}[self.form.axis]
        if not self.coeff.is_floating_point():
            raise CheckpointError(
                f"{self.coeff_key} is {_name(self.coeff.dtype)} and must be a float: save it as it was trained"
            )
        if self.coeff.numel() != length or max(self.coeff.shape, default=1) != length:
            raise CheckpointError(
                f"{self.coeff_key} has shape {tuple(self.coeff.shape)} and must have {length} "
                f"{'value' if length == 1 else 'values'}: {WRONG_BASE}"
            )

    def delta(self) -> SignPlane:
        """Return the delta in the artifact's packing; `check` must have passed.

        The four bytes of a word, lowest first, are the artifact's packing of its 32 inputs, so the words are only
        transposed. Coefficients become FP16 times a power of two, with a relative error of at most 2^-11.

        Raises:
            CheckpointError: a coefficient that is NaN, infinite or beyond any delta's.
        """
        signs = self.mask.T.contiguous().view(torch.uint8)
        coeff = self.coeff.double().reshape(-1)
        if not torch.isfinite(coeff).all():
            raise CheckpointError(f"{self.coeff_key} holds NaN or infinity: {DIVERGED}")
        if (largest := float(coeff.abs().max())) > LARGEST_SCALE:
            raise CheckpointError(
                f"{self.coeff_key} reaches {largest:.3g}, beyond {LARGEST_SCALE}: {DIVERGED}"
            )
        scale_out, scale_in = (None, coeff) if self.form.axis == "in" else (coeff, None)
        return SignPlane.from_scales(signs, WORD_BITS * len(self.mask), scale_out, scale_in)


@dataclass(frozen=True, slots=True, eq=False)
class DiffFile:
    """The content of a file by checkpoint tensor name."""

    path: Path
    coded: Mapping[str, CodedModule]
    whole: Mapping[str, Tensor]  # F16, BF16 or F32

    @classmethod
    def open(cls, path: Path, kind: Kind) -> DiffFile:
        """Load a file that `torch.save` wrote, tensors only, and sort its keys. The file is memory-mapped.

        Raises:
            CheckpointError: no such file, a damaged one, one that needs code to be loaded, one that holds more than
                named tensors, or a module that is not complete.
        """
        tensors = _tensors(path)
        parts: dict[str, _ModuleTensors] = {}
        whole: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            module = _part_of(key, kind, path)
            if module is None:
                whole[key] = _parameter(key, tensor, path)
            else:
                parts.setdefault(module, _ModuleTensors()).tensors[key] = tensor
        coded = {f"{module}.weight": some.coded(path, module, kind) for module, some in parts.items()}
        if twice := coded.keys() & whole.keys():
            raise CheckpointError(
                f"{path}: {shown(min(twice))} is there whole and as a mask: keep one of the two"
            )
        return cls(path, coded, whole)


WRONG_BASE = "give the base that it was made from"
PACK = "pack the signs as BitDelta's save_diff does"
DIVERGED = "the file is damaged, or its training diverged"
SAVE_AGAIN = "save a dict of plain tensors on the CPU with torch.save"


@dataclass(frozen=True, slots=True)
class _ModuleTensors:
    """The tensors of one module, by key."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def coded(self, path: Path, module: str, kind: Kind) -> CodedModule:
        found = []
        for form in FORMS[kind]:
            mask, coeff = (self.tensors.get(module + ending) for ending in (form.mask, form.coeff))
            if mask is not None and coeff is not None:
                found.append(CodedModule(path, module, form, mask, coeff))
            elif mask is not None or coeff is not None:
                here, missing = (form.mask, form.coeff) if coeff is None else (form.coeff, form.mask)
                raise CheckpointError(
                    f"{path}: {shown(module + here)} has no {shown(module + missing)} beside it: save both"
                )
        return found[0]


def _tensors(path: Path) -> dict[str, Tensor]:
    """Load the file and check that it is a dict of named tensors."""
    content = _load(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: it holds a {type(content).__name__} and no dict: {SAVE_AGAIN}")
    for key, value in content.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{path}: key {shown(key)} is no name: {SAVE_AGAIN}")
        if not _is_plain(value):
            raise CheckpointError(f"{path}: {shown(key)} is no plain tensor: {SAVE_AGAIN}")
    return {key: value.detach() for key, value in content.items()}


def _load(path: Path) -> Any:
    """Load the file. Memory-mapped, because torch then bounds the sizes that a hostile file claims."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file: give --diff the .pt file of a delta")
    try:
        if zipfile.is_zipfile(path):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: it holds more than tensors, and loading that could run code from the file: {SAVE_AGAIN}"
        ) from error
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path}: damaged, torch cannot read it: fetch it again, or {SAVE_AGAIN}"
        ) from error
    raise CheckpointError(
        f"{path}: truncated, or not written by torch.save in its present form: fetch it again, or {SAVE_AGAIN}"
    )


def _is_plain(value: Any) -> bool:
    """True for a dense CPU tensor with data: not sparse, quantised, nested or on the meta device."""
    if type(value) not in (Tensor, torch.nn.Parameter):
        return False
    is_dense = value.layout == torch.strided and value.device.type == "cpu"
    return is_dense and not (value.is_quantized or value.is_nested or value.is_neg())


def _part_of(key: str, kind: Kind, path: Path) -> str | None:
    """Return the module of a mask's or coefficient's key; None for a whole parameter."""
    for own, forms in FORMS.items():
        for ending in (ending for form in forms for ending in (form.mask, form.coeff)):
            if not key.endswith(ending):
                continue
            if own != kind:
                raise CheckpointError(
                    f"{path}: {shown(key)} is of the kind {own}: import it with `peraxis import {own}`"
                )
            return key.removesuffix(ending)
    return None


def _parameter(key: str, tensor: Tensor, path: Path) -> Tensor:
    if tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{path}: {shown(key)} is {_name(tensor.dtype)}: save it in bfloat16, float16 or float32"
        )
    return tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
