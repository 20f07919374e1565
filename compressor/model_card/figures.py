"""The figures of a model card as PNG, drawn by matplotlib, which is an extra.

Ignores the user's matplotlib settings and writes no time, so the same numbers give the same bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compressor.model_card.facts import ErrorGrid

STYLE: list[str | Path | dict[str, Any]] = [
    "default",
    {"text.parse_math": False, "font.family": "DejaVu Sans", "font.size": 10.5},
]
DPI, WIDTH = 144, 9.4  # inches
MISSING_COLOR = "#e4e7eb"
MAX_LABEL_CHARS, MAX_LAYER_LABELS = 28, 16


def size_figure(sizes: Mapping[str, int], texts: Sequence[str]) -> bytes:
    """Draw a bar of bytes for each part, with its text behind it."""
    with style.context(STYLE):
        figure, axes = _canvas(0.35 + 0.34 * len(sizes))
        bars = axes.barh(range(len(sizes)), list(sizes.values()), 0.62)
        axes.bar_label(bars, list(texts), padding=5)
        axes.set_yticks(range(len(sizes)), list(sizes))
        axes.set_ylim(len(sizes) - 0.5, -0.5)
        # A quarter of the width is left for the text behind the longest bar.
        axes.set_xlim(0, 1.34 * max(sizes.values()))
        axes.xaxis.set_visible(False)
        return _png(figure)


def error_figure(grid: ErrorGrid) -> bytes:
    """Draw a heat map of errors: module types downwards, layers from left to right."""
    values = np.array([[np.nan if value is None else value for value in row] for row in grid.values])
    with style.context(STYLE):
        figure, axes = _canvas(1.2 + 0.34 * len(grid.modules))
        colors = colormaps["viridis"].with_extremes(bad=MISSING_COLOR)
        image = axes.imshow(values, cmap=colors, aspect="auto", interpolation="nearest")
        axes.set_yticks(range(len(grid.modules)), [_label(module) for module in grid.modules])
        step = math.ceil(len(grid.layers) / MAX_LAYER_LABELS)
        axes.set_xticks(range(0, len(grid.layers), step), [_label(layer) for layer in grid.layers[::step]])
        axes.set_xlabel("layer")
        figure.colorbar(image, ax=axes, pad=0.02).set_label("error")
        return _png(figure)


def _label(text: str) -> str:
    """Return `text` in characters that the font has."""
    plain = text.encode("ascii", "backslashreplace").decode()
    plain = "".join(character if character.isprintable() else "?" for character in plain)
    return plain if len(plain) <= MAX_LABEL_CHARS else f"{plain[: MAX_LABEL_CHARS - 3]}..."


def _canvas(height: float) -> tuple[Figure, Axes]:
    figure = Figure((WIDTH, height), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure, axes


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
