"""From stored tensors to a model's parameters, one part of the model at a time. Knows names, and runs nothing.

A checkpoint may name tensors otherwise than the model does, and hold experts one by one that the model has in one
parameter; both are put right by the library's own rules, as `from_pretrained` does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from deltastore.base.checkpoint import StoredTensor
from deltastore.errors import CheckpointError


class Weights(Protocol):
    """What a model is built from: a checkpoint, or one some of whose tensors are others."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """A checkpoint some of whose tensors are others: the fine-tune, with matrices as its delta gives them so far."""

    checkpoint: Weights
    replacement: Callable[
        [str], Tensor | None
    ]  # of a tensor by name, in the checkpoint's shape; None: its own

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def config(self) -> Mapping[str, Any]:
        return self.checkpoint.config

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self.checkpoint.tensors

    def read(self, name: str) -> Tensor:
        replaced = self.replacement(name)
        return self.checkpoint.read(name) if replaced is None else replaced


@dataclass(slots=True, eq=False)
class _Source:
    """What one parameter, or the parameters that one conversion gives, are made from."""

    converter: WeightConverter | None
    tensors: list[tuple[str, str]] = field(
        default_factory=list
    )  # name, and the converter's pattern it matches


@dataclass(frozen=True, slots=True, eq=False)
class WeightMap:
    """Where every parameter of a model comes from."""

    model: PreTrainedModel  # its parameters may be on the meta device
    weights: Weights
    sources: Mapping[str, _Source]  # by parameter, or by the first of those that a conversion gives
    tied: Mapping[str, str]  # parameters that need not be stored, and the ones that they are then

    @classmethod
    def of(cls, model: PreTrainedModel, weights: Weights) -> WeightMap:
        transforms = get_model_conversion_mapping(model)
        renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        known, prefix = model.state_dict(), model.base_model_prefix
        sources: dict[str, _Source] = {}
        for name in sorted(weights.tensors, key=dot_natural_key):  # experts by number, as they are stacked
            target, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if target not in known and name in known:
                target, pattern = name, None
            if target in known:
                source = sources.setdefault(target, _Source(by_pattern[pattern] if pattern else None))
                source.tensors.append((name, pattern or name))
        return cls(model, weights, sources, dict(model.all_tied_weights_keys))

    def stored_name(self, parameter: str) -> str | None:
        """The tensor that a parameter is, as the checkpoint calls it; None where it is made of several."""
        source = self.sources.get(parameter) or self.sources.get(self.tied.get(parameter, ""))
        return source.tensors[0][0] if source is not None and source.converter is None else None

    def fill(self, module: nn.Module, path: str, like: Tensor, without: Sequence[str] = ()) -> None:
        """Give `module`, which stands at `path` in the model, the stored values of its parameters and buffers.

        Args:
            like: has the device that all of them shall be on, and the dtype of those that are floats.
            without: paths in the model whose parameters stay as they are.

        Raises:
            CheckpointError: a tensor is missing or has another shape than the configuration says.
        """
        prefix, skipped = f"{path}." if path else "", tuple(f"{name}." for name in without)
        values: dict[str, Tensor] = {}
        for target in self.sources:
            if target.startswith(prefix) and not target.startswith(skipped):
                values |= self._read(target, like)
        for name in module.state_dict():
            full = prefix + name
            origin = full if full in values else self.tied.get(full, full)
            if full.startswith(skipped):
                continue
            if origin not in values and origin in self.sources:
                values |= self._read(origin, like)
            self._assign(module, name, full, values.get(origin))
        _move_buffers(module, like.device)

    def _read(self, target: str, like: Tensor) -> dict[str, Tensor]:
        """The values of a parameter, or of all those that come out of its conversion."""
        source = self.sources[target]
        if source.converter is None:
            return {target: self._read_stored(source.tensors[0][0], like)}
        converter = copy.deepcopy(source.converter)
        for name, pattern in source.tensors:
            converter.add_tensor(target, name, pattern, partial(self._read_stored, name, like))  # type: ignore[arg-type]
        made = converter.convert(target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _read_stored(self, name: str, like: Tensor) -> Tensor:
        tensor = self.weights.read(name)
        return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)

    def _assign(self, module: nn.Module, name: str, full: str, value: Tensor | None) -> None:
        parent, _, leaf = name.rpartition(".")
        owner = module.get_submodule(parent)
        own = getattr(owner, leaf)
        if value is None and own.is_meta:
            raise CheckpointError(
                f"{self.weights.path}: parameter {full!r} is not there: fetch the checkpoint again"
            )
        if value is None:
            return  # a buffer that this version of the library computes
        if value.shape != own.shape:
            raise CheckpointError(
                f"{self.weights.path}: tensor {full!r} has shape {tuple(value.shape)} and the model that config.json "
                f"describes {tuple(own.shape)}: fetch the checkpoint again"
            )
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False) if leaf in owner._parameters else value)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers that the library computes, in the dtype in which it does."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
