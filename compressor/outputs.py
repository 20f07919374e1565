"""Checks of an output: before any work, that it can be written; after it, that its readers accept it.

A server checks an upload by `deltastore.format.validate`, and its files in a worker process. The same is done here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor.decoder.weights import DeltaModel
from deltastore.architecture import parse_config
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError, StorageFull, UsageError
from deltastore.format.artifact import Artifact
from deltastore.format.files import tokenizer_paths
from deltastore.format.validate import check_artifact, check_base

# The program that checks a variant's files, its exit code for a defect, and its longest time with a slow start.
READER, REFUSED, READER_S = "server.publishing.checks", 3, 330.0
UNCHECKED = ".unchecked"
# Files that were found without a defect, as `_key_of` tells them: fine-tunes of one batch often share theirs.
_sound: set[tuple[Hashable, ...]] = set()
MAX_ROWS = 1 << 31  # of a base whose embedding is not known by its name


def check_not_an_input(out: Path, inputs: Mapping[str, str | Path | None]) -> None:
    """Refuse an `out` that is an input or lies in one.

    Args:
        inputs: a file, directory or hub id by the argument that named it; a hub id cannot be overwritten.

    Raises:
        UsageError: the input that would be overwritten.
    """
    target = out.resolve()
    for argument, source in inputs.items():
        if source is None or not Path(source).exists():
            continue
        path = Path(source).resolve()
        if path == target or path in target.parents:
            relation = "is" if path == target else "lies in"
            raise UsageError(
                f"`out` {out}: it {relation} {source}, which `{argument}` reads: "
                "give `out` the name of a file or directory elsewhere"
            )


def check_file_name(out: Path) -> None:
    """Refuse an `out` that cannot be a file.

    Raises:
        UsageError: `out` is a directory, or lies in none.
    """
    if out.is_dir() or not out.parent.is_dir():
        reason = f"{out} is a directory" if out.is_dir() else f"{out.parent}: no such directory"
        raise UsageError(f"{reason}: give `out` the name of a file in a directory that exists")


def check_free_disk(
    directory: Path, needed_bytes: int, consumer: str, way_out: str = "choose another `out`"
) -> None:
    """Refuse a `directory` with less than `needed_bytes` free.

    Args:
        consumer: subject and verb of the message, such as "importing needs up to".

    Raises:
        StorageFull: fewer bytes are free.
    """
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise StorageFull(
            f"{directory}: {free} bytes are free and {consumer} {needed_bytes}: free some space there or {way_out}"
        )


class ReaderDied(CheckpointError):
    """The process that checks a variant's files died, which says nothing of them."""


def check_written(path: Path, where: str, base: Checkpoint, identity: Base) -> None:
    """Check an artifact as a server checks an upload, and that its merged configuration can be loaded.

    Args:
        where: the artifact's name in errors.
        identity: of the base.

    Raises:
        ArtifactError, BaseMismatch: numbers or shapes that no kernel may read.
        CheckpointError: files or a configuration that nothing can load.
        ReaderDied: the process that checks the files died.
    """
    with Artifact.open(path, where) as artifact:
        check_artifact(artifact)
        check_base(artifact, identity)
        model = DeltaModel(base, artifact)
        check_config(model.stored_config, base.stored_config, where)
        files = {name: artifact.file(name) for name in artifact.manifest.files}
        rows = MAX_ROWS if base.embedding_name is None else model.shape(base.embedding_name)[0]
        check_files(files, base.path, rows, where)


def check_files(files: Mapping[str, bytes], base: Path, num_rows: int, where: str) -> None:
    """Use a variant's tokenizer, chat templates and generation config in a process, as a server does for an upload.

    Args:
        files: by name; without any, nothing is done.
        base: the directory of the base.
        num_rows: of the variant's embedding.
        where: the variant's name in errors.

    Raises:
        CheckpointError: a file that no server can use.
        ReaderDied: the process died.
    """
    if not files or (key := _key_of(files, base, num_rows)) in _sound:
        return
    with tempfile.TemporaryDirectory(prefix="peraxis-files-") as scratch:
        for name, content in files.items():
            path = Path(scratch) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        command = [sys.executable, "-P", "-m", READER, scratch, str(base.absolute()), str(num_rows), where]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=READER_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ReaderDied(
                f"{where}: the check of its tokenizer did not end within {READER_S:g} s"
            ) from error
    if done.returncode == REFUSED:
        raise CheckpointError(" ".join(done.stdout.decode(errors="replace").split()))
    if done.returncode:
        last = " ".join(done.stderr.decode(errors="replace").split()[-30:])
        ended = (
            f"by signal {-done.returncode}"
            if done.returncode < 0
            else f"with exit code {done.returncode}: {last}"
        )
        raise ReaderDied(f"{where}: the process that checks its tokenizer ended {ended}")
    _sound.add(key)


def _key_of(files: Mapping[str, bytes], base: Path, num_rows: int) -> tuple[Hashable, ...]:
    """Return what the outcome of `check_files` depends on."""
    own = sorted((name, hashlib.sha256(content).hexdigest()) for name, content in files.items())
    # The base's configuration names the class of the tokenizer, and its files complete the variant's.
    read = [base / "config.json", *tokenizer_paths(base).values()]
    stats = [(path.absolute(), path.stat()) for path in read]
    return num_rows, *own, *((path, stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats)


def check_config(config: Mapping[str, Any], base: Mapping[str, Any], where: str) -> None:
    """Refuse a merged configuration that transformers cannot load, where it loads the base's.

    Raises:
        CheckpointError: the reason.
    """
    if (reason := _refusal(config)) is not None and _refusal(base) is None:
        raise CheckpointError(
            f"{where}: transformers cannot load the configuration that merging gives ({reason}): correct the token ids "
            "in the fine-tune's generation_config.json"
        )


def _refusal(config: Mapping[str, Any]) -> str | None:
    """Return the reason why transformers cannot load a configuration; None if it can."""
    try:
        parse_config(config)
    except CheckpointError as error:
        return str(error)
    return None


@contextmanager
def checked_at_end(out: Path) -> Iterator[Path]:
    """Yield a path beside `out` that is renamed to `out` when the context ends, and removed if it fails.

    Raises:
        ReaderDied: it was raised in the context. The file stays under its own name, which the error tells.
    """
    unchecked = out.with_name(out.name + UNCHECKED)
    try:
        yield unchecked
        os.replace(unchecked, out)
    except ReaderDied as error:
        # Changed and not replaced, because it may have notes.
        error.args = (
            f"{error}: the artifact is whole and stays as {unchecked}: free some memory and run again",
        )
        raise
    except BaseException:
        unchecked.unlink(missing_ok=True)
        raise
