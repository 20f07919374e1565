"""Turns one sequence's token ids into text as they come. Knows no engine, no request and no events."""

from __future__ import annotations

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from server.text.decoding.stops import StopMatcher
from server.text.tokenizer import guarded


class Detokenizer:
    """Decodes token by token and matches stop strings.

    Holds text back while a character is incomplete or a stop string may have begun. A matched stop string and the text
    behind it are never returned.

    Args:
        tokenizer: the variant's own.
        stop: strings that end the sequence.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stops = StopMatcher(stop)
        self._token_ids: list[int] = []
        self._num_decoded = 0  # characters
        self._stopped = False

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add a token. Return the text that became visible and whether a stop string was completed."""
        self._token_ids.append(token_id)
        step = self._stream.step
        text = guarded(lambda: step(self._tokenizer.backend_tokenizer, token_id), "tokenizer") or ""
        self._num_decoded += len(text)
        visible, self._stopped = self._stops.push(text)
        return visible, self._stopped

    def flush(self) -> str:
        """Return the text held back, after the last token; empty if a stop string was matched."""
        if self._stopped:
            return ""
        whole = guarded(
            lambda: str(self._tokenizer.decode(self._token_ids, skip_special_tokens=True)), "tokenizer"
        )
        return self._stops.push(whole[self._num_decoded :])[0] + self._stops.flush()
