"""Generation configs give a variant's end tokens and sampling defaults."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from deltastore.errors import ArtifactError
from server.protocol.rules import GenerationRules
from server.text.generation_config import (
    DEFAULTED,
    REFUSED,
    base_generation_config,
    eos_token_ids,
    parse_generation_config,
    read_generation,
    sampling_defaults,
)

# They are about beams, assistants, caches, speed, padding, encoders, and the form of what `generate()` returns.
WITHOUT_EFFECT = {
    "early_stopping", "length_penalty", "diversity_penalty", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size",
    "use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile", "continuous_batching_config",
    "low_memory", "prefill_chunk_size", "pad_token_id", "bos_token_id", "decoder_start_token_id",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "transformers_version",
    # Behind all else, so that no draw changes.
    "renormalize_logits",
}  # fmt: skip


def test_a_config_without_sampling_is_greedy() -> None:
    assert sampling_defaults({"top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1}) == {
        "repetition_penalty": 1.1,
        "temperature": 0.0,
    }
    assert sampling_defaults({"do_sample": True, "top_p": 0.9}) == {"top_p": 0.9, "top_k": 50}
    assert sampling_defaults({"do_sample": True, "top_k": 0}) == {"top_k": 0}


def test_integers_become_the_floats_that_transformers_demands() -> None:
    defaults = sampling_defaults({"do_sample": True, "temperature": 2, "repetition_penalty": 1, "top_k": 0})
    assert [type(defaults[name]) for name in ("temperature", "repetition_penalty")] == [float, float]


@pytest.mark.parametrize(("eos", "ids"), [(None, set()), (7, {7}), ([7, 8], {7, 8})])
def test_end_tokens_are_one_id_or_several(eos: object, ids: set[int]) -> None:
    config = parse_generation_config(json.dumps({"eos_token_id": eos}).encode(), "a file")
    assert eos_token_ids(config) == ids


@pytest.mark.parametrize(
    "document", ["{", "[]", "5", '{"do_sample": true, "temperature": -1}', '{"top_k": [1]}']
)
def test_a_config_that_cannot_be_used_is_named(document: str) -> None:
    with pytest.raises(ArtifactError, match="a file: "):
        parse_generation_config(document.encode(), "a file")


def test_a_base_without_a_generation_config_has_the_tokens_of_its_model_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "hidden_size": 8}')
    assert base_generation_config(tmp_path) == {"eos_token_id": 5}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert eos_token_ids(base_generation_config(tmp_path)) == {6, 7}


@pytest.mark.parametrize(
    "field",
    [
        {"num_beams": 2}, {"num_beam_groups": 2}, {"num_return_sequences": 2}, {"penalty_alpha": 0.6},
        {"guidance_scale": 1.5}, {"constraints": [1]}, {"force_words_ids": [[1]]}, {"dola_layers": "high"},
        {"watermarking_config": {"greenlist_ratio": 0.25}}, {"prompt_lookup_num_tokens": 3}, {"use_mtp": True},
        {"assistant_early_exit": 4}, {"assistant_ensemble_weight": 0.5}, {"speculation_type": "dflash"},
        {"is_assistant": True}, {"token_healing": True}, {"max_time": 2.5}, {"remove_invalid_values": True},
        {"cache_implementation": "quantized"},
        {"no_repeat_ngram_size": 33}, {"no_repeat_ngram_size": True}, {"encoder_no_repeat_ngram_size": -1},
        {"min_length": -1}, {"min_new_tokens": 1.5}, {"max_length": 0}, {"forced_bos_token_id": "1"},
        {"forced_eos_token_id": [-1]}, {"suppress_tokens": [0.5]}, {"begin_suppress_tokens": {"a": 1}},
        {"suppress_tokens": list(range(5000))}, {"bad_words_ids": [[1]] * 5000}, {"bad_words_ids": [[]]},
        {"bad_words_ids": [1]}, {"sequence_bias": [[[1], 1e300]]}, {"sequence_bias": [[[], 1.0]]},
        {"sequence_bias": [[[1], True]]}, {"sequence_bias": {"1": 2.0}}, {"encoder_repetition_penalty": 0},
        {"exponential_decay_length_penalty": [1, 1e9]}, {"exponential_decay_length_penalty": 5},
        {"top_h": 2.0}, {"typical_p": -0.1}, {"eta_cutoff": "x"}, {"stop_strings": [""]},
        {"stop_strings": ["a"] * 17}, {"stop_strings": "x" * 257},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_that_is_not_obeyed_is_refused_by_name(field: dict[str, object]) -> None:
    for document in (field, {"do_sample": True, **field}):
        with pytest.raises(ArtifactError) as caught:
            parse_generation_config(json.dumps(document).encode(), "a file")
        name = next(iter(field))
        assert name in str(caught.value) or "token ids, more than 4096" in str(caught.value)


def test_a_field_that_changes_no_token_is_accepted() -> None:
    neutral = {
        "num_beams": 1, "guidance_scale": 1.0, "use_cache": False, "cache_implementation": "static", "max_time": None,
        "length_penalty": 2.0, "early_stopping": True, "num_assistant_tokens": 5, "output_scores": True,
        "transformers_version": "4.40.0", "token_healing": False, "remove_invalid_values": False, "low_memory": True,
        "typical_p": 1.0, "epsilon_cutoff": 0.0, "suppress_tokens": [], "no_repeat_ngram_size": 0,
    }  # fmt: skip
    assert sampling_defaults(parse_generation_config(json.dumps(neutral).encode(), "a file")) == {
        "temperature": 0.0
    }


def test_every_field_of_transformers_is_obeyed_refused_or_known_to_change_no_token() -> None:
    """A new version of transformers may bring a field that `generate()` obeys and no list names."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    obeyed = {"eos_token_id", "do_sample", "max_length", "stop_strings", "cache_implementation", *DEFAULTED}
    obeyed |= {field.name for field in dataclasses.fields(GenerationRules)}
    assert fields - obeyed - REFUSED.keys() == WITHOUT_EFFECT


def test_rules_take_a_bounded_number_of_bytes_with_each_request() -> None:
    """Whatever the form of 4,096 ids: a request brings them to the engine, which keeps them as they are."""
    forms = [
        {"suppress_tokens": list(range(4096))},
        {"bad_words_ids": [[each] for each in range(4096)]},
        {"bad_words_ids": [list(range(4096))]},
        {"sequence_bias": [[[each, each], 1.0] for each in range(2048)]},
        # As many different lengths as there can be.
        {"bad_words_ids": [[0] * length for length in range(1, 90)]},
    ]
    sizes = [read_generation(json.dumps(form).encode(), "a file", 4096).num_bytes for form in forms]
    assert 4096 * 4 <= max(sizes) < 64 << 10


def test_token_ids_beyond_the_embedding_are_refused_where_transformers_needs_them() -> None:
    for field in ({"bad_words_ids": [[1, 9]]}, {"sequence_bias": [[[9], 1.0]]}, {"forced_bos_token_id": 9}):
        raw = json.dumps(field).encode()
        assert "rules" in read_generation(raw, "a file", 10).defaults
        with pytest.raises(ArtifactError, match=r"a file: .* holds the token id 9, not below 9"):
            read_generation(raw, "a file", 9)
    assert "rules" in read_generation(b'{"suppress_tokens": [9]}', "a file", 9).defaults
