"""A report's figures as PNG, each for a light and for a dark page. Knows matplotlib and numbers; nothing of pages.

Nothing of the user's matplotlib settings is used and no time is written, so the same numbers give the same bytes.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps, style
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from compressor.report_tensors import AXES, ErrorGrid

DPI = 144
NUM_COLORS, NUM_SHADES = 255, 100  # of an image, which takes a third of the bytes so; of them, of a heat map
SCREEN_DPI = 96  # by which a page shows an inch
WIDTH, NARROW_WIDTH = 9.4, 5.4  # inches, at most: of a figure for a page of any width, and for a phone's
EVEN_LUMINANCE = 0.18  # has as much contrast with black as with white
SIZE_LABELS_WIDTH, SIZE_TEXT_WIDTH = 2.0, 1.4  # inches, of what stands before and behind a bar
MAX_LABEL_CHARS = 28
HEAT_LABELS_WIDTH = 2.4  # inches, of what stands beside a heat map
LABELS_PER_INCH = 2.4  # beneath it
MIN_RULED_CELL, MIN_WRITTEN_CELL = (
    0.07,
    0.5,
)  # inches: of cells with lines between them, and with numbers inside


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours that have contrast with a page's background; colour-blind readers tell the axes' apart too."""

    background: str
    text: str
    line: str
    missing: str  # a cell without a number
    axes: Mapping[str, str]
    bar: str


LIGHT = Theme(
    "#ffffff", "#1b1f24", "#d5dae0", "#e4e7eb",
    {"out": "#1f6fc4", "in": "#d0362b", "both": "#2a9d76", "scalar": "#7d858f"}, "#1f6fc4",
)  # fmt: skip
DARK = Theme(
    "#171b21", "#e6eaef", "#2e353e", "#2a3038",
    {"out": "#5aa2ee", "in": "#f0665a", "both": "#45c296", "scalar": "#9aa5b1"}, "#5aa2ee",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Png:
    """An image, and its size on a page."""

    data: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Versions:
    """One figure, for light and for dark pages, wide and narrow ones."""

    light: Png
    dark: Png
    narrow_light: Png
    narrow_dark: Png


@dataclass(frozen=True, slots=True)
class Look:
    """Of a heat map: its page's theme, the colour of each error, and how many inches there are for cells."""

    theme: Theme
    norm: Normalize
    colors: Colormap
    width: float


def axis_figure(counts: Mapping[str, Counter[str]]) -> Versions:
    """Bars of how many matrices have which axis, by module type: the paper's appendix figure, with every axis."""
    present = [axis for axis in AXES if any(counter[axis] for counter in counts.values())]
    height = 0.9 + len(counts) * (0.14 + 0.18 * len(present))

    def draw(figure: Figure, theme: Theme) -> None:
        axes = _bare(figure.add_subplot(), theme)
        thickness = 0.82 / len(present)
        for number, axis in enumerate(present):
            places = np.arange(len(counts)) + (number - (len(present) - 1) / 2) * thickness
            values = [counter[axis] for counter in counts.values()]
            bars = axes.barh(places, values, thickness * 0.92, color=theme.axes[axis], label=axis)
            axes.bar_label(bars, [str(value or "") for value in values], padding=3, color=theme.text)
        axes.set_yticks(range(len(counts)), [_label(module) for module in counts])
        axes.set_ylim(len(counts) - 0.45, -0.55)
        axes.set_xlim(0, 1.08 * max(max(counter.values()) for counter in counts.values()))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("matrices")
        figure.legend(loc="outside upper right", ncols=len(present), frameon=False, labelcolor=theme.text)

    return _versions(draw, WIDTH, height)


def size_figure(sizes: Mapping[str, int], texts: Sequence[str]) -> Versions:
    """Bars of bytes by what they are for.

    Args:
        texts: what stands at the end of each bar.
    """

    def draw(figure: Figure, theme: Theme) -> None:
        axes = _bare(figure.add_subplot(), theme)
        bars = axes.barh(range(len(sizes)), list(sizes.values()), 0.62, color=theme.bar)
        axes.bar_label(bars, list(texts), padding=5, color=theme.text)
        axes.set_yticks(range(len(sizes)), [_label(kind) for kind in sizes])
        axes.set_ylim(len(sizes) - 0.5, -0.5)
        room = figure.get_figwidth() - SIZE_LABELS_WIDTH
        axes.set_xlim(0, max(sizes.values()) * room / (room - SIZE_TEXT_WIDTH))
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)

    return _versions(draw, WIDTH, 0.35 + 0.34 * len(sizes))


def error_figure(grid: ErrorGrid) -> Versions:
    """A heat map of errors, layers from left to right, and beneath it the matrices outside the layers."""
    rows = [rows for rows in (len(grid.modules), len(grid.outside)) if rows]
    width = min(WIDTH, max(5.0, 3.2 + 0.6 * len(grid.layers)))

    def draw(figure: Figure, theme: Theme) -> None:
        low, high = min(grid.known), max(grid.known)
        colors = colormaps["viridis"].resampled(NUM_SHADES).with_extremes(bad=theme.missing)
        norm = Normalize(low, high if high > low else low + 1)
        look = Look(theme, norm, colors, figure.get_figwidth() - HEAT_LABELS_WIDTH)
        panels = figure.subplots(len(rows), squeeze=False, height_ratios=rows)[:, 0]
        if grid.modules:
            _heat(panels[0], grid, look)
        if grid.outside:
            _bands(panels[-1], grid, look)
        bar = figure.colorbar(
            ScalarMappable(norm, colors),
            ax=list(panels),
            pad=0.02,
            aspect=max(8, 3 * sum(rows)),
        )
        bar.set_label("error", color=theme.text)
        bar.ax.tick_params(colors=theme.text)
        bar.outline.set_visible(False)

    return _versions(draw, width, 1.0 + 0.34 * sum(rows))


def _heat(axes: Axes, grid: ErrorGrid, look: Look) -> None:
    values = np.array([[np.nan if value is None else value for value in row] for row in grid.values])
    _image(axes, values, look)
    axes.set_yticks(range(len(grid.modules)), [_label(module) for module in grid.modules])
    step = max(1, math.ceil(len(grid.layers) / (LABELS_PER_INCH * look.width)))
    axes.set_xticks(range(0, len(grid.layers), step), [_label(str(layer)) for layer in grid.layers[::step]])
    axes.set_xlabel("layer", labelpad=2)
    cell = look.width / len(grid.layers)
    if cell >= MIN_RULED_CELL:
        axes.set_xticks(np.arange(-0.5, len(grid.layers)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(grid.modules)), minor=True)
    axes.grid(which="minor", color=look.theme.background, linewidth=1)
    if cell >= MIN_WRITTEN_CELL:
        for (row, column), value in np.ndenumerate(values):
            _write(axes, column, row, value, look)


def _bands(axes: Axes, grid: ErrorGrid, look: Look) -> None:
    errors = np.array([[error] for _, error in grid.outside])
    _image(axes, errors, look)
    axes.set_yticks(range(len(grid.outside)), [_label(module) for module, _ in grid.outside])
    axes.set_xticks([])
    axes.set_yticks(np.arange(-0.5, len(grid.outside)), minor=True)
    axes.grid(which="minor", axis="y", color=look.theme.background, linewidth=1)
    for row, value in enumerate(errors[:, 0]):
        _write(axes, 0, row, value, look)


def _image(axes: Axes, values: np.ndarray, look: Look) -> None:
    _bare(axes, look.theme)
    axes.imshow(values, cmap=look.colors, norm=look.norm, aspect="auto", interpolation="nearest")
    axes.spines[:].set_visible(False)
    axes.tick_params(which="minor", length=0)


def _write(axes: Axes, column: int, row: int, value: float, look: Look) -> None:
    if np.isnan(value):
        return
    red, green, blue, _ = look.colors(float(look.norm(value)))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    axes.text(
        column,
        row,
        f"{value:.3f}" if 0.001 <= value < 10 else f"{value:.2g}",
        ha="center",
        va="center",
        color="#000000" if luminance > EVEN_LUMINANCE else "#ffffff",
    )


def _bare(axes: Axes, theme: Theme) -> Axes:
    axes.set_facecolor(theme.background)
    axes.tick_params(colors=theme.text, length=0)
    axes.xaxis.label.set_color(theme.text)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme.line)
    return axes


def _label(text: str) -> str:
    """A name from a stranger's file, in characters that the font has."""
    plain = text.encode("ascii", "backslashreplace").decode()
    plain = "".join(character if character.isprintable() else "?" for character in plain)
    return plain if len(plain) <= MAX_LABEL_CHARS else f"{plain[: MAX_LABEL_CHARS - 3]}..."


def _versions(draw: Callable[[Figure, Theme], None], width: float, height: float) -> Versions:
    narrow = min(width, NARROW_WIDTH)
    return Versions(
        _png(draw, LIGHT, width, height),
        _png(draw, DARK, width, height),
        _png(draw, LIGHT, narrow, height),
        _png(draw, DARK, narrow, height),
    )


def _png(draw: Callable[[Figure, Theme], None], theme: Theme, width: float, height: float) -> Png:
    plain = {"text.parse_math": False, "font.family": "DejaVu Sans", "font.size": 10.5}
    with style.context(["default", plain]):
        figure = Figure((width, height), dpi=DPI, facecolor=theme.background, layout="constrained")
        draw(figure, theme)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
    out = io.BytesIO()
    Image.open(drawn).convert("RGB").quantize(NUM_COLORS).save(out, format="png", optimize=True)
    return Png(out.getvalue(), round(width * SCREEN_DPI), round(height * SCREEN_DPI))
