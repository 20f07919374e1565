"""An answer's text is what decoding it behind its prompt adds, as transformers decodes and stops, at every cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from server.protocol.request import SamplingParams
from server.text.detokenizer import IncrementalDetokenizer
from server.text.tokenizer import LoadedTokenizer
from tests.server.helpers.tokenizer_kinds import KINDS, llama

# Its annotations allow more types than it takes and returns here.
FAST: dict[str, Any] = {
    name: PreTrainedTokenizerFast(tokenizer_object=make(), clean_up_tokenization_spaces=False)
    for name, make in KINDS.items()
}
LOADED = {name: LoadedTokenizer(fast) for name, fast in FAST.items()}
# Those of language models, whose tokens hold any text.
ANY_TEXT = ("byte level", "llama", "gemma", "mistral")
PARTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=4),
    st.sampled_from(["<end>", "<plain>", "[INST]", " ", "  ", "the", " the", " 4", "4", "é", "漢字", " 🙂"]),
)
TEXTS = st.lists(PARTS, max_size=6)
CUTS = st.lists(st.integers(1, 4), max_size=20)


def ids_of(kind: str, parts: list[str]) -> list[int]:
    """Return tokens of parts, each of which begins as a text of its own or as one behind another."""
    return [token for part in parts for token in FAST[kind](part, add_special_tokens=False)["input_ids"]]


def answered(
    loaded: LoadedTokenizer,
    prompt: list[int],
    answer: list[int],
    cuts: list[int] | None = None,
    is_echoed: bool = False,
    **params: Any,
) -> tuple[str, int]:
    """Return the text of an answer, whose tokens come in groups of the sizes `cuts` and then one by one, and theirs."""
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in params.items()
    }
    detokenizer = IncrementalDetokenizer(SamplingParams(**given), prompt, is_echoed)
    text, num_tokens, sizes = "", 0, iter(cuts or [])
    while True:
        size = next(sizes, 1)
        group, answer = answer[:size], answer[size:]
        (new,) = loaded.decode_streams([detokenizer.push(group, is_last=not answer)])
        visible = detokenizer.take(new)
        text += "".join(visible.texts) + visible.tail
        num_tokens += len(visible.texts)
        if visible.stopped or not answer:
            return text, num_tokens


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(before=TEXTS, behind=TEXTS, cuts=CUTS)
def test_an_answer_is_what_decoding_it_behind_its_prompt_adds(
    kind: str, skip: bool, before: list[str], behind: list[str], cuts: list[int]
) -> None:
    prompt, answer = ids_of(kind, before), ids_of(kind, behind)
    shown = FAST[kind].decode(prompt, skip_special_tokens=skip)
    whole = FAST[kind].decode(prompt + answer, skip_special_tokens=skip)
    assert whole.startswith(shown)
    text, _ = answered(LOADED[kind], prompt, answer, cuts, skip_special_tokens=skip)
    assert text == whole[len(shown) :]


@pytest.mark.parametrize("kind", ANY_TEXT)
@settings(max_examples=30, deadline=None)
@given(parts=TEXTS)
def test_an_echo_and_its_answer_are_the_whole_wherever_the_prompt_ends(kind: str, parts: list[str]) -> None:
    ids, loaded = ids_of(kind, parts), LOADED[kind]
    whole = loaded.decode(ids)
    for number in range(len(ids) + 1):
        prompt, answer = ids[:number], ids[number:]
        echo = loaded.decode_prompt(prompt, skip_special_tokens=True)
        assert echo + answered(loaded, prompt, answer, is_echoed=True)[0] == whole


@pytest.mark.parametrize("kind", ANY_TEXT)
def test_a_character_that_a_prompt_ends_within_is_shown_once(kind: str) -> None:
    *prompt, last = ids_of(kind, ["a é"])
    assert answered(LOADED[kind], prompt, [last])[0] == "é"
    # One that stays incomplete was shown with the prompt.
    other = [FAST[kind].convert_tokens_to_ids("e")]
    assert answered(LOADED[kind], prompt, other)[0] == "e"
    literal = ids_of(kind, ["a\ufffd"])
    assert answered(LOADED[kind], literal, other)[0] == "e"


@pytest.mark.parametrize("kind", ["llama", "gemma", "mistral"])
def test_a_wrong_byte_takes_no_character_before_it(kind: str) -> None:
    character, (wrong, letter) = ids_of(kind, ["a漢"])[-3:], FAST[kind].convert_tokens_to_ids(["<0xE6>", "e"])
    answer = [*character, wrong, letter, *character]
    assert answered(LOADED[kind], ids_of(kind, ["a"]), answer)[0] == "漢\ufffde漢"


class Scripted:
    """A logits processor with which a model writes given tokens."""

    def __init__(self, num_prompt: int, answer: list[int]) -> None:
        self._num_prompt = num_prompt
        self._answer = answer

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = torch.full_like(scores, -torch.inf)
        scores[:, self._answer[input_ids.shape[1] - self._num_prompt]] = 0
        return scores


def generated(kind: str, prompt: list[int], answer: list[int], stop: list[str]) -> list[int]:
    """Return the tokens with which `generate()` writes the answer up to a stop string."""
    fast = FAST[kind]
    model = MODELS.setdefault(kind, _model(len(fast)))
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=len(answer),
        do_sample=False,
        logits_processor=[Scripted(len(prompt), answer)],
        stop_strings=stop,
        tokenizer=fast,
    )
    return [int(token) for token in made[0, len(prompt) :]]


MODELS: dict[str, Any] = {}


def _model(vocab_size: int) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = LlamaConfig(vocab_size=vocab_size, eos_token_id=None, bos_token_id=None, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ANY_TEXT)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_answer_stops_where_generate_stops(kind: str, data: st.DataObject) -> None:
    parts = st.sampled_from(["<end>", "the", " the", "th", " ", "e", "é", "漢字", "4", " 4"])
    prompt = ids_of(kind, data.draw(st.lists(parts, min_size=1, max_size=3)))
    answer = ids_of(kind, data.draw(st.lists(parts, min_size=1, max_size=6)))
    whole = FAST[kind].decode(prompt + answer)
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = [whole[start : start + data.draw(st.integers(1, 8))], data.draw(st.sampled_from(["<end>", "zz"]))]
    wanted = generated(kind, prompt, answer, stop)
    params: dict[str, Any] = {"stop": stop, "stops_begin_in_prompt": True, "skip_special_tokens": False}
    text, num_tokens = answered(LOADED[kind], prompt, answer, **params)
    assert num_tokens == len(wanted)
    added = FAST[kind].decode(prompt + wanted)[len(FAST[kind].decode(prompt)) :]
    assert added.startswith(text)
    hidden, num_tokens = answered(LOADED[kind], prompt, answer, **{**params, "skip_special_tokens": True})
    assert num_tokens == len(wanted)
    assert hidden.replace("<end>", "") in text.replace("<end>", "")


def test_a_stop_string_may_begin_with_the_space_of_a_prompt_that_no_text_shows() -> None:
    prompt, (space, *_) = ids_of("llama", [" "]), ids_of("llama", [" the"])
    assert generated("llama", prompt, [space, space], ["   "]) == [space]
    assert answered(LOADED["llama"], prompt, [space, space], stop=["   "], stops_begin_in_prompt=True) == (
        "",
        1,
    )


@pytest.mark.parametrize("kind", ANY_TEXT)
def test_a_special_token_ends_an_answer_and_is_in_it_nowhere(kind: str) -> None:
    prompt, answer = ids_of(kind, ["a"]), ids_of(kind, ["b<end>", "c"])
    for cuts in ([1], [9]):
        text, _ = answered(LOADED[kind], prompt, answer, cuts, stop=["<end>"])
        assert text.strip() == "b"
        # Part of the stop string was shown as text.
        assert answered(LOADED[kind], prompt, answer, cuts, stop=["b<en"])[0].strip() == ""
    # A stop string that spans it is none of the shown text.
    assert "c" in answered(LOADED[kind], prompt, answer, stop=["bc"])[0]


def test_the_end_token_is_shown_with_the_stop_string_on_request() -> None:
    prompt, answer = ids_of("llama", ["a"]), ids_of("llama", ["b<end>"])
    end = frozenset(answer[-1:])
    given: dict[str, Any] = {"stop_token_ids": end, "skip_special_tokens": False}
    loaded = LOADED["llama"]
    assert answered(loaded, prompt, answer, **given)[0] == " b"
    assert answered(loaded, prompt, answer, **given, include_stop_str_in_output=True)[0] == " b<end>"
    assert answered(loaded, prompt, answer, stop_token_ids=end, include_stop_str_in_output=True)[0] == " b"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(parts=TEXTS)
def test_the_own_texts_of_tokens_are_the_text_of_all(kind: str, parts: list[str]) -> None:
    ids, loaded = ids_of(kind, parts), LOADED[kind]
    own = [*loaded.token_texts(ids[:1], begins=True), *loaded.token_texts(ids[1:])]
    assert b"".join(each.encoded for each in own).decode() == FAST[kind].decode(ids)
    if all(each.raw is None for each in own):
        assert "".join(each.text for each in own) == FAST[kind].decode(ids)


@pytest.mark.parametrize("kind", ANY_TEXT)
def test_tokens_have_texts_of_their_own(kind: str) -> None:
    ids = sorted({token for text in ("a 4", "4", "ü", "<end>") for token in ids_of(kind, [text])})
    own = {each.text: each.encoded for each in LOADED[kind].token_texts(ids)}
    assert len(own) == len(ids)
    assert own["<end>"] == b"<end>"
    assert (own["\\xc3"], own["\\xbc"]) == (b"\xc3", b"\xbc")


def test_a_leading_space_belongs_to_its_token_unless_the_text_begins_there() -> None:
    (four,) = (
        token for token, text in enumerate(LOADED["llama"].token_strings(list(range(400)))) if text == "▁t"
    )
    loaded = LOADED["llama"]
    assert [each.text for each in loaded.token_texts([four])] == [" t"]
    assert [each.text for each in loaded.token_texts([four], begins=True)] == ["t"]


def cleaning(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.decoder = None
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)


def any_pieces() -> Tokenizer:
    """Make a tokenizer of pieces that transformers' clean-up joins, in many ways."""
    pieces = [
        "[UNK]",
        "a",
        "n",
        "t",
        "'",
        ".",
        ",",
        "?",
        "!",
        "s",
        "m",
        "ve",
        "v",
        "e",
        "re",
        "r",
        "n't",
        "' ",
        " '",
    ]
    tokenizer = Tokenizer(
        models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_spaces_that_transformers_cleans_up_are_never_shown(data: st.DataObject) -> None:
    fast = cleaning(any_pieces())
    ids = data.draw(st.lists(st.integers(1, len(fast) - 1), max_size=12))
    assert answered(LoadedTokenizer(fast), [], ids)[0] == fast.decode(ids)


def test_of_a_bpe_no_spaces_are_cleaned_up() -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=llama(), clean_up_tokenization_spaces=True)
    ids = fast("a . b")["input_ids"]
    assert answered(LoadedTokenizer(fast), [], ids)[0] == fast.decode(ids) == "a . b"
    (new,) = LoadedTokenizer(fast).decode_streams([IncrementalDetokenizer(SamplingParams()).push(ids[:3])])
    assert "".join(new.texts) == "a "
