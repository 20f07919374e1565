"""Events that the engine answers a request with. Plain values without text; they know no engine and no HTTP."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from deltastore.errors import PeraxisError

FinishReason = Literal["stop", "length", "cancelled"]


class ScoredToken(Struct, frozen=True, array_like=True):
    """A token, its log-probability given the tokens before it, and the likeliest tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


class PromptEvent(Struct, frozen=True, array_like=True, tag=True):
    """Log-probabilities of the prompt's tokens but the first; precedes the first TokenEvent."""

    tokens: tuple[ScoredToken, ...]


class TokenEvent(Struct, frozen=True, array_like=True, tag=True):
    """One generated token."""

    index: int  # of the sequence
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class FinishEvent(Struct, frozen=True, array_like=True, tag=True):
    """The end of one sequence of a request."""

    index: int
    reason: FinishReason


class Timings(Struct, frozen=True):
    """Durations of a request in seconds, each from its submission."""

    queue_s: float  # to its first step, loading included
    load_s: float  # until its delta was resident, waiting for a slot included; 0 if it was resident at once
    cold: bool  # the delta was not resident when the engine took the request in
    ttft_s: float  # to the first token
    total_s: float


class DoneEvent(Struct, frozen=True, array_like=True, tag=True):
    """The last event of a request that was answered."""

    timings: Timings


class ErrorEvent(Struct, frozen=True, array_like=True, tag=True):
    """The last event of a request that failed."""

    error: PeraxisError


Event = PromptEvent | TokenEvent | FinishEvent | DoneEvent | ErrorEvent
