"""Run the bench of `attach` on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import attach
from bench.engine import SMALL
from deltastore.checkpoint import Checkpoint


def test_the_small_bench_fills_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "attach.json"
    attach.main(["--small", "--repeats", "2", "--dir", str(tmp_path), "--out", str(out)])
    document = json.loads(out.read_text())
    found = document["results"]["attach"]
    assert found["device_bytes"] > 0
    for times in found["times"].values():
        assert 0 < times["least_s"] <= times["median_s"] <= times["most_s"]
    assert [(row["rows"], row["variants"]) for row in document["results"]["decode"]] == [(1, 1), (4, 2)]
    assert [goal["limit"] for goal in document["goals"]] == ["at most 1.2", "at most 1.1", "at most 1.5"]
    assert document["goals"][0]["reached"] == pytest.approx(
        found["times"]["attach"]["median_s"] / found["times"]["load"]["median_s"], rel=1e-3
    )
    printed = capsys.readouterr().out
    assert "| the server's load " in printed
    assert "| decoding one row, attached / bare " in printed


def test_the_sparse_base_is_the_model_of_zeros(tmp_path: Path) -> None:
    base = attach.write_sparse_base(tmp_path / "base", SMALL)
    checkpoint, state = Checkpoint.open(base), attach.zeros_of(base).state_dict()
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()} == {
        name: (torch.bfloat16, stored.shape) for name, stored in checkpoint.tensors.items()
    }
    assert not any(tensor.any() for tensor in state.values())
    assert not any(checkpoint.read(name).any() for name in checkpoint.tensors)
