"""The files of a model card in a directory: README.md and its figures, replaced together."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from compressor.model_card.card import ERROR_FIGURE, MARK, SIZE_FIGURE, model_card, part_sizes, size_texts
from compressor.model_card.facts import DeltaFacts, ErrorGrid
from deltastore.errors import StorageFull, UsageError

CARD = "README.md"
FILES = (SIZE_FIGURE, ERROR_FIGURE, CARD)
FULL = (errno.ENOSPC, errno.EDQUOT)


def check_card_directory(directory: Path) -> None:
    """Check that a card can be written, before any work is done for it. Leaves nothing behind.

    Raises:
        UsageError: matplotlib is not installed, `directory` is none or cannot be written to, or its README.md is not
            a card that `write_card` wrote.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(f"--report {directory}: its figures need matplotlib: pip install 'peraxis[report]'")
    existing = directory
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError(
            f"--report {directory}: {existing} is no directory: choose another, or a name for a new one"
        )
    if taken := [name for name in FILES if (directory / name).is_dir()]:
        raise UsageError(f"--report {directory}: {taken[0]} in it is a directory: choose another --report")
    try:
        tempfile.TemporaryFile(dir=existing).close()
        is_other = (directory / CARD).exists() and MARK.encode() not in (directory / CARD).read_bytes()
    except OSError as error:
        raise UsageError(
            f"--report {directory}: {existing}: {error.strerror}: choose another --report"
        ) from error
    if is_other:
        raise UsageError(
            f"--report {directory}: its {CARD} is not a card of a delta: move it away, or choose another --report"
        )


def write_card(directory: Path, facts: DeltaFacts) -> None:
    """Write README.md and its figures in place of those of an older card; other files stay as they are.

    The same facts give the same bytes. Without errors in the manifest there is no figure of them.

    Raises:
        StorageFull: the disk is full.
        UsageError: as `check_card_directory`.
    """
    check_card_directory(directory)
    # Deferred, because matplotlib takes a second to import and is an extra.
    from compressor.model_card.figures import error_figure, size_figure

    files = {SIZE_FIGURE: size_figure(part_sizes(facts), size_texts(facts))}
    grid = ErrorGrid.of(facts.tensors)
    if grid.known:
        files[ERROR_FIGURE] = error_figure(grid)
    files[CARD] = str(model_card(facts)).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _replace(directory, files)
    except OSError as error:
        kind = StorageFull if error.errno in FULL else UsageError
        raise kind(
            f"--report {directory}: {error.strerror}: free some space there or choose another --report"
        ) from error


def _replace(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write all contents to the disk before the first name changes."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".card.") as partial:
        for name, content in files.items():
            with Path(partial, name).open("wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
        for name in files:
            os.replace(Path(partial, name), directory / name)
    # The older card's figures, which the new one does not refer to.
    for name in set(FILES) - files.keys():
        (directory / name).unlink(missing_ok=True)
