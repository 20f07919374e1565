"""Incremental decoding and stop strings of one sequence."""

from __future__ import annotations

from server.text.detokenizer import Detokenizer
from tests.helpers.tiny_models import make_tokenizer


def test_streamed_text_is_the_whole_text_for_any_cut_of_characters() -> None:
    tokenizer = make_tokenizer()
    text = "aé€𝄞 ü!"
    ids = tokenizer(text)["input_ids"]
    detokenizer = Detokenizer(tokenizer, stop=())
    pieces = [detokenizer.push(token)[0] for token in ids]
    assert "".join(pieces) + detokenizer.flush() == text
    assert "�" not in "".join(pieces)


def test_half_a_character_at_the_end_is_decoded_as_by_transformers() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("a€")["input_ids"][:-1]
    detokenizer = Detokenizer(tokenizer, stop=())
    assert "".join(detokenizer.push(token)[0] for token in ids) + detokenizer.flush() == tokenizer.decode(ids)


def test_a_stop_string_ends_the_text_and_is_never_shown() -> None:
    tokenizer = make_tokenizer()
    detokenizer = Detokenizer(tokenizer, stop=("END",))
    pushed = [detokenizer.push(token) for token in tokenizer("one END")["input_ids"]]
    assert "".join(text for text, _ in pushed) == "one "
    assert [stopped for _, stopped in pushed] == [False] * (len(pushed) - 1) + [True]
    assert detokenizer.flush() == ""


def test_text_that_only_begins_a_stop_string_is_flushed() -> None:
    tokenizer = make_tokenizer()
    detokenizer = Detokenizer(tokenizer, stop=("END",))
    pushed = [detokenizer.push(token) for token in tokenizer("one EN")["input_ids"]]
    assert "".join(text for text, _ in pushed) == "one "
    assert detokenizer.flush() == "EN"
