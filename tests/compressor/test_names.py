"""Tests of tensors under other names, beside a model's own, or of another base: same bytes, a warning, or one error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.config import Calibration, CompressConfig, FitSettings
from compressor.convert.merge import MergeConfig, merge
from compressor.pipeline import compress
from deltastore.checkpoint import INDEX_FILE
from deltastore.errors import CheckpointError
from tests.compressor.helpers.compressing import SINGLE, compressed, rewrite, rewrite_config
from tests.helpers.tiny_models import TinyModels, make_pair

UP, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    return make_pair("llama", tmp_path)


@pytest.fixture(scope="module")
def plain_digest(tmp_path_factory: pytest.TempPathFactory) -> Callable[[FitSettings | None], str]:
    """The digest of the delta of an equal pair that nothing was done to, made once for all tests."""
    plain = make_pair("llama", tmp_path_factory.mktemp("plain"))

    @cache
    def digest(fit_settings: FitSettings | None) -> str:
        return compressed(plain, tmp_path_factory.mktemp("delta") / "plain", fit_settings=fit_settings).digest

    return digest


def rename(directory: Path, name_of: Callable[[str], str]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name_of(name)] = tensors.pop(name)

    rewrite(directory, change)


def add(directory: Path, name: str, value: Tensor | None = None) -> None:
    rewrite(directory, lambda tensors: tensors.update({name: torch.ones(3, 64) if value is None else value}))


def refused(models: TinyModels) -> str:
    out = models.base.parent / "delta"
    with pytest.raises(CheckpointError) as caught:
        compress(CompressConfig(str(models.base), str(models.finetunes[0]), out))
    assert not out.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name_of",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"_fsdp_wrapped_module.{name}".replace("layers.0.", "layers.0._fsdp_wrapped_module."),
        lambda name: name.replace("mlp.", "mlp._checkpoint_wrapped_module."),
        lambda name: f"pretrained_model.{name}",
        lambda name: f"model.{name}",
        lambda name: name.removeprefix("model."),
    ],
    ids=["parallel", "compiled", "both", "peft", "fsdp", "recomputed", "trl", "lightning", "body"],
)
@pytest.mark.parametrize(
    "fit_settings", [None, FitSettings(Calibration(samples=16, length=12))], ids=["none", "self"]
)
def test_a_prefix_changes_no_byte_of_the_delta(
    name_of: Callable[[str], str],
    fit_settings: FitSettings | None,
    models: TinyModels,
    plain_digest: Callable[[FitSettings | None], str],
    tmp_path: Path,
) -> None:
    rename(models.finetunes[0], name_of)
    renamed = compressed(models, tmp_path / "renamed", fit_settings=fit_settings)
    assert renamed.digest == plain_digest(fit_settings)


def test_a_base_with_a_wrapper_s_prefix_is_the_base_without(models: TinyModels, tmp_path: Path) -> None:
    plain = compressed(models, tmp_path / "plain")
    rename(models.base, lambda name: f"module.{name}")
    assert compressed(models, tmp_path / "renamed").digest == plain.digest
    merge(MergeConfig(str(models.base), tmp_path / "plain", tmp_path / "merged"))


def test_a_tensor_with_and_without_a_prefix_is_refused(models: TinyModels) -> None:
    add(models.finetunes[0], f"module.{UP}")
    assert f"tensor '{UP}' is there more than once" in refused(models)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("v_head.summary.weight", "a value head (v_head.summary.weight)"),
        ("value_head.weight", "a value head"),
        ("model.layers.0.self_attn.k_scale", "scales of a quantised KV cache"),
        ("model.layers.1.self_attn.v_proj.output_scale", "scales of a quantised KV cache"),
        ("mtp.layers.0.fc.weight", "layers that predict further tokens (MTP)"),
        ("model.layers.2.mlp.up_proj.weight", "layers behind its last one"),
        ("model.rotary_emb.attention_table", "tables that are computed"),
        ("model.layers.0.self_attn.q_proj.bias", "tensors that are no part of the model"),
    ],
)
def test_what_the_model_does_not_read_is_left_out_by_what_it_is(
    name: str, what: str, models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = compressed(models, tmp_path / "plain")
    capsys.readouterr()
    add(models.finetunes[0], name)
    assert compressed(models, tmp_path / "more").digest == plain.digest
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert f"{models.finetunes[0]}: {what}" in line
    assert "left out of the delta" in line


def test_what_a_fine_tune_dropped_and_no_model_reads_stays_the_base_s(
    models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mtp.fc.weight", "mtp.norm.weight"):
        add(models.base, name)
    result = compressed(models, tmp_path / "delta")
    assert "mtp.fc.weight" not in result.manifest.tensors
    assert "layers that predict further tokens (MTP) (mtp.fc.weight, mtp.norm.weight): not there" in (
        capsys.readouterr().err
    )


def test_unread_tensors_that_are_equal_on_both_sides_do_not_matter(
    models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory in (models.base, models.finetunes[0]):
        add(directory, "model.position_ids", torch.arange(9)[None])
        add(directory, "model.layers.0.self_attn.k_scale", torch.tensor(1.0))
    result = compressed(models, tmp_path / "delta")
    assert not {"model.position_ids", "model.layers.0.self_attn.k_scale"} & result.manifest.tensors.keys()
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "what", "way_out"),
    [
        (
            "model.layers.0.self_attn.q_proj.lora_A.default.weight",
            "an adapter that was not merged",
            "merge_and_unload",
        ),
        ("lm_head.modules_to_save.default.weight", "an adapter that was not merged", "merge_and_unload"),
        ("model.layers.0.mlp.up_proj.qweight", "quantised weights", "save the model in bfloat16"),
        ("model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4", "quantised weights", "bfloat16"),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "quantised weights", "save the model in bfloat16"),
        ("score.weight", "the head of a classifier or reward model", "give a language model"),
        ("model._flat_param", "flat parameters of FSDP", "gather the full state dict"),
    ],
)
def test_what_is_no_model_of_its_own_is_refused_by_what_it_is(
    name: str, what: str, way_out: str, models: TinyModels
) -> None:
    add(models.finetunes[0], name)
    message = refused(models)
    assert f"it holds {what} ({name})" in message
    assert way_out in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda each: rewrite(each, lambda tensors: tensors.pop(UP)),
            f"a model with '{UP}', which is in none",
        ),
        (
            lambda each: rewrite(each, lambda tensors: tensors.pop("model.norm.weight")),
            "'model.norm.weight', which",
        ),
        (
            lambda each: rewrite(each, lambda tensors: tensors.update({UP: torch.zeros(0)})),
            f"'{UP}' is empty, as DeepSpeed's ZeRO-3",
        ),
        (
            lambda each: rewrite_config(each, num_hidden_layers=3),
            "with 'model.layers.2.self_attn.q_proj.weight', which",
        ),
        (
            lambda each: rewrite_config(each, vocab_size=300),
            "'lm_head.weight' has shape (259, 64), and the model that",
        ),
        (
            lambda each: rewrite_config(each, num_key_value_heads=4),
            "has shape (32, 64), and the model that its config",
        ),
        (
            lambda each: rewrite_config(each, num_key_value_heads=4, pad_token_id=300),
            "has shape (32, 64), and the model that its config",
        ),
        (
            lambda each: rewrite_config(each, num_key_value_heads=4, attn_implementation="flash_attention_2"),
            "has shape (32, 64), and the model that its config",
        ),
        (lambda each: rewrite_config(each, attention_bias=True), "self_attn.q_proj.bias', which is in none"),
        (
            lambda each: rename(each, lambda name: f"pretrained_model.{name}"),
            "', which is in none of its shards",
        ),
    ],
    ids=["matrix", "norm", "empty", "layers", "vocabulary", "heads", "pad", "attention", "biases", "names"],
)
def test_a_base_that_transformers_would_load_in_part_is_refused(
    change: Callable[[Path], object], says: str, models: TinyModels
) -> None:
    """Both sides are of one form, so that nothing differs in their names and configurations."""
    for directory in (models.base, models.finetunes[0]):
        change(directory)
    assert says in refused(models)


@pytest.mark.parametrize("side", ["base", "finetune-0"])
def test_a_tensor_that_zero_3_left_empty_is_named(side: str, models: TinyModels) -> None:
    rewrite(models.base.parent / side, lambda tensors: tensors.update({UP: torch.zeros(0)}))
    assert f"'{UP}' is empty, as DeepSpeed's ZeRO-3" in refused(models)


def test_a_part_of_a_model_is_named(models: TinyModels) -> None:
    rewrite(
        models.finetunes[0],
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name],
    )
    assert (
        "9 of the base's 21 tensors are not there, as if one of several processes had saved its part"
        in refused(models)
    )


def test_a_model_left_from_another_save_is_named(
    models: TinyModels, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune = models.finetunes[0]
    shutil.copy(finetune / SINGLE, finetune / "model-00001-of-00001.safetensors")
    (finetune / INDEX_FILE).write_text(json.dumps({"weight_map": {UP: "model-00001-of-00001.safetensors"}}))
    compressed(models, models.base.parent / "delta")
    assert (
        "model-00001-of-00001.safetensors beside it is not: one of the two is left" in capsys.readouterr().err
    )
    (models.base.parent / "delta").unlink()
    rewrite(finetune, lambda tensors: tensors.pop(UP))
    assert f"holds {SINGLE}, which is read, and {INDEX_FILE}: one of the two is left" in refused(models)


@pytest.mark.parametrize("name", [EMBEDDING, UP, "lm_head.weight", "model.norm.weight"])
@pytest.mark.parametrize("sides", [("base",), ("finetune-0",), ("base", "finetune-0")], ids="-".join)
def test_a_tensor_without_dimensions_is_refused_in_one_line(
    name: str, sides: tuple[str, ...], models: TinyModels, tmp_path: Path
) -> None:
    for side in sides:
        rewrite(models.base.parent / side, lambda tensors: tensors.update({name: torch.tensor(1.0)}))
    settings = FitSettings(Calibration(samples=16, length=12))
    with pytest.raises(CheckpointError) as caught:
        compress(
            CompressConfig(str(models.base), str(models.finetunes[0]), tmp_path / "d", fit_settings=settings)
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "auto"},
        {"hidden_act": "nothing"},
        {"model_type": ["llama"]},
        {"num_attention_heads": 0},
        {"rope_parameters": {"rope_type": "unheard-of", "rope_theta": 1.0}},
        {"attn_implementation": 3, "_attn_implementation": "unheard-of"},
        {"num_hidden_layers": "two"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "fit_settings", [None, FitSettings(Calibration(samples=16, length=12))], ids=["none", "self"]
)
def test_what_transformers_cannot_take_is_one_line(
    values: dict[str, object], fit_settings: FitSettings | None, models: TinyModels, tmp_path: Path
) -> None:
    for directory in (models.base, models.finetunes[0]):
        rewrite_config(directory, **values)
    config = CompressConfig(
        str(models.base), str(models.finetunes[0]), tmp_path / "delta", fit_settings=fit_settings
    )
    # Some are taken where no model is run; no other error may come.
    with suppress(CheckpointError):
        compress(config)


def test_a_lone_surrogate_in_text_is_one_line(models: TinyModels, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "\\ud83d"}\n' * 64)
    settings = FitSettings(Calibration(str(text), samples=16, length=12))
    with pytest.raises(
        Exception, match=r"text.jsonl: line 1: the fine-tune's tokenizer cannot encode it"
    ) as caught:
        compress(
            CompressConfig(str(models.base), str(models.finetunes[0]), tmp_path / "d", fit_settings=settings)
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fine_tune_of_another_base_is_refused(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    one = make_pair(architecture, tmp_path / "one", seed=1, dtype=dtype)
    other = make_pair(architecture, tmp_path / "other", seed=2, dtype=dtype)
    config = CompressConfig(str(other.base), str(one.finetunes[0]), tmp_path / "delta")
    with pytest.raises(
        CheckpointError, match=r"matrices differ from those of .* as two independent models do"
    ) as caught:
        compress(config)
    assert "`any_base=True`" in str(caught.value)
    assert not config.out.exists()
    compress(CompressConfig(config.base, config.finetune, config.out, any_base=True))


def test_one_shard_of_another_model_is_refused_and_one_new_layer_is_not(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, num_hidden_layers=6)
    drawn = torch.Generator().manual_seed(3)

    def draw_again(parts: tuple[str, ...]) -> Callable[[dict[str, Tensor]], None]:
        def change(tensors: dict[str, Tensor]) -> None:
            for name, tensor in tensors.items():
                if any(part in name for part in parts) and tensor.dim() == 2:
                    tensors[name] = 0.2 * torch.randn(tensor.shape, generator=drawn)

        return change

    rewrite(models.finetunes[0], draw_again(("layers.5.mlp.", "lm_head", "embed_tokens")))
    compressed(models, tmp_path / "delta")
    (tmp_path / "delta").unlink()
    rewrite(models.finetunes[0], draw_again(("layers.4.",)))
    assert "10 of 42 matrices differ" in refused(TinyModels(models.base, models.finetunes))


@pytest.mark.parametrize("architecture", ["gpt_oss", "granitemoe"])
@pytest.mark.parametrize("num_experts", [1, 4])
def test_experts_of_another_model_are_refused_and_one_new_expert_is_not(
    architecture: str, num_experts: int, tmp_path: Path
) -> None:
    models = make_pair(architecture, tmp_path)
    drawn = torch.Generator().manual_seed(3)

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dim() == 3:
                tensors[name] = tensor.clone()
                tensors[name][:num_experts] = 0.2 * torch.randn(tensor[:num_experts].shape, generator=drawn)

    rewrite(models.finetunes[0], change)
    if num_experts == 1:
        compressed(models, tmp_path / "delta")
    else:
        assert "matrices differ from those of" in refused(models)


def test_a_fine_tune_that_grew_or_shrank_is_not_another_model(models: TinyModels, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for part, factor in (("up_proj", 1e-3), ("down_proj", 0.0), ("q_proj", 30.0), ("o_proj", 0.0)):
            for name in tensors:
                if part in name:
                    tensors[name].mul_(factor)

    rewrite(models.finetunes[0], change)
    compressed(models, tmp_path / "delta")


CARD = "---\nlicense: mit\nbase_model:\n- some/{name}\n---\n# base_model: other\n"


@pytest.mark.parametrize("name", ["finetune-0", "Finetune-0"])
def test_swapped_arguments_are_noticed_by_the_model_card(name: str, models: TinyModels) -> None:
    (models.base / "README.md").write_text(CARD.format(name=name))
    assert f"it was tuned from 'some/{name}'" in refused(models)
    assert "swap `base` and `finetune`" in refused(models)


def test_swapped_arguments_are_noticed_by_a_path_in_the_configuration(models: TinyModels) -> None:
    rewrite_config(models.base, _name_or_path=str(models.finetunes[0]))
    assert "swap `base` and `finetune`" in refused(models)


def test_an_adapter_in_the_base_s_place_is_named_with_its_own_base(
    models: TinyModels, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/model"}))
    swapped = TinyModels(adapter, models.finetunes)
    assert (
        "an adapter of peft ('adapter_config.json', trained on 'some/model'): it is a fine-tune"
        in refused(swapped)
    )
    document = {"base_model_name_or_path": str(models.finetunes[0])}
    (adapter / "adapter_config.json").write_text(json.dumps(document))
    assert "swap `base` and `finetune`" in refused(swapped)


@pytest.mark.parametrize(
    "card",
    [
        "",
        "---\nbase_model: [\n---\n",
        "---\n- a\n---\n",
        "---\nbase_model: 5\n---\n",
        "---\nbase_model: other/model\n---\n",
        "---\nbase_model: &a [*a]\n---\n",
        "\xff\udcff",
    ],
    ids=str,
)
def test_a_card_that_says_nothing_of_the_pair_changes_nothing(
    card: str, models: TinyModels, tmp_path: Path
) -> None:
    (models.base / "README.md").write_bytes(card.encode("utf-8", "surrogateescape"))
    compressed(models, tmp_path / "delta")


def test_two_cards_that_name_each_other_decide_nothing(models: TinyModels, tmp_path: Path) -> None:
    (models.base / "README.md").write_text(CARD.format(name="finetune-0"))
    (models.finetunes[0] / "README.md").write_text(CARD.format(name="base"))
    compressed(models, tmp_path / "delta")
