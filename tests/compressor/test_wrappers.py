"""Deltas between two forms of a wrapper: names, towers, and the form of what is merged."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from compressor.config import CompressConfig
from compressor.convert.merge import MergeConfig, merge
from compressor.pipeline import compress
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError
from deltastore.format.artifact import Artifact
from tests.compressor.helpers.compressing import variant_tensors
from tests.helpers.tiny_models import WRAPPERS, Change, TinyModels, is_tower, load_whole, make_pair
from tests.helpers.wrapper_forms import FORMS, SINGLE, change_stored, save, text_alone
from tests.server.helpers.served import make_delta

PROMPT = torch.tensor([[5, 200, 17, 99, 3, 120, 64, 1, 31, 77, 180, 9]])


def logits(model: object) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=PROMPT).logits  # type: ignore[operator]
    return found


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_every_two_forms_are_a_pair_and_merged_into_the_bases(architecture: str, tmp_path: Path) -> None:
    models = make_pair(architecture, tmp_path, seed=3, changes=(Change(buffers=True),))
    values = variant_tensors(
        models.base, make_delta(models.base, models.finetunes[0], tmp_path / "delta", method="both")
    )
    reference = None
    for base_form, to_base in FORMS.items():
        base = to_base(models.base, tmp_path / f"base-{base_form}")
        for form, to_finetune in FORMS.items():
            if base_form != "as_saved" and form not in ("as_saved", "text_alone"):
                continue
            finetune = to_finetune(models.finetunes[0], tmp_path / f"{base_form}-{form}")
            delta = make_delta(base, finetune, tmp_path / f"{base_form}-{form}.delta", method="both")
            with Artifact.open(delta) as artifact:
                assert artifact.manifest.tensors.keys() == values.keys()
            out = tmp_path / f"merged-{base_form}-{form}"
            merge(MergeConfig(str(base), delta, out, "float32"))
            # Names of modules around the model are not written.
            own = {name.removeprefix("module."): value for name, value in load_file(base / SINGLE).items()}
            written = load_file(out / SINGLE)
            assert written.keys() == own.keys()
            assert all(torch.equal(written[name], own[name]) for name in own if is_tower(name))
            assert (out / "config.json").read_text().count('"vision_config"') == (base_form != "text_alone")
            found = logits(load_whole(out))
            reference = found if reference is None else reference
            assert torch.equal(found, reference), (base_form, form)
    assert reference is not None
    assert not torch.allclose(reference, logits(load_whole(models.base)), atol=1e-3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["gemma3", "mistral3"])
def test_a_wrapper_with_added_tokens_and_other_ties_is_merged_as_transformers_loads_it(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    models = make_pair(architecture, tmp_path, changes=(Change(added_tokens=3, tied=tied),))
    delta = make_delta(models.base, models.finetunes[0], tmp_path / "delta", method="both")
    merge(MergeConfig(str(models.base), delta, tmp_path / "merged", "float32"))
    model = load_whole(tmp_path / "merged")
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    # A delta of an untied base keeps a head of its own.
    assert (ends[0] is ends[1]) is (tied and architecture == "gemma3")
    assert len(ends[0]) == len(ends[1]) == 262
    alone = load_whole(text_alone(tmp_path / "merged", tmp_path / "alone"))
    assert torch.equal(logits(model), logits(alone))


def pair(directory: Path) -> TinyModels:
    return make_pair("gemma3", directory)


@pytest.mark.parametrize("part", ["vision_tower", "multi_modal_projector"])
def test_changed_towers_are_refused_by_name(part: str, tmp_path: Path) -> None:
    models = pair(tmp_path)
    change_stored(models.finetunes[0], part)
    with pytest.raises(CheckpointError, match=rf"towers for images or sound differ .*{part}.* frozen towers"):
        make_delta(models.base, models.finetunes[0], tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_a_tower_that_the_base_lacks_is_refused(tmp_path: Path) -> None:
    models = pair(tmp_path)
    tensors = load_file(models.base / SINGLE)
    save({name: value for name, value in tensors.items() if "multi_modal" not in name}, models.base)
    with pytest.raises(CheckpointError, match=r"differ from those of .*multi_modal_projector"):
        make_delta(models.base, models.finetunes[0], tmp_path / "delta")


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")]
)
def test_towers_in_another_dtype_are_the_same(dtypes: tuple[str, str], tmp_path: Path) -> None:
    models = pair(tmp_path)
    for directory, dtype in zip((models.base, models.finetunes[0]), dtypes, strict=True):
        tensors = load_file(directory / SINGLE)
        for name in filter(is_tower, [*tensors]):
            tensors[name] = tensors[name].to(getattr(torch, dtypes[0])).to(getattr(torch, dtype))
        save(tensors, directory)
    make_delta(models.base, models.finetunes[0], tmp_path / "delta")


def test_towers_and_settings_that_do_not_travel_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = pair(tmp_path)
    config = models.finetunes[0] / "config.json"
    document = json.loads(config.read_text())
    document["vision_config"]["layer_norm_eps"] = 0.5
    config.write_text(json.dumps(document))
    make_delta(models.base, models.finetunes[0], tmp_path / "one")
    assert (
        "vision_config.layer_norm_eps, which its text model does not read: the base's stay"
        in capsys.readouterr().err
    )
    make_delta(text_alone(models.base, tmp_path / "alone"), models.finetunes[0], tmp_path / "two")
    assert "is a text model alone" in capsys.readouterr().err


def test_towers_of_the_base_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pair(tmp_path)
    finetune = text_alone(models.finetunes[0], tmp_path / "alone")
    read = Checkpoint.read_stored
    names: list[str] = []

    def noting(checkpoint: Checkpoint, stored: object, *rows: slice) -> torch.Tensor:
        names.append(stored.name)  # type: ignore[attr-defined]
        return read(checkpoint, stored, *rows)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoint, "read_stored", noting)
    compress(CompressConfig(str(models.base), str(finetune), tmp_path / "delta"))
    assert names
    assert not any(map(is_tower, names))


def test_token_ids_of_both_parts_are_those_that_the_model_has(tmp_path: Path) -> None:
    models = pair(tmp_path)
    config = models.base / "config.json"
    document = json.loads(config.read_text())
    document["eos_token_id"] = [257, 5000]
    config.write_text(json.dumps(document))
    (models.base / "generation_config.json").unlink()
    (models.finetunes[0] / "generation_config.json").unlink()
    delta = make_delta(models.base, models.finetunes[0], tmp_path / "delta")
    merge(MergeConfig(str(models.base), delta, tmp_path / "merged"))
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    # The fine-tune's own.
    assert (written["eos_token_id"], written["text_config"]["eos_token_id"]) == (257, 257)
    assert written["vision_config"] == document["vision_config"]
    load_whole(tmp_path / "merged")


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_an_adapter_on_the_text_model_is_merged_and_one_on_towers_is_refused(
    architecture: str, tmp_path: Path
) -> None:
    base = make_pair(architecture, tmp_path, changes=()).base
    # peft adapts no layer of a class of its own, which Gemma 4's tower has around its linear ones.
    linear = r"\.linear" if architecture == "gemma4" else ""
    for part, layer in (("language_model", ""), ("vision_tower", linear)):
        settings = peft.LoraConfig(
            r=2,
            target_modules=rf".*{part}\..*\.q_proj{layer}",
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        # What peft itself warns of while a test makes its adapter.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft.get_peft_model(load_whole(base), settings).save_pretrained(str(tmp_path / part))
    delta = make_delta(base, tmp_path / "language_model", tmp_path / "delta")
    with Artifact.open(delta) as artifact:
        assert artifact.manifest.tensors
        assert all(name.endswith("q_proj.weight") for name in artifact.manifest.tensors)
    with pytest.raises(CheckpointError, match="towers for images or sound differ"):
        make_delta(base, tmp_path / "vision_tower", tmp_path / "other")
