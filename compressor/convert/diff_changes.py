"""Match the parts of a diff file with the base's tensors, and refuse a file that is no delta of this base.

Knows names, shapes and dtypes, and reads no values but a repeated head's. It must not know how an artifact is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.convert.diff_files import WRONG_BASE, CodedModule, DiffFile
from compressor.io.pairs import is_computed, layer_order
from deltastore.base.checkpoint import HEAD_SUFFIXES, Checkpoint
from deltastore.errors import CheckpointError, shown
from deltastore.format.layout import FLOATS
from deltastore.format.plan import FP16_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class TensorChange:
    """One tensor of the fine-tune, and the base's tensor that it changes."""

    name: str  # in the artifact
    source: str  # in the base
    content: CodedModule | Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in an artifact."""
        if isinstance(self.content, Tensor):
            return self.content.nbytes
        return self.content.mask.nbytes + FP16_BYTES * self.content.coeff.numel()


def diff_changes(base: Checkpoint, diff: DiffFile, tied: bool) -> list[TensorChange]:
    """Return the changes of a diff file in layer order, checked except for their values.

    Args:
        tied: the fine-tune's output head is its embedding.

    Raises:
        CheckpointError: the file does not fit the base.
    """
    contents: dict[str, CodedModule | Tensor] = {**diff.coded, **diff.whole}
    sources = _sources(contents, base, diff, tied)
    if unknown := sorted(name for name, source in sources.items() if source not in base.tensors):
        raise CheckpointError(
            f"{diff.path}: the base has no {shown(unknown[0])}, nor {len(unknown) - 1} others: {WRONG_BASE}"
        )
    changes = [TensorChange(name, sources[name], contents[name]) for name in sorted(sources, key=layer_order)]
    for change in changes:
        _check_shape(change, base, diff)
    has_own_head = not base.is_tied() and base.head_name is not None
    if base.embedding_name and (has_own_head or not tied):
        _check_vocabulary(changes, base, base.embedding_name, diff)
    return changes


def _sources(
    contents: dict[str, CodedModule | Tensor], base: Checkpoint, diff: DiffFile, tied: bool
) -> dict[str, str]:
    """Return the base's tensor for each name; adds to `contents` a head that the format needs a second time."""
    own_head = None if base.is_tied() else base.head_name
    embedding = base.embedding_name
    if own_head and tied and own_head not in contents:
        contents[own_head] = _embedding_for_head(contents.get(str(embedding)), diff)
    sources = {name: name for name in contents if not is_computed(name)}
    if own_head or not embedding:
        return sources
    for head in [name for name in sources if name.endswith(HEAD_SUFFIXES)]:
        sources[head] = embedding
        if tied:
            _check_repeated(head, contents, embedding, diff)
            del sources[head]
    return sources


def _embedding_for_head(embedding: CodedModule | Tensor | None, diff: DiffFile) -> Tensor:
    """Return the head of a tied fine-tune whose base has its own: the format carries the embedding a second time."""
    if not isinstance(embedding, Tensor):
        raise CheckpointError(
            f"{diff.path}: the fine-tune ties its output head to the embedding, the base does not, and the embedding "
            "is not in the file whole: give --finetune the configuration that the file was trained with"
        )
    return embedding


def _check_repeated(
    head: str, contents: Mapping[str, CodedModule | Tensor], embedding: str, diff: DiffFile
) -> None:
    """Refuse a tied head in the file that is not the embedding once more."""
    one, other = contents[head], contents.get(embedding)
    if (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.dtype == other.dtype
        and torch.equal(one, other)
    ):
        return
    raise CheckpointError(
        f"{diff.path}: {shown(head)} is an output head of its own and the configuration ties it to the embedding: "
        "give --finetune a directory whose config.json has tie_word_embeddings false"
    )


def _check_shape(change: TensorChange, base: Checkpoint, diff: DiffFile) -> None:
    stored = base.tensors[change.source]
    if stored.dtype not in FLOATS:
        raise CheckpointError(
            f"{stored.file}: tensor {shown(stored.name)} is {stored.dtype}: "
            "save the base in bfloat16, float16 or float32"
        )
    if isinstance(change.content, CodedModule):
        change.content.check(stored.shape)
        return
    actual, expected = tuple(change.content.shape), stored.shape
    is_vocabulary = change.source == base.embedding_name or change.name.endswith(HEAD_SUFFIXES)
    if actual == expected or (is_vocabulary and actual[1:] == expected[1:] and actual > expected):
        return
    raise CheckpointError(
        f"{diff.path}: {shown(change.name)} has shape {actual} and the base's is {expected}: {WRONG_BASE}"
        f"{'; a vocabulary may grow and not shrink' if is_vocabulary else ''}"
    )


def _check_vocabulary(
    changes: Sequence[TensorChange], base: Checkpoint, embedding: str, diff: DiffFile
) -> None:
    """Refuse an embedding and an output head of its own that differ in rows."""
    rows = {
        change.name: change.content.shape[0]
        for change in changes
        if isinstance(change.content, Tensor)
        and (change.name == embedding or change.name.endswith(HEAD_SUFFIXES))
    }
    unchanged = base.tensors[embedding].shape[0]
    of_embedding = rows.pop(embedding, unchanged)
    of_head = next(iter(rows.values()), unchanged)
    if of_embedding != of_head:
        raise CheckpointError(
            f"{diff.path}: the embedding has {of_embedding} rows and the output head {of_head}: "
            "save both, resized alike"
        )
