"""Where an output may lie: apart from everything that is read to make it. Knows paths alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deltastore.errors import UsageError


def check_apart(out: Path, inputs: Mapping[str, str | Path | None]) -> None:
    """Refuse an `out` that is an input or lies in one, before anything is read or written.

    Args:
        inputs: by option, a file or directory; what is none of this machine's, a hub id for instance, cannot be hit.

    Raises:
        UsageError: what would be written over.
    """
    place = out.resolve()
    for option, source in inputs.items():
        if source is None or not Path(source).exists():
            continue
        path = Path(source).resolve()
        if path == place or path in place.parents:
            relation = "is" if path == place else "lies in"
            raise UsageError(
                f"--out {out}: it {relation} {source}, which {option} reads: "
                "give --out the name of a file or directory elsewhere"
            )
