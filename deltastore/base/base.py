"""The base as deltas see it: its fingerprint, the shapes of its tensors and the facts that a delta cannot carry."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltastore.base.checkpoint import Checkpoint
from deltastore.base.fingerprint import fingerprint as fingerprint_of
from deltastore.errors import CheckpointError
from deltastore.format.header import MAX_NAME_CHARS

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
    """A base's identity and shapes. `id` is for people: two copies of one base may be called differently."""

    id: str
    fingerprint: str
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]  # the architecture's facts alone
    embedding: str | None  # name of the input embedding
    head: str | None  # name of the output head, where the base has one of its own

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        cache: Path | None = None,
        *,
        fingerprint: str | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Base:
        """Fingerprint a checkpoint (a second per gigabyte or two the first time) and take down its shapes.

        Args:
            checkpoint: the opened base.
            cache: see `deltastore.base.fingerprint.fingerprint`.
            fingerprint: the checkpoint's, where it was computed elsewhere; then nothing is hashed.
            progress: told the bytes that are hashed; see `deltastore.base.fingerprint.fingerprint`.

        Raises:
            CheckpointError: a shard has gone, or the configuration cannot be used.
        """
        shapes = checkpoint.shapes()
        head = checkpoint.head_name if checkpoint.head_name in shapes else None
        name = str(checkpoint.config.get("_name_or_path") or checkpoint.path.resolve().name)
        if len(name.split("/")) != 2 or name.startswith((".", "~")):
            name = checkpoint.path.resolve().name  # no hub id but somebody's path, which stays private
        return cls(
            id="".join(filter(str.isprintable, name))[:MAX_NAME_CHARS],
            fingerprint=fingerprint or fingerprint_of(checkpoint, cache, progress),
            shapes=shapes,
            config=architecture(checkpoint.config),
            embedding=checkpoint.embedding_name,
            head=head,
        )


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a model's configuration that change its arithmetic: rope, epsilon, window, activation, head counts.

    Completed with the library's defaults, because its versions write other keys for the same facts.

    Raises:
        CheckpointError: a configuration that the library knows and refuses.
    """
    from huggingface_hub.errors import StrictDataclassError  # both take a second to import
    from transformers import CONFIG_MAPPING, AutoConfig

    facts: Any = json.loads(json.dumps(config))  # a copy, because the library changes what it is given
    if facts.get("model_type") in CONFIG_MAPPING:
        try:
            facts = AutoConfig.for_model(**facts).to_dict()
        except (StrictDataclassError, ValueError, TypeError, KeyError, ArithmeticError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"config.json: the library refuses it: {reason}") from error
    kept = {key: value for key, value in facts.items() if key not in FREE_CONFIG}
    return dict(_plain(json.loads(json.dumps(kept, default=str))))


def different_facts(facts: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """The names of facts on which two configurations disagree. One that only one of them states is no disagreement."""
    return sorted(key for key in facts.keys() & others.keys() if facts[key] != others[key])


def _plain(value: Any) -> Any:
    """Without the older name of the rope's type, which the library leaves beside the newer one."""
    if not isinstance(value, dict):
        return value
    return {key: _plain(part) for key, part in value.items() if key != "type" or "rope_type" not in value}
