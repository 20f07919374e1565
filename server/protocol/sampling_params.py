"""How the tokens of a request are chosen and when they end. A value."""

from __future__ import annotations

from dataclasses import dataclass

from server.errors import InvalidRequest
from server.protocol.generation_rules import NEUTRAL, GenerationRules


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, with the meaning that transformers' `GenerationConfig` gives them.

    Raises:
        InvalidRequest: a value is out of range; `param` names the field.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0  # below 1e-4 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None  # sequence `index` uses seed + index
    logprobs: int | None = None  # likeliest tokens to report per token; 0 reports the sampled one alone
    prompt_logprobs: int | None = None  # the same for the prompt's tokens but the first
    n: int = 1  # sequences
    rules: GenerationRules = NEUTRAL  # of the generation config
    is_constrained: bool = False  # each token is sampled with a mask that the client sends

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        _require(self.temperature >= 0, "temperature", "0 or more")
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", "0 or more")
        _require(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        _require(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "from 0.01 to 100")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _require(value is None or 0 <= value <= 20, name, "from 0 to 20")
        _require(1 <= self.n <= 128, "n", "from 1 to 128")
        _require(all(self.stop), "stop", "strings that are not empty")


def _require(holds: bool, param: str, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} must be {rule}", param)
