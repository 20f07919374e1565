"""Progress on stderr: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from tqdm import tqdm

from deltastore.base.base import Base
from deltastore.base.checkpoint import Checkpoint

LINE_INTERVAL_S = 10


class _Lines(tqdm):  # type: ignore[type-arg]  # generic in its stubs alone
    """A bar's text as whole lines, for logs."""

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        self.fp.write(f"{msg or self}\n")
        self.fp.flush()


def progress_bar(total: int, what: str, unit: str, enabled: bool) -> tqdm[NoReturn]:
    """Show progress over `total` units; use as a context manager."""
    is_terminal = sys.stderr.isatty()
    return (tqdm if is_terminal else _Lines)(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=unit == "B",
        disable=not enabled,
        leave=False,
        mininterval=0.1 if is_terminal else LINE_INTERVAL_S,
        maxinterval=LINE_INTERVAL_S,
        delay=0 if is_terminal else LINE_INTERVAL_S,
        file=sys.stderr,
    )


def byte_progress(total: int, what: str, enabled: bool) -> tqdm[NoReturn]:
    """Show progress over `total` bytes; use as a context manager."""
    return progress_bar(total, what, "B", enabled)


def identify_base(checkpoint: Checkpoint, enabled: bool) -> Base:
    """Run `Base.of` with progress while the fingerprint is computed.

    Raises:
        CheckpointError: As `Base.of` does.
    """
    total = sum(stored.num_bytes for stored in checkpoint.tensors.values())
    with byte_progress(total, f"fingerprint of {checkpoint.path.name}", enabled) as bar:
        return Base.of(checkpoint, progress=bar.update)
