"""Text of tokens as they come equals the text of the whole, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from deltastore.errors import ArtifactError
from server.text.detokenizer import MAX_WINDOW, Decode, NewTokens, Window, decode_new
from server.text.tokenizer import LoadedTokenizer
from tests.server.helpers.tokenizer_kinds import KINDS, TEXT, byte_level, llama

TOKENIZERS = {name: make() for name, make in KINDS.items()}
LOADED = {
    name: LoadedTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    for name, tokenizer in TOKENIZERS.items()
}
# Any text, and parts that tokenizers treat in their own ways.
PARTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["<end>", "<plain>", " ", "  ", "the", " the", ",", "é", "漢", "🙂", *TEXT.split()]),
)
PROMPTS = st.lists(PARTS, max_size=12).map("".join)
CUTS = st.lists(st.integers(1, 5), max_size=40)


def decode_of(tokenizer: Tokenizer) -> Decode:
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


def streamed(decode: Decode, ids: list[int], cuts: list[int] | None = None) -> list[str]:
    """Return the text of each token and the tail; tokens come in groups of the sizes `cuts`, then one by one."""
    window, texts, sizes = Window(), list[str](), iter(cuts or [])
    while ids:
        size = next(sizes, 1)
        group, ids = ids[:size], ids[size:]
        new = decode_new(decode, NewTokens(window, tuple(group), is_last=not ids))
        assert len(new.texts) == len(group)
        window = new.window
        assert len(window.ids) <= MAX_WINDOW
        texts += [*new.texts, *([new.tail] if not ids else [])]
    return texts


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=PROMPTS, cuts=CUTS)
def test_the_texts_of_all_tokens_are_the_text_of_the_whole(kind: str, text: str, cuts: list[int]) -> None:
    loaded = LOADED[kind]
    ids = TOKENIZERS[kind].encode(text).ids
    whole = loaded.decode(ids)
    assert whole == PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[kind]).decode(
        ids, skip_special_tokens=True
    )
    assert "".join(streamed(loaded.decode, ids, cuts)) == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=PROMPTS)
def test_tokens_become_visible_as_in_the_decode_stream_of_tokenizers(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = [token for token in tokenizer.encode(text).ids if "\ufffd" not in tokenizer.decode([token])]
    stream = DecodeStream(skip_special_tokens=True)
    wanted = [stream.step(tokenizer, token) or "" for token in ids]
    assert streamed(decode_of(tokenizer), ids)[: len(ids)] == wanted


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_bytes_are_the_text_of_the_whole(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=200))
    decode = decode_of(tokenizer)
    assert "".join(streamed(decode, ids)) == decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_tokens_fail_nowhere(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    # Rows of an embedding without a token are sampled, too.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=150))
    streamed(decode_of(tokenizer), ids)


@pytest.mark.parametrize(("make", "last"), [(byte_level, "€"), (llama, "€")])
def test_an_incomplete_character_is_held_back_until_the_end(make: Callable[[], Tokenizer], last: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode("a" + last).ids
    decode = decode_of(tokenizer)
    assert "".join(streamed(decode, ids)[:-2]) == "a"
    assert streamed(decode, ids)[-2:] == [last, ""]
    cut = ids[:-1]
    assert "".join(streamed(decode, cut)) == decode(cut)
    assert "\ufffd" not in "".join(streamed(decode, cut)[:-1])


@pytest.mark.parametrize("token", ["special", "half"])
def test_a_window_of_tokens_without_text_does_not_grow(token: str) -> None:
    tokenizer = byte_level()
    alphabet = tokenizer.get_vocab()
    token_id = alphabet["<end>"] if token == "special" else alphabet["Ã"]
    sizes: list[int] = []

    def measured(ids: list[int]) -> str:
        sizes.append(len(ids))
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    ids = [*tokenizer.encode("a").ids, *[token_id] * 1000, *tokenizer.encode("b").ids]
    whole = decode_of(tokenizer)(ids)
    assert "".join(streamed(measured, ids)) == whole
    assert max(sizes) <= MAX_WINDOW + 1


def test_a_decoder_that_makes_too_much_text_is_an_error_of_the_artifact() -> None:
    def long(ids: list[int]) -> Any:
        return "x" * 20_000 * len(ids)

    with pytest.raises(ArtifactError, match="80000 characters of 4 tokens"):
        decode_new(long, NewTokens(Window((1, 2, 3), 3, 60_000), (4,), is_last=False))
