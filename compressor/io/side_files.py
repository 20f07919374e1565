"""Choose the files of a checkpoint that a delta carries: tokenizer, chat template, generation config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltastore.base.checkpoint import Checkpoint
from deltastore.errors import ArtifactError, CheckpointError
from deltastore.format.header import parse_json
from deltastore.format.layout import MAX_FILE_BYTES
from deltastore.format.manifest import GENERATION_FILE, TOKENIZER_FILES

TOKENIZER_FILE = "tokenizer.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Written by transformers; no token depends on it.
FREE_GENERATION = frozenset({
    "transformers_version", "_from_model_config", "output_attentions", "output_hidden_states", "output_logits",
    "output_scores", "return_dict_in_generate", "use_cache",
})  # fmt: skip


def own_files(base: Checkpoint, finetune: Checkpoint) -> dict[str, bytes]:
    """Return the files that a fine-tune does not share with its base, in an artifact's order.

    All files of a tokenizer go together, because a mixture of two tokenizers is invalid.

    Raises:
        CheckpointError: a file is too large or not what its name says.
    """
    files, tokenizer = {}, tokenizer_files(finetune)
    if tokenizer and tokenizer != tokenizer_files(base):
        _check_tokenizer(finetune.path, tokenizer)
        files.update(tokenizer)
    if _generation_settings(finetune) != _generation_settings(base):
        files[GENERATION_FILE] = generation_file(finetune)
    return files


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the tokenizer files of a checkpoint, by name."""
    paths = {name: checkpoint.path / name for name in TOKENIZER_FILES}
    return {name: _content(path) for name, path in paths.items() if path.is_file()}


def generation_file(checkpoint: Checkpoint) -> bytes:
    """Return the generation config in force: the checkpoint's file, or the token ids of its configuration."""
    path = checkpoint.path / GENERATION_FILE
    if path.is_file():
        return _content(path)
    ids = {key: checkpoint.config[key] for key in TOKEN_IDS if checkpoint.config.get(key) is not None}
    return json.dumps(ids, indent=2).encode() + b"\n"


def _check_tokenizer(directory: Path, files: Mapping[str, bytes]) -> None:
    """Refuse files that `tokenizers` or JSON cannot parse; transformers is not needed for that."""
    from tokenizers import Tokenizer

    for name, content in files.items():
        try:
            if name == TOKENIZER_FILE:
                Tokenizer.from_str(content.decode())
            elif name.endswith(".json"):
                json.loads(content)
        except BaseException as error:
            # tokenizers raises plain exceptions, of no class of its own.
            if type(error) is not Exception and not isinstance(error, (ValueError, RecursionError)):
                raise
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{directory / name}: it is no tokenizer ({reason}): fetch the fine-tune's tokenizer again"
            ) from error


def _content(path: Path) -> bytes:
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise CheckpointError(
            f"{path}: {size} bytes, more than the {MAX_FILE_BYTES} that a delta carries of one file"
        )
    return path.read_bytes()


def _generation_settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    where = checkpoint.path / GENERATION_FILE
    try:
        document = parse_json(generation_file(checkpoint), str(where))
    except ArtifactError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{where}: it holds no JSON object")
    return {key: value for key, value in document.items() if key not in FREE_GENERATION and value is not None}
