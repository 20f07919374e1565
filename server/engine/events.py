"""Events that the engine answers a request with. Plain values; they know no engine and no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deltastore.errors import PeraxisError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, its log-probability given the tokens before it, and the likeliest tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Log-probabilities of the prompt's tokens but the first; precedes the first TokenEvent."""

    tokens: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token and the text that became visible with it.

    `text` is empty while the token may be part of an incomplete character or of a stop string.
    """

    index: int  # of the sequence
    token_id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of one sequence of a request; `text` is the text that was held back until now."""

    index: int
    reason: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of a request in seconds, each from the time at which `Engine.submit` admitted it."""

    queue_s: float  # to its first step, loading included
    load_s: float  # until its delta was resident, waiting for a slot included; 0 if it was resident at once
    cold: bool  # the delta was not resident when the engine took the request in
    ttft_s: float  # to the first token
    total_s: float


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The last event of a request that was answered."""

    timings: Timings
    prompt_tokens: int
    generation_tokens: int


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The last event of a request that failed."""

    error: PeraxisError


Event = PromptEvent | TokenEvent | FinishEvent | DoneEvent | ErrorEvent
