"""Progress on stderr: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from tqdm import tqdm

from deltastore.base.base import Base

# For types alone: it imports torch, which commands that talk to a server do without.
if TYPE_CHECKING:
    from deltastore.base.checkpoint import Checkpoint

# With the time of one update on top, no more than 10 s pass between two lines.
LINE_INTERVAL_S = 8.0


class _Lines(tqdm):  # type: ignore[type-arg]
    """A bar for logs: whole lines, `LINE_INTERVAL_S` apart over all bars of the process."""

    last_line_s: ClassVar[float] = time.monotonic()

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Print the bar's text if the interval since the last line of any bar has passed."""
        now = time.monotonic()
        if not self.disable and now - _Lines.last_line_s >= LINE_INTERVAL_S:
            _Lines.last_line_s = now
            self.fp.write(f"{self}\n")
            self.fp.flush()

    def close(self) -> None:
        """End the bar without tqdm's carriage return."""
        self.disable = True
        super().close()


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
        # `_Lines` spaces its lines itself.
        mininterval=min(0.1, LINE_INTERVAL_S),
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
