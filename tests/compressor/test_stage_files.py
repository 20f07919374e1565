"""Tests of `CheckpointStore` without a compression: deltas as files, and the state format."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from compressor import resume
from compressor.resume import INPUTS, CheckpointStore, FittedMatrix, open_checkpoint_store
from deltastore.errors import PeraxisError, UsageError
from deltastore.format.matrix import AXES, Axis
from tests.compressor.helpers.fitting import random_delta


@pytest.mark.parametrize("axis", AXES)
def test_deltas_come_back_as_they_were_kept(axis: Axis, tmp_path: Path) -> None:
    forms = [(1, 0), (2, 0), (1, 3), (2, 1)]
    matrices = {
        f"b|{number}.weight": FittedMatrix(random_delta((7, 12), axis, *form), [random_delta((7, 12), axis)])
        for number, form in enumerate(forms)
    }
    store = CheckpointStore(tmp_path / "delta", {}, resume=False)
    store.save_matrices("stage", matrices)
    store.save_matrices("empty", {})
    again = CheckpointStore(tmp_path / "delta", {}, resume=True)
    assert (again.load_matrices("stage") or {}).keys() == matrices.keys()
    assert again.load_matrices("empty") == {}
    assert again.load_matrices("another") is again.load("another") is None
    for name, matrix in (again.load_matrices("stage") or {}).items():
        expected = (matrices[name].delta, *matrices[name].upgrades)
        for own, delta in zip((matrix.delta, *matrix.upgrades), expected, strict=True):
            assert (own.axis, own.num_planes, own.rank) == (axis, delta.num_planes, delta.rank)
            assert torch.equal(own.dense(), delta.dense())


def test_what_fails_before_anything_was_kept_speaks_of_no_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PeraxisError), open_checkpoint_store(tmp_path / "delta", {}, resume=False):
        raise UsageError("no")
    assert capsys.readouterr().err == ""
    assert os.listdir(tmp_path) == []


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """An out beside which one stage is kept."""
    out = tmp_path / "delta"
    CheckpointStore(out, {"seed": 1}, resume=False).save("stage", 1)
    return out


@pytest.mark.parametrize("older", [None, resume.STATE_FORMAT - 1])
def test_a_state_of_an_older_format_is_refused(older: int | None, stored: Path) -> None:
    path = CheckpointStore(stored, {"seed": 1}, resume=True).directory / INPUTS
    inputs = json.loads(path.read_bytes()) | {"state_format": older}
    path.write_text(
        json.dumps({key: value for key, value in inputs.items() if value is not None}, sort_keys=True)
    )
    with pytest.raises(UsageError, match=r"other inputs or settings: .* leave `resume` away to begin anew"):
        CheckpointStore(stored, {"seed": 1}, resume=True)
    assert CheckpointStore(stored, {"seed": 1}, resume=False).load("stage") is None


def test_the_next_format_refuses_a_state_of_this_one(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "STATE_FORMAT", resume.STATE_FORMAT + 1)
    with pytest.raises(UsageError, match="left by a run with other inputs or settings"):
        CheckpointStore(stored, {"seed": 1}, resume=True)
