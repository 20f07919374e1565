"""Three processes on one registry without locks, killed and stopped at random, lose nothing that they acknowledged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deltastore.helpers.stress import MIN_ACKNOWLEDGED, MIN_KILLS
from tests.helpers.s3_server import Bucket

REPOSITORY = Path(__file__).resolve().parents[3]


def stress(directory: Path, seconds: float, seed: int, bucket: Bucket | None = None) -> dict[str, Any]:
    """Stress a registry in a bucket, or without one in a directory."""
    location, environment = (
        (directory / "registry", {}) if bucket is None else (bucket.url, bucket.environment)
    )
    command = [sys.executable, "-m", "tests.deltastore.helpers.stress", directory, location, seconds, seed]
    done = subprocess.run(
        list(map(str, command)),
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    findings: dict[str, Any] = json.loads(done.stdout)
    return findings


def check(findings: dict[str, Any]) -> None:
    assert findings["problems"] == []
    assert findings["num_kills"] >= MIN_KILLS
    assert min(findings["num_acknowledged"].values()) >= MIN_ACKNOWLEDGED


def test_processes_that_are_killed_lose_no_acknowledged_change(scratch: Path) -> None:
    check(stress(scratch, 6.0, seed=1))


def test_processes_that_are_killed_lose_no_acknowledged_change_in_a_bucket(
    scratch: Path, bucket: Bucket
) -> None:
    check(stress(scratch, 6.0, 1, bucket))


@pytest.mark.deploy
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(3))
def test_processes_that_are_killed_for_long_lose_no_acknowledged_change_in_a_bucket(
    seed: int, scratch: Path, bucket: Bucket
) -> None:
    check(stress(scratch, 60.0, seed, bucket))


@pytest.mark.deploy
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(3))
def test_processes_that_are_killed_for_long_lose_no_acknowledged_change(seed: int, scratch: Path) -> None:
    check(stress(scratch, 60.0, seed))
