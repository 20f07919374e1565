"""Find a checkpoint's directory: a local one, or a hub id in the cache of huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub

from deltastore.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
UNWANTED = ("consolidated*", "original/*")  # second copies of the weights


def checkpoint_directory(source: str) -> Path:
    """Return the directory of a checkpoint; a hub id is downloaded unless the cache has it.

    Raises:
        CheckpointError: no directory, and no model that can be downloaded.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists() or not HUB_ID.fullmatch(source):
        raise CheckpointError(
            f"{source}: no such directory; give a Hugging Face checkpoint's directory, or a hub id"
        )

    try:
        return Path(
            huggingface_hub.snapshot_download(
                source, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)
            )
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{source}: no such directory, and the hub does not give a model of that id ({reason}): "
            "give a directory, or run `hf auth login` if the model is gated"
        ) from error
