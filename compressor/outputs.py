"""Checks of an output before any work: it is no input, can be written, and fits on its disk. Knows paths and sizes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from deltastore.errors import StorageFull, UsageError


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
