"""The base as deltas see it: its fingerprint, the shapes of its tensors and the facts that a delta cannot carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltastore.checkpoint import Checkpoint
from deltastore.fingerprint import fingerprint

FREE_CONFIG = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "bos_token_id", "dtype", "embd_pdrop",
    "eos_token_id", "hidden_dropout", "attention_probs_dropout_prob", "resid_pdrop", "embd_layer_dropout", "id2label",
    "initializer_range", "label2id", "max_position_embeddings", "name_or_path", "pad_token_id", "pretraining_tp",
    "classifier_dropout", "task_specific_params", "tie_word_embeddings", "torch_dtype", "transformers_version",
    "unsloth_version", "unsloth_fixed", "use_cache", "vocab_size", "_attn_implementation_autoset",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Base:
    """A base's identity and shapes. `id` is for people: two copies of one base may be called differently."""

    id: str
    fingerprint: str
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]  # the architecture's facts alone
    embedding: str | None  # name of the input embedding
    head: str | None  # name of the output head, where the base has one of its own

    @classmethod
    def of(cls, checkpoint: Checkpoint, cache: Path | None = None) -> Base:
        """Fingerprint a checkpoint (seconds per gigabyte the first time) and take down its shapes."""
        return cls(
            id=str(checkpoint.config.get("_name_or_path") or checkpoint.path.resolve().name),
            fingerprint=fingerprint(checkpoint, cache),
            shapes={name: stored.shape for name, stored in checkpoint.tensors.items()},
            config=architecture(checkpoint.config),
            embedding=checkpoint.embedding_name,
            head=checkpoint.head_name,
        )


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a model's configuration that change its arithmetic: rope, epsilon, window, activation, head counts."""
    return {key: value for key, value in config.items() if key not in FREE_CONFIG}
