"""Tests of a delta's tokenizer, chat template and generation config, carried if they differ from the base's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltastore.errors import CheckpointError
from tests.compressor.helpers.compressing import carried, rewrite_config
from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, TinyModels, make_pair

GENERATION = "generation_config.json"


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    return make_pair("llama", tmp_path)


def test_files_equal_to_the_bases_are_not_carried(models: TinyModels, tmp_path: Path) -> None:
    assert carried(models, tmp_path / "delta") == {}


def test_a_chat_template_of_its_own_brings_the_whole_tokenizer(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(chat_template=CHAT_TEMPLATE),))
    files = carried(models, tmp_path / "delta")
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert files["chat_template.jinja"].decode() == CHAT_TEMPLATE
    assert files["tokenizer.json"] == (models.base / "tokenizer.json").read_bytes()


def test_templates_with_names_are_carried(tmp_path: Path) -> None:
    templates = {"default": CHAT_TEMPLATE, "tool_use": "T", "rag": "R"}
    models = make_pair("llama", tmp_path, changes=(Change(chat_template=templates),))
    named = models.finetunes[0] / "additional_chat_templates"
    (named / "a name.jinja").write_text("no name that an artifact has")
    files = carried(models, tmp_path / "delta")
    assert list(files)[-3:] == [
        "chat_template.jinja", "additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"
    ]  # fmt: skip
    assert files["additional_chat_templates/tool_use.jinja"] == b"T"
    for number in range(7):
        (named / f"{number}.jinja").write_text("")
    with pytest.raises(CheckpointError, match="9 chat templates, more than the 8"):
        carried(models, tmp_path / "other")


@pytest.mark.parametrize("side", ["base", "finetune-0"])
def test_a_file_that_only_one_side_has_is_a_difference(models: TinyModels, side: str, tmp_path: Path) -> None:
    (tmp_path / side / "merges.txt").write_text("#version: 0.2\n")
    files = carried(models, tmp_path / "delta")
    assert ("merges.txt" in files) == (side == "finetune-0")
    assert {"tokenizer.json", "tokenizer_config.json"} <= files.keys()


def test_a_fine_tune_without_a_tokenizer_uses_the_bases(models: TinyModels, tmp_path: Path) -> None:
    for path in models.finetunes[0].glob("tokenizer*"):
        path.unlink()
    assert carried(models, tmp_path / "delta") == {}


@pytest.mark.parametrize("name", ["chat_template.jinja", "special_tokens_map.json", "added_tokens.json"])
def test_files_that_no_vocabulary_reads_are_left_out(
    name: str, models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory in (models.base, models.finetunes[0]):
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer_config.json").unlink()
    (models.finetunes[0] / name).write_text("{}")
    assert carried(models, tmp_path / "delta") == {}
    assert f"left out {name}: neither it nor the base has a vocabulary" in capsys.readouterr().err


def test_another_generation_config_is_carried_as_it_is(tmp_path: Path) -> None:
    models = make_pair(
        "llama", tmp_path, changes=(Change(generation={"temperature": 0.5, "do_sample": True}),)
    )
    files = carried(models, tmp_path / "delta")
    assert files == {GENERATION: (models.finetunes[0] / GENERATION).read_bytes()}


def test_notes_of_transformers_are_no_difference(models: TinyModels, tmp_path: Path) -> None:
    path = models.finetunes[0] / GENERATION
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "transformers_version": "4.0", "top_k": None})
    )
    assert carried(models, tmp_path / "delta") == {}


def test_without_the_file_the_token_ids_of_the_configuration_are_in_force(
    models: TinyModels, tmp_path: Path
) -> None:
    (models.finetunes[0] / GENERATION).unlink()
    assert carried(models, tmp_path / "same") == {}
    rewrite_config(models.finetunes[0], eos_token_id=[257, 3])
    files = carried(models, tmp_path / "other")
    assert json.loads(files[GENERATION]) == {
        "bos_token_id": 256,
        "eos_token_id": [257, 3],
        "pad_token_id": 258,
    }
