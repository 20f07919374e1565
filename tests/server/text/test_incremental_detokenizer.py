"""Stop strings and the end of a sequence in incrementally decoded text."""

from __future__ import annotations

from server.protocol.request import SamplingParams
from server.text.detokenizer import IncrementalDetokenizer, VisibleText, decode_new
from tests.helpers.tiny_models import make_tokenizer

TOKENIZER = make_tokenizer()


def take(detokenizer: IncrementalDetokenizer, text: str, is_last: bool = False) -> VisibleText:
    ids = TOKENIZER(text)["input_ids"]
    return detokenizer.take(decode_new(TOKENIZER.backend_tokenizer.decode, detokenizer.push(ids, is_last)))


def test_a_stop_string_ends_the_text_and_is_never_shown() -> None:
    visible = take(IncrementalDetokenizer(SamplingParams(stop=("END",))), "one END two", is_last=True)
    assert visible == VisibleText(("o", "n", "e", " ", "", "", ""), "", stopped=True)


def test_a_stop_string_is_found_across_calls() -> None:
    detokenizer = IncrementalDetokenizer(SamplingParams(stop=("END",)))
    assert take(detokenizer, "one E") == VisibleText(("o", "n", "e", " ", ""), "", stopped=False)
    assert take(detokenizer, "ND") == VisibleText(("", ""), "", stopped=True)
    assert take(detokenizer, "more", is_last=True) == VisibleText((), "", stopped=True)


def test_text_that_only_begins_a_stop_string_comes_with_the_last_token() -> None:
    visible = take(IncrementalDetokenizer(SamplingParams(stop=("END",))), "one EN", is_last=True)
    assert ("".join(visible.texts), visible.tail, visible.stopped) == ("one ", "EN", False)


def test_a_sequence_may_end_without_a_further_token() -> None:
    detokenizer = IncrementalDetokenizer(SamplingParams(stop=("END",)))
    assert take(detokenizer, "E").texts == ("",)
    assert take(detokenizer, "", is_last=True) == VisibleText((), "E", stopped=False)


def test_half_a_character_at_the_end_is_shown_as_by_transformers() -> None:
    detokenizer = IncrementalDetokenizer(SamplingParams())
    ids = TOKENIZER("a€")["input_ids"][:-1]
    new = decode_new(TOKENIZER.backend_tokenizer.decode, detokenizer.push(ids, is_last=True))
    visible = detokenizer.take(new)
    assert visible.texts == ("a", "", "")
    assert "a" + visible.tail == TOKENIZER.decode(ids)
