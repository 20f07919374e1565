"""Load stored tensors into a model's parameters, one part of the model at a time. Knows names; must not run a model.

A checkpoint may use other names than the model and hold experts singly that the model has in one parameter. Both are
converted by the rules of transformers, as in `from_pretrained`.
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
    """Weights of a model: a checkpoint, or one with some tensors replaced."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """A checkpoint with some tensors replaced, such as a fine-tune with the matrices that its delta gives so far."""

    checkpoint: Weights
    # By name, a tensor of the checkpoint's shape; None keeps the checkpoint's.
    replacement: Callable[[str], Tensor | None]

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
    """The stored tensors behind one parameter, or behind the parameters of one conversion."""

    converter: WeightConverter | None
    # Name, and the converter's pattern that it matches.
    tensors: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class WeightMap:
    """The stored tensors of every parameter of a model."""

    model: PreTrainedModel  # its parameters may be on the meta device
    weights: Weights
    sources: Mapping[str, _Source]  # by parameter, or by the first parameter of a conversion
    tied: Mapping[str, str]  # the parameter that each tied parameter shares its tensor with

    @classmethod
    def of(cls, model: PreTrainedModel, weights: Weights) -> WeightMap:
        transforms = get_model_conversion_mapping(model)
        renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        known, prefix = model.state_dict(), model.base_model_prefix
        sources: dict[str, _Source] = {}
        # In natural order, because experts are stacked by number.
        for name in sorted(weights.tensors, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if target not in known and name in known:
                target, pattern = name, None
            if target in known:
                source = sources.setdefault(target, _Source(by_pattern[pattern] if pattern else None))
                source.tensors.append((name, pattern or name))
        return cls(model, weights, sources, dict(model.all_tied_weights_keys))

    def stored_name(self, parameter: str) -> str | None:
        """Return the checkpoint's name of a parameter; None if it is converted from several tensors."""
        source = self.sources.get(parameter) or self.sources.get(self.tied.get(parameter, ""))
        return source.tensors[0][0] if source is not None and source.converter is None else None

    def fill(self, module: nn.Module, path: str, like: Tensor, without: Sequence[str] = ()) -> None:
        """Load the parameters and buffers of `module`, which is at `path` in the model.

        Args:
            like: gives their device, and the dtype of floats.
            without: paths in the model whose parameters are not loaded.

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
        """Return the values of a parameter, or of all parameters of its conversion, by name."""
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
        # A buffer that transformers computes.
        if value is None:
            return
        if value.shape != own.shape:
            raise CheckpointError(
                f"{self.weights.path}: tensor {full!r} has shape {tuple(value.shape)} and the model that config.json "
                f"describes {tuple(own.shape)}: fetch the checkpoint again"
            )
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False) if leaf in owner._parameters else value)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers that transformers computes; they keep their dtype."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
