"""Batches to a peer in a real process, and its failures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.throughput import running_peer

ECHO = """
import json, sys
config = json.loads(sys.stdin.readline())
print(json.dumps({"name": config["name"]}), flush=True)
for line in sys.stdin:
    batch = json.loads(line)
    print(json.dumps({"num_tokens": config["each"] * len(batch["prompts"])}), flush=True)
"""


def test_a_peer_answers_each_batch(tmp_path: Path) -> None:
    config = {"name": "peer", "each": 3}
    with running_peer([sys.executable, "-c", ECHO], config, tmp_path / "log") as peer:
        assert peer.loaded == {"name": "peer"}
        peer.answer([[1, 2], [3]], 3)
        peer.answer([[1]], 3, way="static")


def test_an_answer_of_another_length_is_refused(tmp_path: Path) -> None:
    config = {"name": "peer", "each": 3}
    with (
        running_peer([sys.executable, "-c", ECHO], config, tmp_path / "log") as peer,
        pytest.raises(RuntimeError, match="8 tokens were asked for, 6 were generated"),
    ):
        peer.answer([[1, 2], [3]], 4)


def test_a_peer_that_does_not_start_is_named_with_its_log(tmp_path: Path) -> None:
    program = "raise SystemExit('no such model')"
    with (
        pytest.raises(RuntimeError, match="no such model"),
        running_peer([sys.executable, "-c", program], {}, tmp_path / "log"),
    ):
        pass
