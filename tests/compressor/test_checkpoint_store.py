"""Tests of interrupted compressions: stages on disk, resuming to the same bytes, and damaged files."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compressor.config import Calibration, CompressConfig, FitSettings
from compressor.fit.layerwise import Layerwise
from compressor.pipeline import compress
from compressor.resume import SUFFIX, CheckpointStore
from deltastore.errors import FidelityError, StorageFull, UsageError
from peraxis.cli import run as command
from tests.helpers.tiny_models import Change, TinyModels, make_pair

SELF = Calibration("self", samples=16, length=12, seed=0)
OURS = FitSettings(SELF, distill_epochs=3, budget=1.2)  # signs move from the second epoch on
PAPER = FitSettings(SELF, recipe="paper", distill_epochs=2, axis_loss="end")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return make_pair("llama", tmp_path_factory.mktemp("pair"), seed=3, changes=(Change(noise=0.2),))


@pytest.fixture(scope="module")
def undisturbed(models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Callable[[FitSettings], str]:
    """The digest that a run gives, made once."""
    found: dict[str, str] = {}

    def digest(fit_settings: FitSettings) -> str:
        if str(fit_settings) not in found:
            found[str(fit_settings)] = run(models, tmp_path_factory.mktemp("whole") / "delta", fit_settings)
        return found[str(fit_settings)]

    return digest


def run(models: TinyModels, out: Path, fit_settings: FitSettings = OURS, **config: Any) -> str:
    method = "per-axis" if fit_settings.recipe == "paper" else "both"
    settings = {"method": method, "fit_settings": fit_settings, **config}
    return compress(CompressConfig(str(models.base), str(models.finetunes[0]), out, **settings)).digest


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Raise KeyboardInterrupt once `count` files are saved."""
    keep, done = CheckpointStore._keep, list[str]()

    def counted(self: CheckpointStore, filename: str, write: Callable[[Path], object]) -> None:
        keep(self, filename, write)
        done.append(filename)
        if len(done) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointStore, "_keep", counted)


@pytest.fixture(scope="module")
def interrupted(models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The progress of a run that was interrupted after its first epoch; all stages have kept something."""
    out = tmp_path_factory.mktemp("begun") / "delta"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 6)
        with pytest.raises(KeyboardInterrupt):
            run(models, out)
    assert {path.name for path in progress_of(out).iterdir()} == {
        *("inputs.json", "text.pt", "block-0.pt", "block-1.pt", "layers.pt", "end_to_end.pt")
    }
    return progress_of(out)


@pytest.fixture
def begun(interrupted: Path, tmp_path: Path) -> Path:
    """An out beside which stands the progress of an interrupted run."""
    out = tmp_path / "out" / "delta"
    shutil.copytree(interrupted, progress_of(out))
    return out


def progress_of(out: Path) -> Path:
    return out.with_name(out.name + SUFFIX)


@pytest.mark.parametrize("fit_settings", [OURS, PAPER], ids=["ours", "paper"])
def test_a_run_interrupted_after_each_file_goes_on_to_the_same_bytes(
    fit_settings: FitSettings, models: TinyModels, undisturbed: Callable[[FitSettings], str], tmp_path: Path
) -> None:
    out, digest, interruptions = tmp_path / "delta", None, 0
    while digest is None:
        with pytest.MonkeyPatch.context() as patch:
            interrupt_after(patch, 1)
            try:
                digest = run(models, out, fit_settings, resume=interruptions > 0)
            except KeyboardInterrupt:
                interruptions += 1
                assert not out.exists()
                assert progress_of(out).is_dir()
        assert interruptions < 20
    assert digest == undisturbed(fit_settings)
    assert interruptions == 5 + (fit_settings.distill_epochs or 0)  # inputs, text, two blocks, layers, epochs
    assert os.listdir(tmp_path) == ["delta"]


def test_a_run_interrupted_while_it_writes_goes_on_to_the_same_bytes(
    models: TinyModels,
    undisturbed: Callable[[FitSettings], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def half(state: Any, path: Path) -> None:
        torch.serialization.save(state, path)
        if path.name == ".end_to_end.pt":
            os.truncate(path, path.stat().st_size // 2)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            run(models, tmp_path / "delta")
    assert not (progress_of(tmp_path / "delta") / "end_to_end.pt").exists()
    (note,) = interrupted.value.__notes__
    assert "delta.progress keeps what is done so far: go on with `resume=True`" in note
    assert run(models, tmp_path / "delta", resume=True) == undisturbed(OURS)
    assert os.listdir(tmp_path) == ["delta"]


def test_a_terminated_run_is_told_how_to_go_on(
    models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Layerwise, "run", lambda *args: signal.raise_signal(signal.SIGTERM))
    files = ["--base", models.base, "--finetune", models.finetunes[0], "--out", tmp_path / "delta"]
    assert command(["compress", *map(str, files), "--samples", "4", "--no-progress"]) == 143
    assert "delta.progress keeps what is done so far: go on with --resume\n" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["delta.progress"]


def test_without_resume_what_is_there_is_thrown_away(
    models: TinyModels, undisturbed: Callable[[FitSettings], str], begun: Path
) -> None:
    other = replace(OURS, budget=1.0, distill_epochs=0)
    assert run(models, begun, other) == undisturbed(other)
    assert os.listdir(begun.parent) == [begun.name]


def test_there_need_not_be_anything_to_go_on_with(
    models: TinyModels, undisturbed: Callable[[FitSettings], str], tmp_path: Path
) -> None:
    progress_of(tmp_path / "delta").mkdir()  # left before anything was in it
    assert run(models, tmp_path / "delta", resume=True) == undisturbed(OURS)


OTHERS: dict[str, dict[str, Any]] = {
    "method": {"method": "scalar"},
    "embeddings": {"embeddings": "whole"},
    "seed": {"fit_settings": replace(OURS, calibration=replace(SELF, seed=1))},
    "samples": {"fit_settings": replace(OURS, calibration=replace(SELF, samples=17))},
    "epochs": {"fit_settings": replace(OURS, distill_epochs=4)},
    "signs": {"fit_settings": replace(OURS, learn_signs=False)},
    "budget": {"fit_settings": replace(OURS, budget=1.3)},
    "recipe": {"fit_settings": replace(PAPER, distill_epochs=2), "method": "per-axis"},
}
MISTAKEN: dict[str, dict[str, Any]] = {
    "samples": {"fit_settings": replace(OURS, calibration=replace(SELF, samples=2))},
    "text": {"fit_settings": replace(OURS, calibration=replace(SELF, text="no-such-file.txt"))},
    "recipe": {"fit_settings": PAPER, "method": "both"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_settings_are_refused_and_change_nothing(other: str, models: TinyModels, begun: Path) -> None:
    before = {path.name: path.read_bytes() for path in progress_of(begun).iterdir()}
    with pytest.raises(UsageError, match="left by a run with other inputs or settings"):
        run(models, begun, **{"resume": True, **OTHERS[other]})
    assert {path.name: path.read_bytes() for path in progress_of(begun).iterdir()} == before


@pytest.mark.parametrize("mistake", MISTAKEN)
def test_a_mistaken_command_throws_nothing_away(
    mistake: str, models: TinyModels, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in progress_of(begun).iterdir()}
    with pytest.raises(UsageError):
        run(models, begun, **MISTAKEN[mistake])
    assert {path.name: path.read_bytes() for path in progress_of(begun).iterdir()} == before
    assert "--resume" not in capsys.readouterr().err  # what is there is another run's


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_is_no_progress_is_never_thrown_away(
    kind: str, resumes: bool, models: TinyModels, tmp_path: Path
) -> None:
    place, notes = progress_of(tmp_path / "delta"), tmp_path / "notes"
    (place if kind == "directory" else notes).mkdir()
    ((place if kind == "directory" else notes) / "mine.txt").write_text("mine")
    if kind == "file":
        place.write_text("mine")
    if kind == "link":
        place.symlink_to(notes)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"delta\.progress: .* this is none: move it away"):
        run(models, tmp_path / "delta", resume=resumes)
    assert sorted(tmp_path.rglob("*")) == before


def test_another_file_of_the_same_name_is_other_text(models: TinyModels, tmp_path: Path) -> None:
    texts = []
    for number in range(2):
        texts.append(tmp_path / f"{number}" / "text.txt")
        texts[-1].parent.mkdir()
        texts[-1].write_text(f"{number} is what this says. " * 100)
    own = [replace(OURS, calibration=replace(SELF, text=str(text))) for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run(models, tmp_path / "delta", own[0])
    with pytest.raises(UsageError, match="other inputs"):
        run(models, tmp_path / "delta", own[1], resume=True)


def test_another_finetune_is_refused(models: TinyModels, begun: Path, tmp_path: Path) -> None:
    other = make_pair("llama", tmp_path / "pair", seed=3, changes=(Change(noise=0.1),))
    with pytest.raises(UsageError, match="other inputs"):
        run(TinyModels(models.base, other.finetunes), begun, resume=True)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    # A zip file, which pads between its entries.
    with zipfile.ZipFile(path) as entries:
        largest = max((entries.read(name) for name in entries.namelist() if "/data/" in name), key=len)
    content[content.index(largest) + len(largest) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, int(0.99 * path.stat().st_size))


def empty(path: Path) -> None:
    os.truncate(path, 0)


def write_another_content(path: Path) -> None:
    torch.save({"epochs": 1}, path)


@pytest.mark.parametrize("damage", [flip_a_bit, cut, empty, write_another_content])
def test_every_damaged_stage_is_computed_again_to_the_same_bytes(
    damage: Callable[[Path], None],
    models: TinyModels,
    begun: Path,
    undisturbed: Callable[[FitSettings], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages = [path for path in sorted(progress_of(begun).iterdir()) if path.name != "inputs.json"]
    for path in stages:
        damage(path)
    assert run(models, begun, resume=True) == undisturbed(OURS)
    # A block that comes behind a damaged one is not read.
    assert [line for line in capsys.readouterr().err.splitlines() if "damaged" in line] == [
        f"{progress_of(begun) / name}: it is damaged: this stage is computed again"
        for name in ("text.pt", "layers.pt", "block-0.pt", "end_to_end.pt")
    ]


def test_one_damaged_stage_costs_no_other(
    models: TinyModels,
    begun: Path,
    undisturbed: Callable[[FitSettings], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut(progress_of(begun) / "text.pt")
    kept, keep = [], CheckpointStore._keep

    def noted(self: CheckpointStore, filename: str, write: Callable[[Path], object]) -> None:
        kept.append(filename)
        keep(self, filename, write)

    monkeypatch.setattr(CheckpointStore, "_keep", noted)
    assert run(models, begun, resume=True) == undisturbed(OURS)
    assert kept == ["text.pt", "end_to_end.pt", "end_to_end.pt"]


def test_too_little_memory_is_no_damage(
    begun: Path, models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        run(models, begun, resume=True)


def test_damaged_inputs_are_other_inputs(models: TinyModels, begun: Path) -> None:
    (progress_of(begun) / "inputs.json").write_bytes(b"\xff{")
    with pytest.raises(UsageError, match="leave `resume` away"):
        run(models, begun, resume=True)


def test_a_delta_that_is_not_good_enough_is_written_once_less_is_asked_for(
    models: TinyModels,
    undisturbed: Callable[[FitSettings], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        FidelityError, match=r"less than `min_agreement` 100\.00%.* `resume=True` with a lower"
    ):
        run(models, tmp_path / "delta", min_agreement=1.0)
    assert os.listdir(tmp_path) == ["delta.progress"]
    monkeypatch.setattr(CheckpointStore, "_keep", lambda *args: pytest.fail("a stage ran again"))
    assert run(models, tmp_path / "delta", min_agreement=0.0, resume=True) == undisturbed(OURS)
    assert os.listdir(tmp_path) == ["delta"]


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("block-1", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        ("end_to_end", RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")),
    ],
    ids=["system", "torch"],
)
def test_a_full_disk_is_one_error_after_which_the_run_goes_on(
    stage: str,
    error: Exception,
    models: TinyModels,
    undisturbed: Callable[[FitSettings], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(content: Any, path: Path) -> None:
        if path.name != f".{stage}.pt":
            torch.serialization.save(content, path)
            return
        path.write_bytes(b"part of it")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        raise error

    out = tmp_path / "delta"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(StorageFull) as caught:
            run(models, out)
    monkeypatch.undo()
    assert str(caught.value).startswith(f"{progress_of(out)}: ")
    assert str(caught.value).endswith(
        "free some space for what is done so far and run again with `resume=True`"
    )
    assert not any(path.name.startswith(".") for path in progress_of(out).iterdir())
    assert run(models, out, resume=True) == undisturbed(OURS)


def test_an_error_of_torch_with_free_disk_is_not_reported_as_a_full_disk(
    models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(content: Any, path: Path) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="something else"):
        run(models, tmp_path / "delta")
