"""Find the artifact that vLLM's `lora_path` names below the directory that the operator allows. Knows no HTTP.

Paths come from clients; `server/sources/directories.py` follows no symbolic link below the directory.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from deltastore.errors import shown
from server.errors import InvalidRequest
from server.sources.directories import ARTIFACT_SUFFIX, open_path

MAX_PATH = 4096
PARAM = "lora_path"
# The file by which peft tells an adapter.
PEFT_CONFIG = "adapter_config.json"


def open_artifact(lora_path: str, lora_dir: Path | None) -> BinaryIO | None:
    """Open the artifact that a path names: a file, or the only `.safetensors` file of a directory.

    Args:
        lora_path: relative to `lora_dir`, or absolute and below it.
        lora_dir: the allowed directory; None allows no file.

    Returns:
        The open file, or None if a relative path names nothing, as the hub id that a controller sends may.

    Raises:
        InvalidRequest: the path leads out of the directory or through a symbolic link, or names no artifact.
    """
    parts = _parts_below(lora_path, lora_dir)
    if lora_dir is None:
        return None
    descriptor = _open_parts(lora_dir, parts, lora_path)
    if descriptor is None:
        if lora_path.startswith("/"):
            raise _refused(lora_path, "names nothing in the server's --lora-dir")
        return None
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        try:
            parts = (*parts, _only_artifact(os.listdir(descriptor), lora_path))
        finally:
            os.close(descriptor)
        descriptor = _open_parts(lora_dir, parts, lora_path)
        if descriptor is None:
            raise _refused(lora_path, "changed while it was read")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(lora_path, "is neither a file nor a directory")
    return os.fdopen(descriptor, "rb")


def _parts_below(lora_path: str, lora_dir: Path | None) -> tuple[str, ...]:
    """Return the names of a path relative to the allowed directory, by its text alone."""
    parts = PurePosixPath(lora_path).parts
    if len(lora_path) > MAX_PATH or "\0" in lora_path or ".." in parts:
        raise _refused(lora_path, "is no plain path: give one without '..'")
    if not lora_path.startswith("/"):
        return parts
    for directory in () if lora_dir is None else (lora_dir.absolute(), lora_dir.resolve()):
        if parts[: len(directory.parts)] == directory.parts:
            return parts[len(directory.parts) :]
    raise _refused(lora_path, "does not lie in a directory that the server allows with --lora-dir")


def _open_parts(lora_dir: Path, parts: tuple[str, ...], lora_path: str) -> int | None:
    """Return a descriptor of the file or directory, or None if there is none."""
    try:
        return open_path(lora_dir, parts)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return None
        if error.errno == errno.ELOOP:
            raise _refused(
                lora_path, "leads through a symbolic link: give the path of the file itself"
            ) from error
        raise _refused(lora_path, f"cannot be read: {error.strerror}") from error


def _only_artifact(names: list[str], lora_path: str) -> str:
    """Return the name of the artifact among the files of a directory."""
    if PEFT_CONFIG in names:
        adapter = shlex.quote(lora_path.rstrip("/"))
        raise _refused(
            lora_path,
            "is a PEFT adapter, and this server takes deltas. Make one of it: "
            f"peraxis compress --base BASE --finetune {adapter} --out {adapter}{ARTIFACT_SUFFIX}",
        )
    artifacts = [name for name in names if name.endswith(ARTIFACT_SUFFIX)]
    if len(artifacts) != 1:
        raise _refused(
            lora_path,
            f"is a directory with {len(artifacts)} {ARTIFACT_SUFFIX} files: give the path of one file",
        )
    return artifacts[0]


def _refused(lora_path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"lora_path {shown(lora_path)} {why}", PARAM)
