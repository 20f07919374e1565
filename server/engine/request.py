"""A request for tokens, as the engine takes it, and the events it answers with. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.errors import InvalidRequest

if TYPE_CHECKING:
    from server.text.tokenizer import VariantTokenizer

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. The meaning of each number is that of transformers' `GenerationConfig`."""

    max_new_tokens: int = 16
    temperature: float = 1.0  # below 1e-4 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None  # sample `index` uses seed + index
    logprobs: int | None = None  # how many of the likeliest tokens are reported; 0 is the sampled one alone
    prompt_logprobs: int | None = None  # the same for the prompt's tokens but the first
    n: int = 1

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        _require(self.temperature >= 0, "temperature", "0 or more")
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", "0 or more")
        _require(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        _require(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "from 0.01 to 100")
        _require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "from 0 to 20")
        _require(
            self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "prompt_logprobs", "from 0 to 20"
        )
        _require(1 <= self.n <= 128, "n", "from 1 to 128")
        _require(all(self.stop), "stop", "strings that are not empty")


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the prompt and what the model thought of it; `top` are the likeliest there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """The prompt's tokens but the first, scored; comes before the first token."""

    tokens: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token. `text` became visible with it: nothing while a character or a stop string may be incomplete."""

    index: int
    token_id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of one of the `n` samples; `text` is what had been held back."""

    index: int
    reason: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a request's life."""

    queue_s: float  # from admission to its first step, loading included
    load_s: float  # of that, waiting for its delta
    cold: bool  # whether its delta was not resident at admission
    ttft_s: float  # from admission to the first token
    total_s: float


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The end of the request; nothing follows."""

    timings: Timings
    prompt_tokens: int
    generation_tokens: int


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The request failed; nothing follows."""

    error: PeraxisError


Event = PromptEvent | TokenEvent | FinishEvent | DoneEvent | ErrorEvent


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What is asked, fixed for its life: the digest it is answered with is `record.digest`."""

    id: str
    tenant: str
    name: str | None  # None is the base
    record: VersionRecord | None
    tokenizer: VariantTokenizer
    prompt_ids: tuple[int, ...]
    on_event: Callable[[Event], None]  # called on the engine thread; must not block
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @property
    def digest(self) -> str | None:
        return None if self.record is None else self.record.digest

    def check(self, max_model_len: int) -> None:
        """Refuse what no step could serve: InvalidRequest naming the field."""
        if not self.prompt_ids:
            raise InvalidRequest("the prompt is empty: it has no tokens", "prompt")
        if not all(0 <= token < self.tokenizer.num_embeddings for token in self.prompt_ids):
            raise InvalidRequest(f"token ids must be from 0 to {self.tokenizer.num_embeddings - 1}", "prompt")
        total = len(self.prompt_ids) + self.sampling.max_new_tokens
        if total > max_model_len:
            raise InvalidRequest(
                f"{len(self.prompt_ids)} prompt tokens and {self.sampling.max_new_tokens} new ones are {total}, "
                f"more than the {max_model_len} that fit: shorten the prompt or lower max_new_tokens",
                "max_new_tokens" if len(self.prompt_ids) < max_model_len else "prompt",
            )


def _require(holds: bool, param: str, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} must be {rule}", param)
