"""OpenMP's threads spin shortly and then sleep, unless the operator has chosen otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltastore.threads import CHOICES, bound_spinning


def test_threads_spin_shortly_by_default() -> None:
    environment = {"PATH": "/bin"}
    bound_spinning(environment)
    assert environment == {"PATH": "/bin", "GOMP_SPINCOUNT": "3000"}


@pytest.mark.parametrize("name", CHOICES)
def test_the_operators_choice_stays(name: str) -> None:
    environment = {name: "7"}
    bound_spinning(environment)
    assert environment == {name: "7"}


def test_the_command_sets_the_policy_before_torch_reads_it(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES}
    command = [sys.executable, "-m", "peraxis", "serve", "--base", tmp_path, "--registry", tmp_path / "r"]
    failed = subprocess.run(
        [*map(str, command), "--port", "0"],
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "GOMP_SPINCOUNT = '3000'" in failed.stderr
    assert str(tmp_path / "config.json") in failed.stderr
