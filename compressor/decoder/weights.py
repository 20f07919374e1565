"""Load stored tensors into a model's parameters, one part of the model at a time. Knows names; must not run a model.

A checkpoint may use other names than the model and hold experts singly that the model has in one parameter. Both are
converted by the rules of transformers, as in `from_pretrained`.

A base with a delta is presented as the weights of one model, a tensor at a time; its artifact must have passed
`check_artifact`. A student's weight of one matrix is the base's, a delta, and the rows that only the fine-tune has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from compressor.codec import code_stack, row_blocks, workers
from compressor.config import Method
from compressor.names import converters_of, stored_targets
from compressor.pairs import Pairs, TensorPair, layer_order
from compressor.sources import TOKEN_IDS, usable_ids
from deltastore.architecture import POSITIONS
from deltastore.checkpoint import HEAD_SUFFIXES, Checkpoint, StoredTensor, is_computed
from deltastore.errors import ArtifactError, CheckpointError
from deltastore.format.artifact import Artifact
from deltastore.format.files import GENERATION_FILE
from deltastore.format.header import parse_json
from deltastore.format.matrix import StackDelta


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


@dataclass(frozen=True, slots=True, eq=False)
class CodedStacks:
    """The stacks of experts of a pair with their deltas, which are coded from weights alone when they are first read.

    Their deltas stay in memory, 1/16 of the stacks in 16 bits.
    """

    pairs: Mapping[str, TensorPair]
    method: Method
    _deltas: dict[str, StackDelta] = field(default_factory=dict)

    def weight(self, name: str) -> Tensor | None:  # [experts, rows, columns] float32
        """Return the base's stack plus its delta; None for another tensor."""
        pair = self.pairs.get(name)
        if pair is None:
            return None
        if name not in self._deltas:
            with workers() as each:
                stack = code_stack(pair.experts(), self.method, transposed=bool(pair.transposed), each=each)
            self._deltas[name] = stack.delta
        return weight_with_delta(pair, self._deltas[name])


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
        by_pattern = {pattern: entry for entry in converters_of(model) for pattern in entry.source_patterns}
        sources: dict[str, _Source] = {}
        for name, target, pattern in stored_targets(model, weights.tensors):
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


# For types alone, because it imports transformers, which takes seconds.
if TYPE_CHECKING:
    pass

BLOCK_NUMEL = 1 << 22  # weights of a matrix that are added at a time


@dataclass(frozen=True, slots=True, eq=False)
class DeltaModel:
    """A base plus a delta, as weights that a decoder can be built from."""

    base: Checkpoint
    artifact: Artifact

    @property
    def path(self) -> Path:
        """The artifact's path, for messages."""
        return self.artifact.path

    @property
    def config(self) -> dict[str, Any]:
        """The base's configuration with the fine-tune's ties, vocabulary, longest context and token ids.

        Raises:
            ArtifactError: the delta's generation config is no JSON object.
        """
        return self._changed(self.base.config)

    @property
    def stored_config(self) -> dict[str, Any]:
        """The same in the form of the base's `config.json`, which may be a wrapper's."""
        return self._changed(self.base.stored_config)

    def _changed(self, base: Mapping[str, Any]) -> dict[str, Any]:
        manifest = self.artifact.manifest
        own = self.artifact.file(GENERATION_FILE) if GENERATION_FILE in manifest.files else b"{}"
        ids = parse_json(own, f"{self.artifact.where}: {GENERATION_FILE}")
        if not isinstance(ids, dict):
            raise ArtifactError(f"{self.artifact.where}: {GENERATION_FILE} holds no JSON object")
        embedding = self.base.embedding_name
        rows = self.shape(embedding)[0] if embedding else None
        config = with_ends(base, manifest.tied, rows, manifest.config.get(POSITIONS))
        if rows is not None:
            kept = {**usable_ids(self.base.config, rows), **usable_ids(ids, rows)}
            for part in (config, config.get("text_config")):
                if isinstance(part, dict):
                    usable = {**usable_ids(part, rows), **kept}
                    part.update({key: usable.get(key) for key in TOKEN_IDS if key in part})
            config |= kept
        return config

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The base's tensor behind each name, in layer order; a head only if it is not tied."""
        names = {name for name in self.base.tensors if not is_computed(name)} - {self.base.head_name}
        if not self.artifact.manifest.tied and (self.base.head_name or self.base.embedding_name):
            names.add(self._head())
        return {name: self.source(name) for name in sorted(names, key=layer_order)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, with added rows."""
        spec = self.artifact.manifest.tensors.get(name)
        return self.source(name).shape if spec is None else tuple(spec.shape)

    def source(self, name: str) -> StoredTensor:
        """Return the base's tensor behind `name`; a tied base has its embedding for a head."""
        spec = self.artifact.manifest.tensors.get(name)
        if spec is not None and spec.against is not None:
            return self.base.tensors[spec.against]
        return self.base.tensors[name if name in self.base.tensors else str(self.base.embedding_name)]

    def read(self, name: str) -> Tensor:
        """Return a tensor's values: coded ones in float32, others in their stored dtype."""
        spec, source = self.artifact.manifest.tensors.get(name), self.source(name)
        if spec is None:
            return self.base.read(source.name)
        if spec.codec == "whole":
            return self.artifact.whole(name)
        if spec.codec == "stack":
            stack = torch.empty(self.shape(name))
            for number, plane in enumerate(self.artifact.stack(name).experts):
                torch.add(
                    self.base.read(source.name, slice(number, number + 1))[0].float(),
                    plane.dense(),
                    out=stack[number],
                )
            return stack
        delta, added = self.artifact.onebit(name), self.artifact.added(name)
        weight = torch.empty(self.shape(name))
        for rows in row_blocks(source.shape, BLOCK_NUMEL):
            torch.add(self.base.read(source.name, rows).float(), delta.dense(rows), out=weight[rows])
        if added is not None:
            weight[source.shape[0] :] = added
        return weight

    def _head(self) -> str:
        """Return the head's name, also if the base has none and the fine-tune's equals the base's embedding."""
        candidates = [self.base.head_name, *self.artifact.manifest.tensors]
        stored = (name for name in candidates if name is not None and name.endswith(HEAD_SUFFIXES))
        is_neox = str(self.base.embedding_name).endswith("embed_in.weight")
        return next(stored, "embed_out.weight" if is_neox else "lm_head.weight")


def with_ends(
    config: Mapping[str, Any], tied: bool, rows: int | None = None, max_positions: int | None = None
) -> dict[str, Any]:
    """Return a configuration, or one whose text part has them, with these ends and this longest context.

    Args:
        tied: the output head is the input embedding.
        rows: tokens of the vocabulary; None leaves them as they are.
        max_positions: tokens of the longest context; None leaves it as it is.
    """
    changed: dict[str, Any] = {"tie_word_embeddings": tied}
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, **changed, "text_config": with_ends(text, tied, rows, max_positions)}
    if rows is not None:
        changed["vocab_size"] = rows
    # Some types name the longest context otherwise.
    if max_positions is not None and POSITIONS in config and config[POSITIONS] != max_positions:
        changed[POSITIONS] = max_positions
    return {**config, **changed}


def base_with_added_rows(pairs: Pairs) -> Weights:
    """Return the base with the rows that the fine-tune adds to its vocabulary, as the fine-tune has them.

    It has a logit for every token of the fine-tune, so that the two can be compared on any text.
    """
    longer = {
        pair.base_tensor.name: pair
        for pair in pairs.tensors
        if pair.added_rows and pair.name == pair.base_tensor.name
    }
    return _BaseWithAddedRows(pairs.base, longer) if longer else pairs.base


def finetune_with_own_head(pairs: Pairs) -> Weights:
    """Return the fine-tune, with its head stored apart where it ties what the base does not."""
    heads = [pair for pair in pairs.tensors if pair.name != pair.tensor.name]
    return _FinetuneWithOwnHead(pairs.finetune, *heads) if heads else pairs.finetune


@dataclass(frozen=True, slots=True, eq=False)
class _FinetuneWithOwnHead:
    """A fine-tune with tied weights, whose head also has the name of the base's."""

    finetune: Checkpoint
    head: TensorPair

    @property
    def path(self) -> Path:
        return self.finetune.path

    @property
    def config(self) -> Mapping[str, Any]:
        return with_ends(self.finetune.config, tied=False)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return {**self.finetune.tensors, self.head.name: self.head.tensor}

    def read(self, name: str) -> Tensor:
        return self.finetune.read(self.head.tensor.name if name == self.head.name else name)


@dataclass(frozen=True, slots=True, eq=False)
class _BaseWithAddedRows:
    """A base with the rows that a fine-tune adds to its embedding, and to its head if that is not tied."""

    base: Checkpoint
    longer: Mapping[str, TensorPair]

    @property
    def path(self) -> Path:
        return self.base.path

    @property
    def config(self) -> Mapping[str, Any]:
        rows = max(pair.tensor.shape[0] for pair in self.longer.values())
        return with_ends(self.base.config, self.base.tied, rows)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self.base.tensors

    def read(self, name: str) -> Tensor:
        weight, pair = self.base.read(name), self.longer.get(name)
        added = None if pair is None else pair.added()
        return weight if added is None else torch.cat([weight.float(), added.float()])


class DenseDelta(Protocol):
    """A stored delta, or one in training."""

    def dense(self, rows: slice, /) -> Tensor:  # [rows, in] float32
        ...


def weight_with_delta(pair: TensorPair, delta: DenseDelta | None) -> Tensor:  # in the fine-tune's shape
    """Return the base's weights plus `delta` in float32, followed by the rows that only the fine-tune has.

    Without a delta and such rows, these are the base's weights in their own dtype.
    """
    if delta is None and not pair.added_rows:
        return pair.base.read(pair.base_tensor.name)
    weight = torch.empty(pair.tensor.shape)
    for rows in row_blocks(pair.shape, BLOCK_NUMEL):
        base = pair.base.read(pair.base_tensor.name, rows).float()
        if delta is None:
            weight[rows] = base
        else:
            torch.add(base, delta.dense(rows).to(base.device), out=weight[rows])
    if (added := pair.added()) is not None:
        weight[pair.shape[0] :] = added
    return weight
