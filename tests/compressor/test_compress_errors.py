"""Tests of bad input to `compress`: one clear error, raised before work if possible, and nothing left behind."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from torch import Tensor

from compressor.config import CompressConfig
from compressor.pipeline import compress
from deltastore.errors import CheckpointError, PeraxisError, StorageFull, UsageError
from tests.compressor.helpers.compressing import SINGLE, rewrite, rewrite_config
from tests.helpers.tiny_models import Change, TinyModels, make_pair

UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    return make_pair("llama", tmp_path, changes=(Change(added_tokens=1),))


def refused(models: TinyModels, kind: type[PeraxisError], out: Path | None = None) -> str:
    """The message of the one error; beside the models nothing is left."""
    directory = models.base.parent
    before = sorted(directory.rglob("*"))
    config = CompressConfig(str(models.base), str(models.finetunes[0]), out or directory / "delta")
    with pytest.raises(kind) as caught:
        compress(config)
    assert sorted(directory.rglob("*")) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_another_architecture_is_refused_by_the_names_of_its_facts(models: TinyModels) -> None:
    rewrite_config(
        models.finetunes[0], rms_norm_eps=0.1, rope_parameters={"rope_theta": 5.0, "rope_type": "default"}
    )
    assert " rms_norm_eps, rope_parameters.rope_theta, " in refused(models, CheckpointError)


def test_other_tensor_names_are_refused_by_name(models: TinyModels) -> None:
    rewrite(models.finetunes[0], lambda tensors: tensors.update({"model.extra.weight": tensors.pop(UP)}))
    message = refused(models, CheckpointError)
    assert f"missing: {UP}" in message
    assert "unknown: model.extra.weight" in message


def test_a_missing_embedding_is_refused_where_no_tie_lets_the_head_stand_for_it(models: TinyModels) -> None:
    for directory, kept in ((models.base, {HEAD}), (models.finetunes[0], set[str]())):

        def rename(tensors: dict[str, Tensor], kept: set[str] = kept) -> None:
            tensors["model.wordings.weight"] = tensors.pop("model.embed_tokens.weight")
            for name in {HEAD} - kept:
                del tensors[name]

        rewrite(directory, rename)
    assert "'model.embed_tokens.weight' is in none of its shards" in refused(models, CheckpointError)


def test_other_shapes_are_refused_by_name(models: TinyModels) -> None:
    rewrite(models.finetunes[0], lambda tensors: tensors.update({UP: torch.zeros(93, 64)}))
    assert f"'{UP}' has shape (93, 64) and the base's is (92, 64)" in refused(models, CheckpointError)


def test_a_shrunk_vocabulary_is_refused(models: TinyModels) -> None:
    def shrink(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[HEAD][:100].clone()

    rewrite(models.finetunes[0], shrink)
    assert "has 100 rows and the base 259: a vocabulary may grow and not shrink" in refused(
        models, CheckpointError
    )


def test_integer_weights_are_refused(models: TinyModels) -> None:
    rewrite(models.finetunes[0], lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}))
    assert f"'{UP}' is I8: save the model in bfloat16, float16 or float32" in refused(models, CheckpointError)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [UP, NORM])
@pytest.mark.parametrize("side", ["base", "finetune-0"])
def test_nan_and_infinity_are_refused_by_tensor_and_shard(
    value: float, name: str, side: str, models: TinyModels
) -> None:
    rewrite(models.base.parent / side, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    expected = f"{models.base.parent / side / SINGLE}: tensor '{name}' holds NaN or infinity"
    assert expected in refused(models, CheckpointError)


def test_nan_in_an_added_row_is_refused(models: TinyModels) -> None:
    rewrite(models.finetunes[0], lambda tensors: tensors[HEAD][-1].fill_(math.nan))
    assert f"'{HEAD}' holds NaN" in refused(models, CheckpointError)


def test_nan_behind_the_first_difference_of_a_whole_tensor_is_refused(models: TinyModels) -> None:
    rewrite(models.finetunes[0], lambda tensors: tensors[NORM][-1:].fill_(math.nan))
    assert f"'{NORM}' holds NaN" in refused(models, CheckpointError)


def test_a_difference_beyond_any_fine_tune_s_is_refused(models: TinyModels) -> None:
    rewrite(models.finetunes[0], lambda tensors: tensors[UP].mul_(1e9))
    assert f"'{UP}' differs from the base's by" in refused(models, CheckpointError)


@pytest.mark.parametrize("side", ["base", "finetune-0"])
def test_a_truncated_shard_is_refused(side: str, models: TinyModels) -> None:
    shard = models.base.parent / side / SINGLE
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert f"{shard}: truncated" in refused(models, CheckpointError)


def test_a_shard_that_is_not_there_is_refused(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, max_shard_size="50KB")
    shard = sorted(models.finetunes[0].glob("model-*.safetensors"))[1]
    shard.unlink()
    assert str(shard) in refused(models, CheckpointError)


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (lambda directory: (directory / "config.json").unlink(), "config.json"),
        (lambda directory: (directory / "config.json").write_text("{"), "config.json"),
        (lambda directory: (directory / SINGLE).unlink(), "save the model as safetensors"),
        (
            lambda directory: (directory / "generation_config.json").write_text("[1]"),
            "generation_config.json",
        ),
        (shutil.rmtree, "no such directory"),
    ],
    ids=["no config", "broken config", "no weights", "broken generation config", "nothing"],
)
def test_an_incomplete_checkpoint_is_refused(
    break_it: Callable[[Path], object], expected: str, models: TinyModels
) -> None:
    break_it(models.finetunes[0])
    assert expected in refused(models, CheckpointError)


def test_a_hub_id_that_cannot_be_had_is_one_line(
    models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    config = CompressConfig("someone/some-model", str(models.finetunes[0]), tmp_path / "delta")
    with pytest.raises(CheckpointError, match="someone/some-model: no such directory, and the hub") as caught:
        compress(config)
    assert "\n" not in str(caught.value)


def test_a_hub_id_in_the_hub_cache_needs_no_network(
    models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "cache" / "models--someone--some-model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(models.base, cached / "snapshots" / ("0" * 40))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    result = compress(CompressConfig("someone/some-model", str(models.finetunes[0]), tmp_path / "delta"))
    assert result.manifest.base_id == "someone/some-model"


@pytest.mark.parametrize("out", ["no/such/delta", "base", "base/config.json/delta"])
def test_an_out_that_cannot_be_a_file_is_refused(out: str, models: TinyModels) -> None:
    assert "give `out` the name of a file" in refused(models, UsageError, models.base.parent / out)


def test_an_out_that_cannot_be_written_is_refused(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    assert "choose another `out`" in refused(models, UsageError, Path("/proc/delta"))


def test_a_full_disk_is_refused_before_work(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "1000 bytes are free and compressing needs up to" in refused(models, StorageFull)


def test_the_room_asked_for_is_enough_and_not_much_more(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = models.base.parent / "delta"
    config = CompressConfig(str(models.base), str(models.finetunes[0]), out, embeddings="whole")
    needed = 2 * compress(config).artifact_bytes
    for share, fits in ((0.75, False), (1.25, True)):
        free = SimpleNamespace(free=int(share * needed))
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: free)
        if fits:
            compress(config)
        else:
            with pytest.raises(StorageFull):
                compress(config)


def test_a_tokenizer_larger_than_a_delta_carries_is_refused(models: TinyModels) -> None:
    with (models.finetunes[0] / "tokenizer.json").open("r+b") as file:
        file.truncate(65 << 20)
    assert "tokenizer.json: 68157440 bytes, more than the 67108864" in refused(models, CheckpointError)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_refused_though_no_text_is_read(name: str, models: TinyModels) -> None:
    (models.finetunes[0] / name).write_text('{"a":')
    assert f"{models.finetunes[0] / name}: it is no tokenizer" in refused(models, CheckpointError)


def test_an_older_artifact_survives_a_failure(models: TinyModels) -> None:
    out = models.base.parent / "delta"
    compress(CompressConfig(str(models.base), str(models.finetunes[0]), out))
    before = out.read_bytes()
    rewrite(models.finetunes[0], lambda tensors: tensors[HEAD][-1].fill_(math.nan))
    refused(models, CheckpointError)
    assert out.read_bytes() == before


def test_a_configuration_that_transformers_refuses_is_one_error(models: TinyModels) -> None:
    path = models.finetunes[0] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": "wide"}))
    assert "config.json" in refused(models, CheckpointError)
