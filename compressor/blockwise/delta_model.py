"""Present a base with a delta as the weights of one model: names, shapes, values and configuration.

Reads one tensor at a time; must not run a model or write files. The artifact must have passed `check_artifact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compressor.io.pairs import Pairs, TensorPair, is_computed, layer_order
from compressor.io.row_blocks import row_blocks
from compressor.io.side_files import TOKEN_IDS
from deltastore.base.checkpoint import HEAD_SUFFIXES, Checkpoint, StoredTensor
from deltastore.errors import ArtifactError
from deltastore.format.artifact import Artifact
from deltastore.format.header import parse_json
from deltastore.format.manifest import GENERATION_FILE

# For types alone, because it imports transformers, which takes seconds.
if TYPE_CHECKING:
    from compressor.blockwise.weights import Weights

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
        """The base's configuration with the fine-tune's ties, vocabulary and token ids.

        Raises:
            ArtifactError: the delta's generation config is no JSON object.
        """
        manifest = self.artifact.manifest
        own = self.artifact.file(GENERATION_FILE) if GENERATION_FILE in manifest.files else b"{}"
        ids = parse_json(own, f"{self.artifact.where}: {GENERATION_FILE}")
        if not isinstance(ids, dict):
            raise ArtifactError(f"{self.artifact.where}: {GENERATION_FILE} holds no JSON object")
        config = {**self.base.config, **{key: ids[key] for key in TOKEN_IDS if key in ids}}
        config["tie_word_embeddings"] = manifest.tied
        if self.base.embedding_name:
            config["vocab_size"] = self.shape(self.base.embedding_name)[0]
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


def base_with_added_rows(pairs: Pairs) -> Weights:
    """Return the base with the rows that the fine-tune adds to its vocabulary, as the fine-tune has them.

    It has a logit for every token of the fine-tune, so that the two can be compared on any text.
    """
    longer = {
        pair.base_tensor.name: pair
        for pair in pairs.tensors
        if pair.added_rows and pair.name == pair.base_tensor.name
    }
    return _BaseWithAddedRows(pairs.base, longer, pairs.base.is_tied()) if longer else pairs.base


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
        return {**self.finetune.config, "tie_word_embeddings": False}

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
    # Kept, because `is_tied` reads all of a stored head.
    tied: bool

    @property
    def path(self) -> Path:
        return self.base.path

    @property
    def config(self) -> Mapping[str, Any]:
        rows = max(pair.tensor.shape[0] for pair in self.longer.values())
        return {**self.base.config, "vocab_size": rows, "tie_word_embeddings": self.tied}

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        repeated = {self.base.head_name} if self.tied else set()
        return {name: stored for name, stored in self.base.tensors.items() if name not in repeated}

    def read(self, name: str) -> Tensor:
        weight, pair = self.base.read(name), self.longer.get(name)
        added = None if pair is None else pair.added()
        return weight if added is None else torch.cat([weight.float(), added.float()])
