"""Variants' tokenizers, templates and generation defaults; files that cannot be used are refused at upload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from deltastore.errors import ArtifactError
from deltastore.format.artifact import Artifact
from server.errors import InvalidRequest
from server.text.generation_config import sampling_defaults
from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, make_pair
from tests.server.helpers.served import Served, make_delta, serving


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    chat = Change(
        added_tokens=2, chat_template=CHAT_TEMPLATE, generation={"eos_token_id": 260, "do_sample": True}
    )
    make_pair("llama", directory, seed=5, changes=(Change(), chat))
    return directory


@pytest.fixture(scope="module")
def served(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(directory / "base", tmp_path_factory.mktemp("registry"), slot_headroom=4.0) as running:
        yield running


def delta_of(directory: Path, number: int, out: Path) -> Path:
    return make_delta(directory / "base", directory / f"finetune-{number}", out)


def edited(directory: Path, out: Path, filename: str, content: str) -> Path:
    """Make a delta of the chat fine-tune with one file replaced, without the compressor's check of tokenizers."""
    path = directory / "finetune-1" / filename
    before = path.read_text()
    path.write_text(content)
    try:
        with patch("compressor.io.side_files._check_tokenizer"):
            return delta_of(directory, 1, out)
    finally:
        path.write_text(before)


def test_a_variant_without_files_of_its_own_has_the_base_s_tokenizer(
    served: Served, directory: Path, tmp_path: Path
) -> None:
    tokenizer = served.tokenizers.of(served.publish(delta_of(directory, 0, tmp_path / "d"), "plain"))
    assert tokenizer.encode("abc") == served.tokenizers.of(None).encode("abc")
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_a_variant_brings_its_template_tokens_and_defaults(
    served: Served, directory: Path, tmp_path: Path
) -> None:
    tokenizer = served.tokenizers.of(served.publish(delta_of(directory, 1, tmp_path / "d"), "chat"))
    ids = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "<user>hi\n<assistant>"
    assert tokenizer.encode("<added-1>") == [260]
    assert tokenizer.eos_token_ids == {260}
    assert "temperature" not in tokenizer.generation_defaults


@pytest.mark.parametrize(
    ("filename", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("generation_config.json", '{"eos_token_id": "two"}'),
        ("generation_config.json", '{"do_sample": true, "temperature": -1}'),
        ("generation_config.json", '{"max_new_tokens": 2.5}'),
        ("generation_config.json", '{"do_sample": true, "top_k": true}'),
        ("generation_config.json", '{"repetition_penalty": "1"}'),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_publication(
    served: Served, directory: Path, tmp_path: Path, filename: str, content: str
) -> None:
    path = edited(directory, tmp_path / "d", filename, content)
    with Artifact.open(path) as artifact, pytest.raises(ArtifactError):
        served.tokenizers.check(artifact)


def test_a_config_that_does_not_sample_is_greedy() -> None:
    assert sampling_defaults({"top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1}) == {
        "repetition_penalty": 1.1,
        "temperature": 0.0,
    }
    assert sampling_defaults({"do_sample": True, "top_p": 0.9}) == {"top_p": 0.9}


def test_whole_numbers_become_the_floats_that_transformers_demands() -> None:
    defaults = sampling_defaults({"do_sample": True, "temperature": 2, "repetition_penalty": 1})
    assert [type(value) for value in defaults.values()] == [float, float]
