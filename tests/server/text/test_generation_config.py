"""Generation configs give a variant's end tokens and sampling defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltastore.errors import ArtifactError
from server.text.generation_config import (
    base_generation_config,
    eos_token_ids,
    parse_generation_config,
    sampling_defaults,
)


def test_a_config_without_sampling_is_greedy() -> None:
    assert sampling_defaults({"top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1}) == {
        "repetition_penalty": 1.1,
        "temperature": 0.0,
    }
    assert sampling_defaults({"do_sample": True, "top_p": 0.9}) == {"top_p": 0.9}


def test_integers_become_the_floats_that_transformers_demands() -> None:
    defaults = sampling_defaults({"do_sample": True, "temperature": 2, "repetition_penalty": 1})
    assert [type(value) for value in defaults.values()] == [float, float]


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
