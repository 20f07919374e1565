"""Files that are no delta of the base: each is one clear line that names the key, and nothing is left behind."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.convert.importer import ImportConfig, Kind, import_diff
from deltastore.errors import ArtifactError, CheckpointError, PeraxisError, StorageFull, UsageError
from tests.compressor.helpers.compressing import rewrite, rewrite_config
from tests.compressor.helpers.diff_files import bitdelta, make_packable, per_axis
from tests.helpers.tiny_models import VOCAB_SIZE, Change, TinyModels

UP = "model.layers.1.mlp.up_proj"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
MASK, COEFF = f"{UP}.mask", f"{UP}.coeff"
Content = dict[Any, Any]


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    return make_packable("llama", tmp_path)


def refused(
    models: TinyModels,
    expected: type[PeraxisError] = CheckpointError,
    kind: Kind = "bitdelta",
    finetune: Path | None = None,
    out: Path | None = None,
) -> str:
    """The message of the one error for ``diff.pt``; nothing is left beside the models."""
    directory = models.base.parent
    before = sorted(directory.rglob("*"))
    config = ImportConfig(kind, models.base, directory / "diff.pt", out or directory / "delta", finetune)
    with pytest.raises(expected) as caught:
        import_diff(config)
    assert sorted(directory.rglob("*")) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def saved(models: TinyModels, content: object) -> Path:
    path = models.base.parent / "diff.pt"
    torch.save(content, path)
    return path


DEFECTS: dict[str, tuple[Callable[[Content], object], str]] = {
    "unknown parameter": (
        lambda c: c.update({"model.extra": torch.ones(2)}),
        "the base has no 'model.extra'",
    ),
    "unknown module": (
        lambda c: c.update({"model.x.mask": c[MASK], "model.x.coeff": c[COEFF]}),
        "the base has no 'model.x.weight'",
    ),
    "mask alone": (lambda c: c.pop(COEFF), f"'{MASK}' has no '{COEFF}' beside it"),
    "coefficient alone": (lambda c: c.pop(MASK), f"'{COEFF}' has no '{MASK}' beside it"),
    "whole and coded": (
        lambda c: c.update({f"{UP}.weight": torch.ones(96, 64)}),
        f"'{UP}.weight' is there whole and as a mask",
    ),
    "unpacked mask": (lambda c: c.update({MASK: c[MASK] > 0}), f"'{MASK}' is bool and must be int32"),
    "mask turned": (
        lambda c: c.update({MASK: c[MASK].T.contiguous()}),
        f"'{MASK}' has shape (96, 2), 32 inputs in a word, and the base's weight has 96 outputs and 64 inputs",
    ),
    "mask of a row less": (lambda c: c.update({MASK: c[MASK][:, :95]}), f"'{MASK}' has shape (2, 95)"),
    "mask of a vector": (
        lambda c: (
            c.update({"model.norm.mask": c[MASK], "model.norm.coeff": c[COEFF], NORM: c.pop(NORM)})
            or c.pop(NORM)
        ),
        "the base's weight has shape (64,) and is no matrix",
    ),
    "whole coefficient": (
        lambda c: c.update({COEFF: torch.tensor(1)}),
        f"'{COEFF}' is int64 and must be a float",
    ),
    "coefficients": (
        lambda c: c.update({COEFF: torch.ones(96)}),
        f"'{COEFF}' has shape (96,) and must have 1 value",
    ),
    "NaN coefficient": (lambda c: c.update({COEFF: torch.tensor(math.nan)}), f"'{COEFF}' holds NaN"),
    "huge coefficient": (lambda c: c.update({COEFF: torch.tensor(1e9)}), f"'{COEFF}' reaches 1e+09"),
    "NaN parameter": (lambda c: c[NORM].data[-1:].fill_(math.nan), f"'{NORM}' holds NaN or infinity"),
    "infinite parameter": (lambda c: c[HEAD].data[-1:].fill_(-math.inf), f"'{HEAD}' holds NaN or infinity"),
    "double parameter": (lambda c: c.update({NORM: c[NORM].double()}), f"'{NORM}' is float64"),
    "parameter of another shape": (
        lambda c: c.update({NORM: torch.ones(65)}),
        f"'{NORM}' has shape (65,) and the base's is (64,)",
    ),
    "shrunk vocabulary": (
        lambda c: c.update({EMBEDDING: c[EMBEDDING][:-1]}),
        f"'{EMBEDDING}' has shape ({VOCAB_SIZE - 1}, 64) and the base's is ({VOCAB_SIZE}, 64)",
    ),
    "grown embedding alone": (
        lambda c: c.update({EMBEDDING: torch.ones(VOCAB_SIZE + 2, 64)}),
        f"the embedding has {VOCAB_SIZE + 2} rows and the output head {VOCAB_SIZE}",
    ),
    "grown layer": (lambda c: c.update({NORM: torch.ones(66)}), f"'{NORM}' has shape (66,)"),
    "number": (lambda c: c.update({COEFF: 0.5}), f"'{COEFF}' is no plain tensor"),
    "sparse tensor": (lambda c: c.update({NORM: torch.ones(64).to_sparse()}), f"'{NORM}' is no plain tensor"),
    "tensor without data": (
        lambda c: c.update({NORM: torch.ones(64, device="meta")}),
        f"'{NORM}' is no plain tensor",
    ),
    "number for a name": (lambda c: c.update({7: torch.ones(1)}), "key 7 is no name"),
    "the paper's key": (
        lambda c: c.update({f"{UP}.mask_row": c[MASK]}),
        f"'{UP}.mask_row' is of the kind per-axis: import it with `peraxis import per-axis`",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_one_line_that_names_the_key(defect: str, models: TinyModels) -> None:
    spoil, expected = DEFECTS[defect]
    content: Content = dict(bitdelta(models))
    spoil(content)
    path = saved(models, content)
    message = refused(models)
    assert message.startswith(f"{path}: ")
    assert expected in message


@pytest.mark.parametrize(("axis", "length"), [("row", 64), ("col", 96)])
def test_a_vector_along_the_wrong_axis_is_refused(axis: str, length: int, models: TinyModels) -> None:
    content = per_axis(models)
    mask, vector = content.pop(f"{UP}.mask_row"), torch.ones(160 - length)
    del content[f"{UP}.coeff_row"]
    saved(models, {**content, f"{UP}.mask_{axis}": mask, f"{UP}.coeff_{axis}": vector})
    assert f"has shape ({160 - length},) and must have {length} values" in refused(models, kind="per-axis")


def test_inputs_that_fill_no_word_are_refused(tmp_path: Path) -> None:
    models = make_packable("llama", tmp_path, hidden_size=80)
    content = dict(per_axis(make_packable("llama", tmp_path / "other")))
    content = {name: tensor for name, tensor in content.items() if name.startswith(UP)}
    saved(models, content)
    assert "the base's weight has 96 outputs and 80 inputs" in refused(models, kind="per-axis")


class Shell:
    """Runs a command when a careless reader unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def test_a_pickle_that_would_run_a_command_is_refused_and_runs_nothing(models: TinyModels) -> None:
    mark = models.base.parent / "ran"
    saved(models, {**bitdelta(models), "model.norm.weight": Shell(mark)})
    assert "loading that could run code from the file" in refused(models)
    assert not mark.exists()


@pytest.mark.parametrize("content", [[torch.ones(2)], torch.ones(2), 7], ids=["list", "tensor", "number"])
def test_what_is_no_dict_is_refused(content: object, models: TinyModels) -> None:
    saved(models, content)
    assert "and no dict: save a dict of plain tensors" in refused(models)


def test_a_truncated_file_is_refused_wherever_it_ends(models: TinyModels) -> None:
    path = saved(models, bitdelta(models))
    whole = path.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert refused(models).startswith(f"{path}: truncated, or not written by torch.save")


def test_a_damaged_file_is_refused_or_read_and_never_a_crash(models: TinyModels) -> None:
    path = saved(models, {NORM: torch.ones(64)})
    whole = path.read_bytes()
    config = ImportConfig("bitdelta", models.base, path, models.base.parent / "delta")
    messages = []
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            import_diff(config)
        except (CheckpointError, ArtifactError) as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert not any("\n" in message for message in messages)


def test_a_file_that_lies_of_its_sizes_is_refused(models: TinyModels) -> None:
    path = saved(models, {NORM: torch.ones(300)})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content.replace(b"M\x2c\x01", b"J\x00\x00\x00\x10"))  # 300 is now 2^28
    assert "damaged, torch cannot read it" in refused(models)


def test_the_old_form_of_torch_save_is_refused(models: TinyModels) -> None:
    torch.save(bitdelta(models), models.base.parent / "diff.pt", _use_new_zipfile_serialization=False)
    assert "not written by torch.save in its present form" in refused(models)


def test_a_file_that_is_not_there_is_refused(models: TinyModels) -> None:
    assert "no such file: give `diff`" in refused(models)


def test_a_head_of_its_own_under_a_tie_is_refused(tmp_path: Path) -> None:
    models = make_packable("qwen2", tmp_path, Change(tied=False))
    saved(models, bitdelta(models))
    assert "give `finetune` a directory whose config.json has tie_word_embeddings false" in refused(models)


def test_a_tie_that_no_file_can_carry_is_refused(tmp_path: Path) -> None:
    models = make_packable("llama", tmp_path, Change(tied=True))
    content = bitdelta(models)
    del content[EMBEDDING]
    saved(models, content)
    assert "the fine-tune ties its output head" in refused(models, finetune=models.finetunes[0])


def test_a_base_of_integers_is_refused(models: TinyModels) -> None:
    saved(models, bitdelta(models))
    rewrite(
        models.base, lambda tensors: tensors.update({f"{UP}.weight": torch.ones(96, 64, dtype=torch.int8)})
    )
    assert f"'{UP}.weight' is I8: save the base in bfloat16" in refused(models)


def test_a_fine_tune_of_another_architecture_is_refused(models: TinyModels) -> None:
    saved(models, bitdelta(models))
    rewrite_config(models.finetunes[0], rms_norm_eps=0.5)
    assert "its configuration differs" in refused(models, finetune=models.finetunes[0])


@pytest.mark.parametrize("config", [None, "{", "[1]"])
def test_a_fine_tunes_directory_without_a_configuration_is_refused(
    config: str | None, models: TinyModels, tmp_path: Path
) -> None:
    saved(models, bitdelta(models))
    directory = tmp_path / "files"
    directory.mkdir()
    if config is not None:
        (directory / "config.json").write_text(config)
    assert "config.json" in refused(models, finetune=directory)


def test_an_out_that_cannot_be_written_is_refused(models: TinyModels, tmp_path: Path) -> None:
    saved(models, bitdelta(models))
    assert "is a directory" in refused(models, UsageError, out=tmp_path)
    assert "no such directory" in refused(models, UsageError, out=tmp_path / "no" / "delta")


def test_a_full_disk_is_refused_before_work(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(models, bitdelta(models))
    monkeypatch.setattr("compressor.outputs.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "1000 bytes are free" in refused(models, StorageFull)


def test_a_failed_import_leaves_the_artifact_that_was_there(models: TinyModels, tmp_path: Path) -> None:
    content: dict[str, Tensor] = bitdelta(models)
    content[HEAD] = torch.full((VOCAB_SIZE, 64), math.nan)  # the last tensor, so that all others were written
    saved(models, content)
    (tmp_path / "delta").write_bytes(b"mine")
    assert HEAD in refused(models)
    assert (tmp_path / "delta").read_bytes() == b"mine"
