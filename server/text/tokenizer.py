"""A tokenizer of transformers in this process: encodes prompts, renders chat templates and decodes tokens.

The base's is loaded in the HTTP process. A variant's own is loaded in worker processes only, because its files may
abort the process or keep it busy without end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deltastore.errors import ArtifactError
from server.errors import ContextTooLong, InvalidRequest
from server.protocol.rules import BiasTable, ban_table
from server.text.answer_form import RenderedChat, render_prompt
from server.text.chat_template import DEFAULT, Conversation, choose
from server.text.detokenizer import (
    INCOMPLETE,
    Decode,
    NewText,
    NewTokens,
    complete_text,
    decode_new,
    num_incomplete,
    num_unclean,
)
from server.text.failures import failures_as
from server.text.generation_config import MAX_RULE_IDS

NO_TEMPLATE = (
    "there is no chat template here: publish the variant with a tokenizer that has one, "
    "or send a prompt to /v1/completions"
)
NO_BASE_TEMPLATE = (
    "the base has no chat template: ask a variant that has one, or send a prompt to /v1/completions; the operator can "
    "add a template to the base's tokenizer"
)


# A normalizer, an unknown token or a pre-tokenizer may make one token of more characters than its own text has. NFC
# composes three characters into one, and a word of a hundred may be unknown: eight times the longest token is generous.
SHRINKING_FACTOR = 8
MIN_LONGEST_TOKEN = 16
# A longer prompt is refused if its beginning alone has too many tokens.
PROBED_CHARS_PER_TOKEN = 8
# Text of some tokens; a real token has at most a few hundred characters.
MAX_CHARS, MAX_CHARS_PER_TOKEN = 1 << 16, 1 << 10
# Tokens by which the end of a beginning may differ from the same place in the whole text.
PROBE_SLACK = 64
# A text that tokens stand behind, for their own texts.
ANCHOR = "a"
# Tokens that are single bytes, and the characters of GPT-2's vocabularies, each of which is a byte.
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


class TokenText(Struct, frozen=True):
    """The own text of one token, as log-probabilities show it.

    Args:
        raw: the bytes of a token that is a part of a character. `text` has `\\x` before each that is no character.
    """

    text: str
    raw: bytes | None = None

    @property
    def encoded(self) -> bytes:
        return self.text.encode() if self.raw is None else self.raw


class LoadedTokenizer:
    """A fast tokenizer with its chat template.

    Args:
        tokenizer: the tokenizer, whose files may be a tenant's. Several variants may have the same files, so errors of
            its methods name none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._decode = _decoder(tokenizer, skip_special_tokens=True)
        self._decode_all = _decoder(tokenizer, skip_special_tokens=False)
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self._num_unsettled = num_unclean if _cleans_up(tokenizer) else num_incomplete
        self._longest_token: int | None = None

    @classmethod
    def load(cls, directory: Path, where: str) -> LoadedTokenizer:
        """Load the tokenizer files of a directory, which also needs the base's `config.json`.

        Args:
            where: the owner's name in the message of an error.

        Raises:
            ArtifactError: transformers cannot load them, or there is no `tokenizer.json`.
        """
        with failures_as(lambda reason: ArtifactError(f"{where}: its tokenizer cannot be loaded: {reason}")):
            tokenizer = AutoTokenizer.from_pretrained(
                directory, trust_remote_code=False, local_files_only=True
            )
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ArtifactError(
                f"{where}: it has no tokenizer.json: save the tokenizer in its fast form first"
            )
        return cls(tokenizer)

    @property
    def fast(self) -> PreTrainedTokenizerFast:
        """The tokenizer of transformers."""
        return self._tokenizer

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The description by which transformers parses an answer into content and tool calls; None if there is none."""
        template = getattr(self._tokenizer, "response_template", None)
        return template if isinstance(template, dict) else None

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The chat templates by name; a single one has the name ``default``."""
        templates = self._tokenizer.chat_template
        if not isinstance(templates, dict):
            templates = {DEFAULT: templates}
        return {name: source for name, source in templates.items() if isinstance(source, str)}

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """The variables of chat templates besides the messages: special tokens by name."""
        return {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}

    def encode(self, text: str, max_tokens: int, add_special_tokens: bool, param: str) -> list[int]:
        """Return the token ids of a text. A text that is far too long is refused before it is tokenized.

        Args:
            max_tokens: most tokens that the text may have.
            param: the request's field that the text comes from.

        Raises:
            InvalidRequest: the text has too many tokens, or the tokenizer refuses it.
        """
        if len(text) > max_tokens * MIN_LONGEST_TOKEN:
            self._refuse_long(text, max_tokens, param)
        if len(text) > 2 * max_tokens * PROBED_CHARS_PER_TOKEN:
            beginning = text[: max_tokens * PROBED_CHARS_PER_TOKEN]
            if len(self._ids(beginning, add_special_tokens, param)) > max_tokens + PROBE_SLACK:
                raise _too_long(text, max_tokens, param)
        ids = self._ids(text, add_special_tokens, param)
        if len(ids) > max_tokens:
            raise too_many_tokens(len(ids), max_tokens, param)
        return ids

    def banned(self, words: Sequence[str]) -> BiasTable:
        """Return the table of words that must not come, of each behind a space, behind other text, and as it is.

        Raises:
            InvalidRequest: they have too many tokens, or the tokenizer refuses one.
        """
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        found = dict.fromkeys(tuple(self._ids(text, False, "bad_words")) for text in texts)
        before, _ = self._anchor
        for word in words:
            # Where the tokenizer adds a space to the beginning of a text, this is the word without one.
            behind = self._ids(ANCHOR + word, False, "bad_words")
            if behind[: len(before)] == before:
                found[tuple(behind[len(before) :])] = None
        found.pop((), None)
        if sum(map(len, found)) > MAX_RULE_IDS:
            raise InvalidRequest(f"bad_words have more than {MAX_RULE_IDS} tokens: send fewer", "bad_words")
        return ban_table(found)

    @cached_property
    def special_tokens(self) -> Mapping[int, str]:
        """The texts of special tokens by id."""
        tokens = self._tokenizer.added_tokens_decoder.items()
        return {token_id: token.content for token_id, token in tokens if token.special}

    def render_chat(self, conversation: Conversation, max_tokens: int) -> RenderedChat:
        """Return the token ids of a conversation rendered by the chat template, and the form of its answer.

        Raises:
            InvalidRequest: there is no template, it refuses the messages, or makes too much text.
        """
        template = choose(self.chat_templates, conversation, NO_TEMPLATE)
        prompt = render_prompt(template, conversation, self.template_variables, self.response_template)
        ids = self.encode(prompt.text, max_tokens, conversation.add_special_tokens, "messages")
        return RenderedChat(ids, prompt.form.with_special(self.special_tokens))

    def token_texts(self, ids: list[int], begins: bool = False) -> list[TokenText]:
        """Return the own text of each token, also of special ones.

        Args:
            begins: as the text begins with it; otherwise as it stands behind other text.
        """
        with self._decoding():
            texts = [self._decode_all([each]) if begins else self._own_text(each) for each in ids]
            self._checked(texts, len(ids))
            return list(map(self._token_text, ids, texts))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        with self._decoding():
            return self._checked([self._decoder(skip_special_tokens)(ids)], len(ids))[0]

    def decode_prompt(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of a prompt without an incomplete character at its end, which its answer shows."""
        with self._decoding():
            left_out = self._special_ids if skip_special_tokens else ()
            decode, shown = self._decoder(skip_special_tokens), [each for each in ids if each not in left_out]
            return self._checked([complete_text(decode, shown)], len(ids))[0]

    def token_strings(self, ids: list[int]) -> list[str]:
        """Return each token as the vocabulary has it; empty for an id without a token."""
        with self._decoding():
            strings = self._tokenizer.convert_ids_to_tokens(ids)
            return self._checked([string or "" for string in strings], len(ids))

    def decode_streams(self, new: list[NewTokens]) -> list[NewText]:
        """Decode the new tokens of many sequences."""
        with self._decoding():
            return list(map(self._decode_new, new))

    def _decode_new(self, new: NewTokens) -> NewText:
        left_out = self._special_ids if new.skip_special_tokens else frozenset[int]()
        found = decode_new(self._decoder(new.skip_special_tokens), new, left_out, self._num_unsettled)
        own = {
            position: self._own_text(token_id)
            for position, token_id in enumerate(new.ids)
            if token_id in left_out or token_id in new.end_ids
        }
        if found.begins is not None:
            first = new.ids[found.begins]
            own[found.begins] = self._own_text(first).removesuffix(self._decode_all([first]))
        before = ""
        if new.num_before and new.window.num_shown is None:
            before = self._own_text(*new.window.ids)[-new.num_before :]
        if not own and not before:
            return found
        self._checked(list(own.values()), len(own))
        return replace(found, left_out=own, before=before)

    def _decoder(self, skip_special_tokens: bool) -> Decode:
        return self._decode if skip_special_tokens else self._decode_all

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Tokens for others to stand behind, and their text."""
        ids = list(self._tokenizer(ANCHOR, add_special_tokens=False)["input_ids"])
        return ids, self._decode_all(ids)

    def _own_text(self, *token_ids: int) -> str:
        """Return the text of tokens behind other text."""
        ids, before = self._anchor
        text = self._decode_all([*ids, *token_ids])
        return text[len(before) :] if text.startswith(before) else self._decode_all(list(token_ids))

    def _token_text(self, token_id: int, text: str) -> TokenText:
        if INCOMPLETE not in text:
            return TokenText(text)
        token = str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        if (byte := BYTE_TOKEN.fullmatch(token)) is not None:
            raw = bytes.fromhex(byte[1])
        elif all(character in BYTE_OF for character in token):
            raw = bytes(BYTE_OF[character] for character in token)
        else:
            return TokenText(text)
        text = raw.decode(errors="backslashreplace")
        return TokenText(text, None if text.encode() == raw else raw)

    def _checked(self, texts: list[str], num_tokens: int) -> list[str]:
        """Return the texts of tokens; raise ArtifactError if they are longer than text of real tokens."""
        num_chars = sum(map(len, texts))
        if num_chars > MAX_CHARS + MAX_CHARS_PER_TOKEN * num_tokens:
            raise ArtifactError(
                f"its tokenizer makes {num_chars} characters of {num_tokens} tokens: use one that makes fewer"
            )
        return texts

    def _decoding(self) -> AbstractContextManager[None]:
        return failures_as(lambda reason: ArtifactError(f"its tokenizer cannot decode tokens: {reason}"))

    def _ids(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        with failures_as(
            lambda reason: InvalidRequest(f"the tokenizer cannot encode the {param}: {reason}", param)
        ):
            # transformers has encode_batch of tokenizers do it, which releases the interpreter lock.
            return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _refuse_long(self, text: str, max_tokens: int, param: str) -> None:
        """Refuse a text of more characters than `max_tokens` of the longest token have."""
        if self._longest_token is None:
            longest = max(map(len, self._tokenizer.get_vocab()), default=0)
            backend = self._tokenizer.backend_tokenizer
            exact = backend.normalizer is None and type(backend.model).__name__ == "BPE"
            self._longest_token = max(longest, MIN_LONGEST_TOKEN) * (1 if exact else SHRINKING_FACTOR)
        if len(text) > max_tokens * self._longest_token:
            raise _too_long(text, max_tokens, param)


def too_many_tokens(number: int, max_tokens: int, param: str) -> ContextTooLong:
    """Return the error of a request's field with more tokens than fit."""
    return ContextTooLong(
        f"{_has(param)} {number} tokens, more than the {max_tokens} that fit: send fewer", param
    )


def _too_long(text: str, max_tokens: int, param: str) -> ContextTooLong:
    return ContextTooLong(
        f"{_has(param)} {len(text)} characters, which are more than {max_tokens} tokens: send fewer", param
    )


def _has(param: str) -> str:
    return f"the {param} {'have' if param in ('messages', 'tokens') else 'has'}"


def _decoder(tokenizer: PreTrainedTokenizerFast, skip_special_tokens: bool) -> Decode:
    """Return transformers' `decode` in its fastest form: every token needs two calls of it."""
    if type(tokenizer)._decode is PreTrainedTokenizerFast._decode and not _cleans_up(tokenizer):
        decode = tokenizer.backend_tokenizer.decode
        return lambda ids: str(decode(ids, skip_special_tokens=skip_special_tokens))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def _cleans_up(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether transformers' `decode` takes spaces before punctuation away, which for BPE needs a flag."""
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    for_bpe = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    return bool(tokenizer.clean_up_tokenization_spaces and (for_bpe or not is_bpe))
