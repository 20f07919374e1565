"""A loaded tokenizer: templates by name, the bound on characters, and texts as transformers makes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from deltastore.errors import ArtifactError
from server.errors import InvalidRequest
from server.text.chat_template import Conversation
from server.text.tokenizer import LoadedTokenizer
from tests.helpers.tiny_models import make_tokenizer
from tests.server.helpers.tokenizer_kinds import KINDS, word_piece

CONVERSATION = Conversation([{"role": "user", "content": "hi"}])


def test_of_several_templates_the_default_one_renders() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"tool_use": "no", "default": "{{ bos_token }}yes"}
    loaded = LoadedTokenizer(tokenizer)
    texts = loaded.token_texts(loaded.render_chat(CONVERSATION, 10).ids)
    assert [each.text for each in texts] == ["<s>", "y", "e", "s"]


def test_without_a_template_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        LoadedTokenizer(make_tokenizer()).render_chat(CONVERSATION, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_transformers(kind: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind]())
    ids = tokenizer("the cat, at the mat <end>")["input_ids"]
    assert LoadedTokenizer(tokenizer).decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_tokenizer_that_cleans_up_spaces_does_so_here() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_piece(), clean_up_tokenization_spaces=True)
    tokenizer.backend_tokenizer.decoder = None
    ids = tokenizer("the , the")["input_ids"]
    assert LoadedTokenizer(tokenizer).decode(ids) == tokenizer.decode(ids) == "the, the"


def test_a_normalizer_that_shrinks_text_widens_the_bound_on_characters() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("....", ".")
    assert len(LoadedTokenizer(tokenizer).encode("." * 1600, 400, True, "prompt")) == 400
    with pytest.raises(InvalidRequest, match="which are more than 400 tokens"):
        LoadedTokenizer(tokenizer).encode("." * 100_000, 400, True, "prompt")


def test_special_tokens_are_shown_on_request() -> None:
    loaded = LoadedTokenizer(make_tokenizer())
    ids = loaded.encode("a</s>", 10, True, "prompt")
    assert (loaded.decode(ids), loaded.decode(ids, skip_special_tokens=False)) == ("a", "a</s>")
    assert loaded.token_strings([*ids, 9999]) == ["a", "</s>", ""]


def test_a_vocabulary_of_absurdly_long_tokens_is_not_decoded() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["a" * 200_000])
    loaded, ids = LoadedTokenizer(tokenizer), [len(tokenizer) - 1]
    for decode in (loaded.decode, loaded.token_texts, loaded.token_strings):
        with pytest.raises(ArtifactError, match="200000 characters of 1 tokens"):
            decode(ids)


def test_files_without_a_fast_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(ArtifactError, match="it: its tokenizer cannot be loaded"):
        LoadedTokenizer.load(tmp_path, "it")
