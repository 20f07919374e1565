"""Rules of a generation config for each token, which no request sets. A value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """Fields of transformers' `GenerationConfig`, checked and bounded by `server/text/generation_config.py`."""

    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_length: int = 0  # prompt included
    min_new_tokens: int | None = None  # `min_length` is ignored if it is given
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    # Applies to sampling only.
    top_h: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    renormalize_logits: bool = False

    @property
    def is_neutral(self) -> bool:
        """True if no rule changes any logit."""
        return self == NEUTRAL

    def lists(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each list of token ids with the name of its field."""
        yield from (("sequence_bias", ids) for ids, _ in self.sequence_bias)
        yield from (("bad_words_ids", ids) for ids in self.bad_words_ids)
        if self.forced_bos_token_id is not None:
            yield "forced_bos_token_id", (self.forced_bos_token_id,)
        yield "forced_eos_token_id", self.forced_eos_token_id
        yield "suppress_tokens", self.suppress_tokens
        yield "begin_suppress_tokens", self.begin_suppress_tokens


NEUTRAL = GenerationRules()
