"""An opened artifact as notebooks show it. Importing this imports torch."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, cast

from deltastore.console import printable, rounded, size_text
from deltastore.format import artifact

if TYPE_CHECKING:
    from deltastore.format.manifest import Manifest, TensorSpec

# Rows of a table; a model of 100 layers has fewer matrices.
MAX_ROWS = 1000
AXES = ("out", "in", "both", "scalar", "whole")
# Pixels of the plot.
BAR, LABEL, LINE = 240, 64, 18


class Artifact(artifact.Artifact):
    """An opened artifact: `manifest` has its tensors, their codecs and errors, and its fidelity.

    A notebook shows it as a table with a plot. Its file is closed by `close`, at the end of its block, or when the
    object is gone.
    """

    __slots__ = ("__weakref__", "_close")
    _close: weakref.finalize[..., Artifact]

    @classmethod
    def open(cls, path: Path, where: str | None = None) -> Artifact:
        """Open a file. Raises as `deltastore.Artifact.open` does."""
        opened = cast(Artifact, super().open(path, where))
        # The class is frozen.
        object.__setattr__(opened, "_close", weakref.finalize(opened, os.close, opened.fd))
        return opened

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was read before stays."""
        self._close()

    def __repr__(self) -> str:
        return f"<Artifact {_summary(self.path, self.size_bytes, self.manifest)}>"

    def _repr_html_(self) -> str:
        """Return one line, a plot of the axes, and a table of all tensors. Names are untrusted and escaped."""
        tensors = self.manifest.tensors
        rows = [_row(name, spec) for name, spec in [*tensors.items()][:MAX_ROWS]]
        more = len(tensors) - len(rows)
        left_out = f"<p>and {more} more tensors</p>" if more > 0 else ""
        head = "".join(
            f"<th>{title}</th>" for title in ("tensor", "shape", "axis", "planes", "rank", "error")
        )
        return (
            f"<p>{escape(_summary(self.path, self.size_bytes, self.manifest))}</p>{_plot(self.manifest)}"
            f"<details><summary>tensors</summary><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table>{left_out}</details>"
        )


def _summary(path: Path, size_bytes: int, manifest: Manifest) -> str:
    """Return an artifact on one line."""
    fidelity = manifest.fidelity.get("held_out")
    kl = f", KL {rounded(fidelity['kl'])} to its fine-tune" if isinstance(fidelity, dict) else ""
    return printable(
        f"{path.name}: {size_text(size_bytes)}, {len(manifest.tensors)} tensors changed, method {manifest.method}, "
        f"base {manifest.base_id}{kl}"
    )


def _axis_of(spec: TensorSpec) -> str:
    return spec.axis or "whole"


def _row(name: str, spec: TensorSpec) -> str:
    is_coded = spec.codec != "whole"
    cells = (
        printable(name),
        " × ".join(map(str, spec.shape)),
        _axis_of(spec),
        str(spec.planes) if is_coded else "",
        str(spec.rank) if spec.rank else "",
        "" if spec.error is None else f"{spec.error:.4f}",
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _plot(manifest: Manifest) -> str:
    """Return a bar for each axis, as long as tensors have it, as an SVG that takes the page's colour."""
    counts = Counter(map(_axis_of, manifest.tensors.values()))
    shown = [(axis, counts[axis]) for axis in AXES if counts[axis]]
    if not shown:
        return ""
    most = max(count for _, count in shown)
    bars = "".join(
        f'<text x="0" y="{LINE * row + 13}">{axis}</text>'
        f'<rect x="{LABEL}" y="{LINE * row + 3}" width="{BAR * count / most:.1f}" height="12" opacity="0.6"/>'
        f'<text x="{LABEL + BAR * count / most + 6:.1f}" y="{LINE * row + 13}">{count}</text>'
        for row, (axis, count) in enumerate(shown)
    )
    told = ", ".join(f"{axis} {count}" for axis, count in shown)
    return (
        f'<svg role="img" aria-label="tensors by axis: {told}" width="{LABEL + BAR + 60}" height="{LINE * len(shown)}" '
        f'fill="currentColor" font-size="12" font-family="sans-serif">{bars}</svg>'
    )
