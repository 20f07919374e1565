"""Two configurations differ where the model that transformers makes of them differs."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.activations import ACT2FN

from deltastore.architecture import (
    ALIASES,
    POSITIONS,
    architecture,
    differences,
    different_facts,
    read_by_model,
)
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError
from tests.helpers.tiny_models import ARCHITECTURES, MORE_SERVED, make_base, shrunk, tiny_config

TOKENS = torch.arange(12)[None] * 37 % 250
FAMILIES = (*ARCHITECTURES, *MORE_SERVED)
# Windows are shorter than TOKENS, and every kind of layer is there.
SMALLER: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "gemma3_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
# They have rules of their own: names and rows of tensors, the longest context, and the form of outputs.
OTHER_RULES = {"vocab_size", "tie_word_embeddings", "model_type", "return_dict", POSITIONS}
# Fields of every configuration, which one family tries for all.
COMMON = {field.name for field in fields(PreTrainedConfig)}
# Read, so compared, and without effect on these models all the same.
WITHOUT_EFFECT = {
    "gemma": {"use_bidirectional_attention"},
    "gemma2": {"use_bidirectional_attention"},
    "gemma3_text": {"attn_logit_softcapping"},
    "smollm3": {"use_sliding_window"},
}


def config_of(family: str, **values: Any) -> dict[str, Any]:
    given = {**tiny_config(family, **SMALLER.get(family, {})).to_dict(), **values}
    return dict(json.loads(json.dumps(given, default=str)))


def model_of(config: Mapping[str, Any]) -> Any:
    torch.manual_seed(0)
    parsed = AutoConfig.for_model(**copy.deepcopy(dict(config)))
    # Other functions leave soft caps out.
    model: Any = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def logits_of(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Tensor | None:
    """Return the logits of a configuration with the weights of another one; None if they do not fit."""
    try:
        model = model_of(config)
        model.load_state_dict(weights)
        logits: Tensor = model(TOKENS)[0]
        return logits
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def others(value: Any) -> list[Any]:
    """Return other values of a scalar field's type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value // 2 or value + 1]
    if isinstance(value, float):
        return [value * 1.5 + 0.01]
    if value is None:
        return [True, 1, 0.5]
    return ["relu"] if value in ACT2FN else [f"{value}x"]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_scalar_field_is_compared_exactly_where_it_changes_logits(family: str) -> None:
    config = config_of(family)
    model = model_of(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    weights = model.state_dict()
    expected = logits_of(config, weights)
    assert expected is not None
    wrong: dict[str, str] = {}
    for name, value in config.items():
        is_shared = name in COMMON and family != "llama"
        if name in OTHER_RULES or is_shared or isinstance(value, (dict, list)):
            continue
        for other in others(value):
            changed = {**config, name: other}
            try:
                refused, _ = differences(config, changed)
            except CheckpointError:
                continue
            logits = logits_of(changed, weights)
            has_effect = logits is None or not torch.equal(logits, expected)
            if has_effect is not bool(refused) and (has_effect or name not in WITHOUT_EFFECT.get(family, ())):
                wrong[f"{name}={other!r}"] = f"has effect: {has_effect}, refused: {refused}"
    assert not wrong


LLAMA = config_of("llama")
LENGTHS = (256, 512)


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_act": "swish"},
        {"tokenizer_class": "Own"},
        {"cache_implementation": "static"},
        {"gradient_checkpointing": True},
        {"use_flash_attn": True},
        {"attn_implementation": "flash_attention_2"},
        {"_attn_implementation": "flash_attention_2"},
        {"auto_map": {"AutoModelForCausalLM": "own.Model"}},
        {"attention_dropout": 0.1},
        {"initializer_range": 0.5},
        {"pad_token_id": None},
        {"pad_token_id": 100_000},
        {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"},
        {"rope_parameters": {**LLAMA["rope_parameters"], "factor": 4.0}},
        {"rope_parameters": None, "rope_theta": 10000.0},
        {POSITIONS: 1024},
    ],
    ids=str,
)
def test_what_no_logit_depends_on_is_no_difference(values: dict[str, Any]) -> None:
    assert differences(LLAMA, {**LLAMA, **values})[0] == []


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (
            {"rope_parameters": {**LLAMA["rope_parameters"], "rope_theta": 5e5}},
            ["rope_parameters.rope_theta"],
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            ["rope_parameters.rope_type"],
        ),
        ({"rms_norm_eps": 1e-4}, ["rms_norm_eps"]),
        ({"hidden_act": "gelu"}, ["hidden_act"]),
        ({"model_type": "mistral"}, ["model_type", "sliding_window"]),
        ({"num_hidden_layers": 3}, ["num_hidden_layers"]),
    ],
    ids=str,
)
def test_a_difference_is_named(values: dict[str, Any], names: list[str]) -> None:
    found = differences(LLAMA, {**LLAMA, **values})[0]
    assert found[:1] == names[:1]


def test_fields_that_another_one_switches_off_are_no_difference() -> None:
    config = config_of("qwen2", use_sliding_window=False)
    changed = {**config, "max_window_layers": 1, "sliding_window": 4}
    assert differences(config, changed) == ([], ["max_window_layers"])
    on = {
        **config,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "sliding_window": 4,
        "layer_types": None,
    }
    assert differences(config, on)[0] == ["layer_types"]


def test_a_field_that_nothing_reads_is_named_apart() -> None:
    assert differences(LLAMA, {**LLAMA, "own_field": 3, "mlp_bais": True}) == ([], ["mlp_bais", "own_field"])


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"head_dim": 32}, ["head_dim"]),
        ({"head_dim": None}, []),
        ({"head_dim": 16}, []),
        ({"is_causal": False}, ["is_causal"]),
        ({"is_causal": True}, []),
        ({"use_bidirectional_attention": False, "sliding_window": None}, []),
    ],
    ids=str,
)
def test_a_field_that_only_one_configuration_has_is_a_difference_where_code_reads_it(
    values: dict[str, Any], names: list[str]
) -> None:
    """The class has no such fields; code of the model asks for them and has values for a configuration without."""
    config = config_of("gpt_neox")
    assert not config.keys() & values.keys()
    for pair in ((config, {**config, **values}), ({**config, **values}, config)):
        assert differences(*pair)[0] == names


def test_a_configuration_without_a_model_type_is_a_difference() -> None:
    without = {name: value for name, value in LLAMA.items() if name != "model_type"}
    assert differences(LLAMA, without) == (["model_type"], [])


@pytest.mark.parametrize(
    ("rope", "is_refused"),
    [
        ({"rope_type": "default"}, False),
        ({"rope_type": "linear", "factor": 2.0}, False),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        (
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            False,
        ),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, False),
        ({"rope_type": "yarn", "factor": 4.0}, True),
        (
            {
                "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            },
            True,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_another_length_is_a_difference_only_where_rotations_depend_on_it(
    rope: dict[str, Any], is_refused: bool
) -> None:
    """The logits of lengths that do not differ are the same to the last bit."""
    configs = [
        config_of("llama", rope_parameters={**rope, "rope_theta": 1e4}, max_position_embeddings=length)
        for length in LENGTHS
    ]
    assert bool(differences(*configs)[0]) is is_refused
    assert [architecture(config)[POSITIONS] for config in configs] == [*LENGTHS]
    if not is_refused:
        weights = model_of(configs[0]).state_dict()
        first, second = (logits_of(config, weights) for config in configs)
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)


def test_the_text_part_of_a_wrapper_is_compared_field_by_field() -> None:
    text = {**tiny_config("gemma3_text").to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = json.loads(
        json.dumps(
            AutoConfig.for_model(
                "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=258
            ).to_dict(),
            default=str,
        )
    )

    def changed(**values: Any) -> dict[str, Any]:
        return {**config, "text_config": {**config["text_config"], **values}}

    assert differences(config, changed(rms_norm_eps=1e-3))[0] == ["text_config.rms_norm_eps"]
    assert differences(config, changed(attention_dropout=0.5, hidden_activation="gelu_new"))[0] == []
    assert differences(config, changed(max_position_embeddings=512)) == ([], [])
    assert architecture(changed(max_position_embeddings=512))[POSITIONS] == 512
    assert differences(config, changed(own=1)) == ([], ["text_config.own"])


def test_code_that_cannot_run_on_the_meta_device_is_read_instead() -> None:
    """Frequencies that are updated look at positions, whose values are not there."""
    config = config_of("gemma2", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    for name, value in (("final_logit_softcapping", 5.0), ("sliding_window", 3), ("rms_norm_eps", 1e-3)):
        assert differences(config, {**config, name: value})[0] == [name]
    assert differences(config, {**config, "own": 1}) == ([], ["own"])


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_of_an_activation_compute_the_same(alias: str) -> None:
    x = torch.linspace(-8, 8, 4001)
    assert torch.allclose(ACT2FN[alias](x), ACT2FN[ALIASES[alias]](x), atol=2e-6)


@pytest.mark.parametrize(
    "values",
    [{"num_hidden_layers": 10**9}, {"num_attention_heads": 3}, {"hidden_act": "own"}, {"head_dim": -3}],
)
def test_a_configuration_of_no_model_is_refused_at_once(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: "):
        read_by_model({**LLAMA, "head_dim": None, **values})


def test_a_configuration_of_several_text_models_is_refused() -> None:
    config = json.loads(json.dumps(CONFIG_MAPPING["musicgen"]().to_dict(), default=str))
    with pytest.raises(
        CheckpointError, match=r"^config\.json: transformers refuses it: ValueError: Multiple"
    ):
        read_by_model(config)


@pytest.mark.parametrize("infinity", [{"__float__": "Infinity"}, float("inf")])
def test_an_infinity_is_read_as_transformers_writes_and_wrote_it(infinity: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    shrunk("falcon_h1").save_pretrained(tmp_path)
    own = json.loads(path.read_text())
    assert own["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    make_base(shrunk("falcon_h1"), tmp_path)
    path.write_text(json.dumps({**own, "time_step_limit": [0.0, infinity]}))
    config = Checkpoint.open(tmp_path).config
    facts = architecture(config)
    assert facts["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    json.dumps(facts, allow_nan=False)
    assert differences(config, own) == ([], [])
    assert differences(config, {**own, "time_step_limit": [0.0, 1.0]})[0] == ["time_step_limit"]


def test_facts_of_an_older_artifact_are_compared_by_what_both_have() -> None:
    """They were all fields but a list of names."""
    old = {name: value for name, value in LLAMA.items() if "dropout" not in name and name != POSITIONS}
    assert different_facts(old, architecture(LLAMA)) == []
    assert different_facts({**old, "hidden_act": "swish"}, architecture(LLAMA)) == []
    assert different_facts({**old, "rms_norm_eps": 1.0}, architecture(LLAMA)) == ["rms_norm_eps"]


def test_models_that_transformers_does_not_know_are_compared_by_all_fields() -> None:
    own = {"model_type": "own", "depth": 3, "rope": {"kind": "a"}}
    assert differences(own, {**own, "hidden_dropout": 1, "vocab_size": 5, "more": 1}) == ([], [])
    assert differences(own, {**own, "rope": {"kind": "a", "beta": 1}}) == (["rope"], [])
