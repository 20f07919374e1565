"""Markdown tables that are readable in a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns, the first to the left and all others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [_aligned(head, widths), _aligned(rule, widths), *(_aligned(row, widths) for row in rows)]
    return "\n".join(lines)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return f"| {' | '.join(cells)} |"
