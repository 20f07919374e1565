"""Checkpoints on the Hugging Face hub: find what has to be fetched, say it, fetch it into huggingface_hub's cache."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import DryRunError, RevisionNotFoundError
from huggingface_hub.utils.tqdm import tqdm

from deltastore.console import size_text
from deltastore.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# A branch, a tag or a commit; a branch's name may have slashes.
HUB_SOURCE = re.compile(rf"({HUB_ID.pattern})(?:@(\w[\w./+-]*))?")
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md")
UNWANTED = ("consolidated*", "original/*")  # second copies of the weights


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub, before `fetch_all` downloads it."""

    id: str  # without its revision
    revision: str | None  # as it was given; None is the newest commit
    commit: str
    files: Mapping[str, int]  # bytes by name, of the files that are downloaded
    missing_bytes: int  # of those that the cache lacks

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"

    def fetch(self, name: str) -> Path:
        """Return the path of one of `files` in the cache, downloaded if it is not there.

        Raises:
            CheckpointError: the hub does not give it.
        """
        try:
            return Path(huggingface_hub.hf_hub_download(self.id, name, revision=self.commit))
        except (OSError, ValueError) as error:
            raise _not_on_hub(str(self), error) from error

    def fetch_all(self) -> Path:
        """Return the directory of the model in the cache, downloaded as far as it is not there.

        Raises:
            CheckpointError: the hub does not give it.
        """
        try:
            # By its own name, so that the cache knows the commit of it without the hub.
            return Path(_snapshot(self.id, self.revision))
        except (OSError, ValueError) as error:
            raise _not_on_hub(str(self), error) from error

    def size_line(self) -> str:
        """Return one line about what `fetch_all` downloads."""
        total = size_text(sum(self.files.values()))
        return f"fetching {self} from the hub: {size_text(self.missing_bytes)} of {total}; the rest is in the cache"


def is_hub_id(source: str) -> bool:
    """Return True for what `checkpoint_directory` looks up on the hub: ``ORG/NAME`` or ``ORG/NAME@REV``.

    Raises:
        CheckpointError: no directory, and no id of a model.
    """
    path = Path(source)
    if path.is_dir():
        return False
    if path.exists() or not HUB_SOURCE.fullmatch(source):
        raise CheckpointError(
            f"{source}: no such directory; give a Hugging Face checkpoint's directory, or a hub id as ORG/NAME or "
            "ORG/NAME@REV"
        )
    return True


def repo_of(source: str) -> str | None:
    """Return the ``ORG/NAME`` of a hub id with an owner, without its revision; None for any other text."""
    match = HUB_SOURCE.fullmatch(source)
    return match[1] if match is not None and "/" in match[1] else None


def find_on_hub(source: str) -> HubModel:
    """List what `checkpoint_directory` would download, and download nothing.

    A model that is in the cache is found without the hub, too.

    Args:
        source: a hub id, for which `is_hub_id` is True.

    Raises:
        CheckpointError: no such model, or no such revision of it.
    """
    match = HUB_SOURCE.fullmatch(source)
    assert match is not None
    model_id, _, revision = match.groups()
    try:
        found = _snapshot(model_id, revision, dry_run=True, tqdm_class=_NoBar)
    except DryRunError as error:
        return _find_in_cache(model_id, revision, error)
    except (OSError, ValueError) as error:
        raise _not_on_hub(source, error) from error
    sizes = {file.filename: file.file_size or 0 for file in found}
    commit = found[0].commit_hash if found else ""
    missing_bytes = sum(sizes[file.filename] for file in found if file.will_download)
    return HubModel(model_id, revision, commit, sizes, missing_bytes)


def checkpoint_directory(source: str) -> Path:
    """Return the directory of a checkpoint; a hub id is downloaded unless the cache has it.

    The bytes to download are said on stderr first.

    Raises:
        CheckpointError: no directory, and no model that can be downloaded.
    """
    if not is_hub_id(source):
        return Path(source)
    model = find_on_hub(source)
    if model.missing_bytes:
        print(model.size_line(), file=sys.stderr, flush=True)
    return model.fetch_all()


class _NoBar(tqdm):
    """No progress bar."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]


def _snapshot(model_id: str, revision: str | None, **options: Any) -> Any:
    return huggingface_hub.snapshot_download(
        model_id,
        revision=revision,
        allow_patterns=list(WANTED),
        ignore_patterns=list(UNWANTED),
        **options,
    )


def _find_in_cache(model_id: str, revision: str | None, reason: Exception) -> HubModel:
    try:
        directory = Path(_snapshot(model_id, revision, local_files_only=True))
    except (OSError, ValueError):
        # The hub's own answer says more than that the cache is empty.
        source = model_id if revision is None else f"{model_id}@{revision}"
        raise _not_on_hub(source, reason.__cause__ or reason) from reason
    paths = [path for path in directory.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in paths}
    return HubModel(model_id, revision, directory.name, sizes, missing_bytes=0)


def _not_on_hub(source: str, error: BaseException) -> CheckpointError:
    if isinstance(error, RevisionNotFoundError):
        model_id, _, revision = source.partition("@")
        return CheckpointError(
            f"{source}: the hub has {model_id}, and no revision {revision!r} of it: give a branch, a tag or a whole "
            "commit of it, or leave `@` and the revision away for the newest"
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(
        f"{source}: no such directory, and the hub does not give a model of that id ({reason}): "
        "give a directory, or run `hf auth login` if the model is gated"
    )
