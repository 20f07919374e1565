"""OpenMP's threads sleep while they wait, unless the operator has chosen otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltastore.openmp_policy import CHOICES, let_threads_sleep


def test_threads_sleep_by_default() -> None:
    environment = {"PATH": "/bin"}
    let_threads_sleep(environment)
    assert environment == {"PATH": "/bin", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize("name", CHOICES)
def test_the_operators_choice_stays(name: str) -> None:
    environment = {name: "7"}
    let_threads_sleep(environment)
    assert environment == {name: "7"}


def test_the_command_sets_the_policy_before_torch_reads_it(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES}
    command = [sys.executable, "-m", "peraxis", "serve", "--base", tmp_path, "--registry", tmp_path / "r"]
    failed = subprocess.run(
        [*map(str, command), "--port", "0"],
        env={**environment, "OMP_DISPLAY_ENV": "TRUE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in failed.stderr
    assert str(tmp_path / "config.json") in failed.stderr
