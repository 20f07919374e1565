"""Run the bench of replicas with a tiny model, and judge streams around a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra ray: pip install -e '.[ray]'")

from bench.client import StreamEnd, StreamTimes
from bench.ray_cluster import RANDOM_ROUTER, ROUTER
from bench.scale import HAPROXY, PROXY, Measured, ResidentShare, judged

ROOT = Path(__file__).resolve().parents[2]
KILLED = 10.0
DONE = StreamEnd(StreamTimes(9.0, [9.1]), ended=11.0, outcome="done")
BROKEN = StreamEnd(StreamTimes(9.0, [9.1]), ended=10.5, outcome="error")


@pytest.mark.deploy
def test_a_small_run_reaches_its_goals(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    # In a process of its own: tests of the session may have connected this one to a cluster.
    command = [sys.executable, "-m", "bench.scale", "--small", "--dir", str(tmp_path), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=False)
    document = json.loads(out.read_text())
    # How soon failures end depends on the machine's speed.
    missed = {goal["goal"] for goal in document["goals"] if not goal["met"]}
    assert missed <= {"last failure after the kill, s"}
    results = document["results"]
    assert {(one["router"], one["replicas"]) for one in results["residency"]} == {
        (ROUTER, 2),
        (RANDOM_ROUTER, 2),
    }
    assert results["kill"]["failed_begun"] > 0
    assert {one["proxy"]: one["ray_tokens_per_s"] > 0 for one in results["hops"]} == {
        HAPROXY: True,
        PROXY: True,
    }
    assert str(tmp_path) not in out.read_text()


def test_a_stream_that_had_begun_may_fail_with_an_error_event() -> None:
    found = judged([DONE, BROKEN], KILLED, replaced_s=3.0)
    assert (found.running, found.failed_begun, found.failed_otherwise) == (2, 1, 0)
    assert found.last_failure_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    "stream",
    [
        StreamEnd(StreamTimes(9.0, []), ended=10.5, outcome="error"),
        StreamEnd(StreamTimes(9.0, [9.1]), ended=10.5, outcome="cut off"),
        StreamEnd(StreamTimes(10.2, [10.3]), ended=10.5, outcome="error"),
        StreamEnd(StreamTimes(10.2, []), ended=10.3, outcome="refused with 503"),
    ],
)
def test_every_other_failure_misses_the_goal(stream: StreamEnd) -> None:
    assert judged([DONE, stream], KILLED, replaced_s=3.0).failed_otherwise == 1


def test_a_failure_long_after_the_kill_misses_the_goal() -> None:
    late = StreamEnd(StreamTimes(9.0, [9.1]), ended=16.0, outcome="error")
    residency = [ResidentShare(ROUTER, 3, 100, 5), ResidentShare(RANDOM_ROUTER, 3, 100, 40)]
    goals = Measured(residency, kill=judged([late], KILLED, replaced_s=3.0)).goals()
    assert [goal.name for goal in goals if not goal.is_met] == ["last failure after the kill, s"]


def test_the_share_of_residents_is_judged_at_most_replicas() -> None:
    residency = [
        ResidentShare(ROUTER, 1, 100, 30),
        ResidentShare(ROUTER, 3, 100, 11),
        ResidentShare(RANDOM_ROUTER, 3, 100, 40),
    ]
    assert {goal.name: goal.is_met for goal in Measured(residency).goals()} == {
        "share resident at 3 replicas": False,
        "cold loads, fewer than with random routing": True,
    }
