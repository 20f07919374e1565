"""Free host memory, and the limits of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltastore import memory
from deltastore.memory import available_bytes


def test_the_limit_of_a_control_group_bounds_available_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\nactive_file 100000\ninactive_file 150000\n")
    monkeypatch.setattr(memory, "_control_groups", lambda: [tmp_path])
    assert available_bytes() == 550_000


def test_a_control_group_without_a_limit_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_control_groups", list)
    without = available_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(memory, "_control_groups", lambda: [tmp_path])
    assert available_bytes() == pytest.approx(without, rel=0.2)
