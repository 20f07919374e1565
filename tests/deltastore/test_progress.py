"""Progress in a log: whole lines that are spaced over all bars of the process."""

from __future__ import annotations

import time

import pytest

from deltastore import console


def test_bars_that_are_each_short_still_give_a_line_when_the_interval_has_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0.5)
    begun = time.monotonic()
    for number in range(12):
        with console.progress_bar(5, f"stage {number}", "step", enabled=True) as bar:
            for _ in range(5):
                time.sleep(0.02)
                bar.update()
    elapsed_s = time.monotonic() - begun
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= elapsed_s / 0.5 + 1
    assert all(line.startswith("stage ") and "\r" not in line for line in lines)
    assert len({line.partition(":")[0] for line in lines}) == len(lines)
