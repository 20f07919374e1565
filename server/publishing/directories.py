"""Open an artifact below a directory that the operator allowed, following no symbolic link there.

Each part of the path is opened relative to the directory before it, so that a part which is replaced meanwhile cannot
lead out of the allowed directory.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from deltastore.errors import shown
from server.errors import InvalidRequest

ARTIFACT_SUFFIX = ".safetensors"
PARAM = "source"
# Bound on the entries of a directory that is searched for its artifact.
MAX_ENTRIES = 10_000
# A FIFO or a device must not make `open` wait.
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_artifact(path: str, allowed: Sequence[Path]) -> int:
    """Open the artifact at `path`, which is a file, or a directory with one file `*.safetensors`.

    Args:
        path: an absolute path below one of `allowed`.
        allowed: directories of the operator, which may themselves be reached through links.

    Returns:
        The descriptor of a regular file, open for reading.

    Raises:
        InvalidRequest: there is no such artifact, or it is not below an allowed directory. The message is the same for
            both, so that it does not tell which files exist.
    """
    if path.startswith("hf://"):
        raise InvalidRequest(
            f"{shown(path)}: a server fetches from no hub: run `peraxis push` of it, which does, with your own token",
            PARAM,
        )
    if not allowed:
        raise InvalidRequest(
            "this server publishes from no directory: upload the artifact, or ask the operator for --source-dir",
            PARAM,
        )
    root, parts = _below(path, allowed)
    try:
        found = _open_below(root, parts)
    except OSError as error:
        raise _refused(path) from error
    if found is None:
        raise _refused(path)
    return found


@contextlib.contextmanager
def opened_artifact(path: str, allowed: Sequence[Path]) -> Iterator[int]:
    """Open the artifact at `path` inside the block; raises as `open_artifact` does."""
    descriptor = open_artifact(path, allowed)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _below(path: str, allowed: Sequence[Path]) -> tuple[Path, list[str]]:
    """Return the allowed directory that `path` lies in, and the parts of the path below it."""
    parts = path.split("/")
    is_plain = path.startswith("/") and "\0" not in path and not {".", ".."} & set(parts)
    names = [part for part in parts if part]
    for directory in allowed if is_plain else ():
        prefix = list(directory.absolute().parts[1:])
        if names[: len(prefix)] == prefix:
            return directory, names[len(prefix) :]
    raise _refused(path)


def open_path(root: Path, parts: Iterable[str]) -> int:
    """Return a descriptor of the file or directory that `parts` lead to from `root`; raise OSError, also for a link."""
    current = os.open(root, DIRECTORY)
    for part in parts:
        try:
            following = os.open(part, FLAGS, dir_fd=current)
        finally:
            os.close(current)
        current = following
    return current


def _open_below(root: Path, parts: list[str]) -> int | None:
    """Open a regular file, or the one artifact of a directory; None if it is neither."""
    current = open_path(root, parts)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, current)
        mode = os.fstat(current).st_mode
        if stat.S_ISREG(mode):
            stack.pop_all()
            return current
        if not stat.S_ISDIR(mode) or (name := _only_artifact(current)) is None:
            return None
        file = os.open(name, FLAGS, dir_fd=current)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            return None
        return file


def _only_artifact(directory: int) -> str | None:
    """Return the name of the one file `*.safetensors` of an open directory; None if there is none or several."""
    names = []
    with os.scandir(directory) as entries:
        for number, entry in enumerate(entries):
            if number >= MAX_ENTRIES:
                return None
            if entry.name.endswith(ARTIFACT_SUFFIX):
                names.append(entry.name)
    return names[0] if len(names) == 1 else None


def _refused(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{shown(path)} is no artifact that this server publishes: give a file, or a directory with one "
        f"*{ARTIFACT_SUFFIX}, below a directory of the server's --source-dir, without .. and symbolic links",
        PARAM,
    )
