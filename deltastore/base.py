"""The identity of a base: its fingerprint, tensor shapes and the configuration that a delta cannot change.

Reads headers and `config.json`. Must not depend on how deltas are coded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.errors import CheckpointError, failures_as
from deltastore.format.header import MAX_NAME_CHARS

if TYPE_CHECKING:
    from deltastore.checkpoint import Checkpoint
    from deltastore.fingerprint import Fingerprints

FREE_CONFIG = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "bos_token_id", "dtype", "embd_pdrop",
    "eos_token_id", "hidden_dropout", "attention_probs_dropout_prob", "resid_pdrop", "embd_layer_dropout", "id2label",
    "initializer_range", "label2id", "max_position_embeddings", "name_or_path", "pad_token_id", "pretraining_tp",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict", "chunk_size_feed_forward",
    "classifier_dropout", "task_specific_params", "tie_word_embeddings", "torch_dtype", "transformers_version",
    "unsloth_version", "unsloth_fixed", "use_cache", "vocab_size", "_attn_implementation_autoset",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Base:
    """A base's identity and tensor shapes. Only fingerprints identify it; `id` is a label for messages."""

    id: str
    fingerprint: str  # 64 hex digits
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]  # as `architecture` returns it
    embedding: str | None  # name of the input embedding
    head: str | None  # name of the output head; None if it is tied to the embedding
    former: tuple[str, ...] = ()  # fingerprints with computed tables, as artifacts had at first

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        cache: Path | None = None,
        *,
        fingerprints: Fingerprints | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Base:
        """Fingerprint a checkpoint and collect its shapes. Hashing takes a second per 1 to 2 GB, the first time only.

        Args:
            checkpoint: The opened base.
            cache: The file of cached fingerprints; see `deltastore.fingerprint.fingerprints`.
            fingerprints: The checkpoint's fingerprints if they are known already; then nothing is hashed.
            progress: Called with the number of bytes hashed since the last call.

        Raises:
            CheckpointError: A shard is missing, or transformers refuses the configuration.
        """
        # Deferred: it imports torch, which a process that receives a base's facts does not need.
        from deltastore.fingerprint import fingerprints as fingerprints_of

        known = fingerprints or fingerprints_of(checkpoint, cache, progress)
        shapes = checkpoint.shapes()
        head = checkpoint.head_name if checkpoint.head_name in shapes else None
        name = str(checkpoint.config.get("_name_or_path") or checkpoint.path.resolve().name)
        if len(name.split("/")) != 2 or name.startswith((".", "~")):
            # Not a hub id but a local path, which may be private.
            name = checkpoint.path.resolve().name
        return cls(
            id="".join(filter(str.isprintable, name))[:MAX_NAME_CHARS],
            fingerprint=known.own,
            shapes=shapes,
            config=architecture(checkpoint.config),
            embedding=checkpoint.embedding_name,
            head=head,
            former=known.former,
        )

    def is_named(self, fingerprint: str) -> bool:
        """True for the base's fingerprint, and for those with computed tables, which old artifacts hold."""
        return fingerprint == self.fingerprint or fingerprint in self.former


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration keys that change a model's arithmetic: rope, epsilon, window, activation, head counts.

    Defaults of transformers are filled in, because its versions write different keys for the same fact.

    Raises:
        CheckpointError: transformers knows the model type and refuses the configuration.
    """
    # Deferred: it takes a second to import.
    from transformers import CONFIG_MAPPING, AutoConfig

    # Copied, because transformers changes its argument.
    facts: Any = json.loads(json.dumps(config))
    with failures_as(_refused_config):
        if facts.get("model_type") in CONFIG_MAPPING:
            facts = AutoConfig.for_model(**facts).to_dict()
    kept = {key: value for key, value in facts.items() if key not in FREE_CONFIG}
    return dict(_plain(json.loads(json.dumps(kept, default=str))))


def _refused_config(reason: str) -> CheckpointError:
    return CheckpointError(f"config.json: transformers refuses it: {reason}; fetch the file again")


def different_facts(facts: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ between two configurations. A key that only one of them has is ignored."""
    return sorted(key for key in facts.keys() & others.keys() if facts[key] != others[key])


def _plain(value: Any) -> Any:
    """Drop the key `type` where `rope_type` stands beside it: transformers writes both for one fact."""
    if not isinstance(value, dict):
        return value
    return {key: _plain(part) for key, part in value.items() if key != "type" or "rope_type" not in value}
