"""Find a checkpoint, on disk or in the cache of huggingface_hub, and its files beside the weights.

A delta carries its tokenizer, chat template and generation config. No code that a checkpoint brings is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import DryRunError
from huggingface_hub.utils.tqdm import tqdm

from deltastore.checkpoint import Checkpoint
from deltastore.errors import ArtifactError, CheckpointError, failures_as
from deltastore.format.files import GENERATION_FILE, MAX_NAMED_TEMPLATES, NAMED_TEMPLATES, tokenizer_paths
from deltastore.format.header import parse_json
from deltastore.format.layout import MAX_FILE_BYTES

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md")
UNWANTED = ("consolidated*", "original/*")  # second copies of the weights


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub, before `checkpoint_directory` downloads it."""

    id: str
    commit: str
    files: Mapping[str, int]  # bytes by name, of the files that are downloaded
    missing_bytes: int  # of those that the cache lacks

    def fetch(self, name: str) -> Path:
        """Return the path of one of `files` in the cache, downloaded if it is not there.

        Raises:
            CheckpointError: the hub does not give it.
        """
        try:
            return Path(huggingface_hub.hf_hub_download(self.id, name, revision=self.commit))
        except (OSError, ValueError) as error:
            raise _not_on_hub(self.id, error) from error


def is_hub_id(source: str) -> bool:
    """Return True for what `checkpoint_directory` looks up on the hub.

    Raises:
        CheckpointError: no directory, and no id of a model.
    """
    path = Path(source)
    if path.is_dir():
        return False
    if path.exists() or not HUB_ID.fullmatch(source):
        raise CheckpointError(
            f"{source}: no such directory; give a Hugging Face checkpoint's directory, or a hub id"
        )
    return True


def find_on_hub(model_id: str) -> HubModel:
    """List what `checkpoint_directory` would download, and download nothing.

    A model that is in the cache is found without the hub, too.

    Raises:
        CheckpointError: no such model.
    """
    try:
        found = _snapshot(model_id, dry_run=True, tqdm_class=_NoBar)
    except DryRunError as error:
        return _find_in_cache(model_id, error)
    except (OSError, ValueError) as error:
        raise _not_on_hub(model_id, error) from error
    sizes = {file.filename: file.file_size or 0 for file in found}
    commit = found[0].commit_hash if found else ""
    return HubModel(
        model_id, commit, sizes, sum(sizes[file.filename] for file in found if file.will_download)
    )


def checkpoint_directory(source: str) -> Path:
    """Return the directory of a checkpoint; a hub id is downloaded unless the cache has it.

    Raises:
        CheckpointError: no directory, and no model that can be downloaded.
    """
    if not is_hub_id(source):
        return Path(source)
    try:
        return Path(_snapshot(source))
    except (OSError, ValueError) as error:
        raise _not_on_hub(source, error) from error


class _NoBar(tqdm):
    """No progress bar."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]


def _snapshot(model_id: str, **options: Any) -> Any:
    return huggingface_hub.snapshot_download(
        model_id, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED), **options
    )


def _find_in_cache(model_id: str, reason: Exception) -> HubModel:
    try:
        directory = Path(_snapshot(model_id, local_files_only=True))
    except (OSError, ValueError):
        # The hub's own answer says more than that the cache is empty.
        raise _not_on_hub(model_id, reason.__cause__ or reason) from reason
    paths = [path for path in directory.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in paths}
    return HubModel(model_id, directory.name, sizes, missing_bytes=0)


def _not_on_hub(source: str, error: BaseException) -> CheckpointError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(
        f"{source}: no such directory, and the hub does not give a model of that id ({reason}): "
        "give a directory, or run `hf auth login` if the model is gated"
    )


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
    paths = tokenizer_paths(checkpoint.path)
    num_named = sum(name.startswith(f"{NAMED_TEMPLATES}/") for name in paths)
    if num_named > MAX_NAMED_TEMPLATES:
        raise CheckpointError(
            f"{checkpoint.path / NAMED_TEMPLATES}: {num_named} chat templates, more than the {MAX_NAMED_TEMPLATES} "
            "that a delta carries: remove those that no client names"
        )
    return {name: _content(path) for name, path in paths.items()}


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
        with failures_as(partial(_no_tokenizer, directory / name)):
            if name == TOKENIZER_FILE:
                Tokenizer.from_str(content.decode())
            elif name.endswith(".json"):
                json.loads(content)


def _no_tokenizer(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: it is no tokenizer ({reason}): fetch the fine-tune's tokenizer again")


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


def has_tokenizer(directory: Path) -> bool:
    """Return True if a checkpoint has any of a tokenizer's files."""
    return bool(tokenizer_paths(directory))


def load_tokenizer(directory: Path) -> Any:
    """Return the checkpoint's transformers tokenizer.

    Raises:
        CheckpointError: no tokenizer, or one that cannot be loaded.
    """
    # Deferred, because the import takes seconds.
    from transformers import AutoTokenizer

    with failures_as(
        lambda reason: CheckpointError(f"{directory}: its tokenizer cannot be loaded: {reason}")
    ):
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
