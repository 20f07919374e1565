"""Checkpoints of wrappers are opened as those of their text models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.cli import planned_tensors
from deltastore.errors import CheckpointError, NotServable
from deltastore.fingerprint import fingerprints
from deltastore.servable import read_config, servable_model
from deltastore.wrappers import check_text_alone, text_form
from tests.helpers.tiny_models import WRAPPERS, is_tower, load_whole, make_pair
from tests.helpers.wrapper_forms import FORMS, SINGLE, change_stored, save, text_alone, text_names

PROMPT = torch.tensor([[5, 200, 17, 99, 3, 120, 64, 1, 31, 77, 180, 9]])


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_every_form_of_a_base_is_one_base(architecture: str, tmp_path: Path) -> None:
    base = make_pair(architecture, tmp_path, changes=()).base
    found = [
        Base.of(Checkpoint.open(form(base, tmp_path / name)), tmp_path / "cache")
        for name, form in FORMS.items()
    ]
    for each in found:
        assert each.fingerprint == found[0].fingerprint
        assert each.shapes == found[0].shapes
        assert each.config == found[0].config
        assert (each.embedding, each.head) == (found[0].embedding, found[0].head)
    change_stored(tmp_path / "as_saved", "embed_tokens.weight")
    assert (
        fingerprints(Checkpoint.open(tmp_path / "as_saved"), tmp_path / "cache").own != found[0].fingerprint
    )


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_a_text_model_computes_from_text_what_its_wrapper_does(architecture: str, tmp_path: Path) -> None:
    base = make_pair(architecture, tmp_path, changes=()).base
    whole, alone = load_whole(base), load_whole(text_alone(base, tmp_path / "alone"))
    with torch.inference_mode():
        assert torch.equal(whole(input_ids=PROMPT).logits, alone(input_ids=PROMPT).logits)


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_towers_are_never_made(architecture: str, tmp_path: Path) -> None:
    base = make_pair(architecture, tmp_path, changes=()).base
    model, checkpoint = servable_model(base), Checkpoint.open(base)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == checkpoint.tensors.keys() - {name for name, _ in model.named_buffers()}
    assert not any(map(is_tower, parameters))
    assert read_config(base).model_type == checkpoint.config["model_type"]
    assert planned_tensors(base)[0].keys() == parameters.keys()
    wrapper = checkpoint.wrapper
    assert wrapper is not None
    stored = {each.name for each in wrapper.towers.values()} | {*map(wrapper.stored_name, checkpoint.tensors)}
    assert stored == load_file(base / SINGLE).keys()


def test_a_text_model_beside_its_wrappers_configuration_is_opened(tmp_path: Path) -> None:
    base = make_pair("gemma3", tmp_path, changes=()).base
    forms = [Checkpoint.open(each) for each in (base, text_names(base, tmp_path / "names"))]
    assert len({fingerprints(each, tmp_path / "cache").own for each in forms}) == 1


def test_towers_without_a_text_model_are_refused(tmp_path: Path) -> None:
    base = make_pair("gemma3", tmp_path, changes=()).base
    save({name: value for name, value in load_file(base / SINGLE).items() if is_tower(name)}, base)
    with pytest.raises(CheckpointError, match="its text model is in none of its shards"):
        Checkpoint.open(base)


def test_a_parameter_under_two_names_is_refused(tmp_path: Path) -> None:
    base = make_pair("gemma3", tmp_path, changes=()).base
    tensors = load_file(base / SINGLE)
    save({**tensors, "model.language_model.norm.weight": tensors["language_model.model.norm.weight"]}, base)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' .* under another name"):
        Checkpoint.open(base)


@pytest.mark.parametrize(
    ("part", "value"),
    [("text_config", {"num_hidden_layers": -3}), ("text_config", 5), ("vision_config", "x"),
     ("vision_config", {"num_hidden_layers": 10**9})],
)  # fmt: skip
def test_a_configuration_that_lies_is_one_line(part: str, value: object, tmp_path: Path) -> None:
    base = make_pair("gemma3", tmp_path, changes=()).base
    document = json.loads((base / "config.json").read_text())
    document[part] = {**document[part], **value} if isinstance(value, dict) else value
    (base / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(base)
    assert "\n" not in str(caught.value)
    assert str(base) in str(caught.value)


def test_vllm_is_refused_a_wrapper_by_name(tmp_path: Path) -> None:
    base = make_pair("mistral3", tmp_path, changes=()).base
    with pytest.raises(NotServable, match=r"'mistral3': .* --backend native"):
        check_text_alone(Checkpoint.open(base).stored_config)
    check_text_alone(Checkpoint.open(text_alone(base, tmp_path / "alone")).stored_config)


def test_configurations_of_text_models_have_no_text_form() -> None:
    assert text_form({"model_type": "llama", "text_config": {}}) is None
