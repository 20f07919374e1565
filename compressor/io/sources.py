"""Find a checkpoint's directory: a local one, or a hub id in the cache of huggingface_hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import DryRunError
from huggingface_hub.utils.tqdm import tqdm

from deltastore.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
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
