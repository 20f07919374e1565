"""Sizes are readable from bytes to terabytes."""

from __future__ import annotations

import pytest

from deltastore.console import size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0B"),
        (936, "936B"),
        (45_600, "45.6kB"),
        (8_000_000, "8.00MB"),
        (1_010_000_000, "1.01GB"),
        (16 * 10**12, "16.0TB"),
    ],
)
def test_a_size_has_three_digits_and_the_largest_unit_that_fits(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
