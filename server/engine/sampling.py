"""From logits to a token: the library's own processors in the library's own order, then one seeded draw per request."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from server.engine.request import Sampling
from server.errors import EngineFailed

GREEDY_BELOW = 1e-4  # a lower temperature chooses the likeliest token too, and overflows float32 on the way


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token; logprobs are the model's own, before penalty, temperature and truncation."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Chooses the tokens of one sample. Its draws depend on its seed alone, never on other requests."""

    def __init__(self, sampling: Sampling, index: int) -> None:
        self.num_logprobs = sampling.logprobs
        self.greedy = sampling.temperature < GREEDY_BELOW
        self.processors = _processors(sampling)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed + index
        self.generator = torch.Generator().manual_seed(seed % 2**63)

    def choose(
        self,
        logits: Tensor,  # [vocab] float32; minus infinity for tokens that the variant lacks
        history: list[int],  # prompt and tokens so far
    ) -> Choice:
        """The next token; EngineFailed where the logits hold NaN or no finite number."""
        logits = logits.cpu()
        if bool(logits.isnan().any()) or not bool(logits.isfinite().any()):
            raise EngineFailed("the model's logits are not finite: this variant or its base is damaged")
        scores = self.processors(torch.tensor([history]), logits[None].clone())[0]  # type: ignore[arg-type]
        if self.greedy:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))
        return Choice(token, *self._logprobs(logits, token))

    def _logprobs(self, logits: Tensor, token: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        if self.num_logprobs is None:
            return None, ()
        logprobs = logits.log_softmax(-1)
        values, ids = logprobs.topk(min(self.num_logprobs, len(logprobs)))
        top = tuple((int(i), float(v)) for i, v in zip(ids, values, strict=True) if v > -torch.inf)
        return float(logprobs[token]), top


def _processors(sampling: Sampling) -> LogitsProcessorList:
    chosen = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature < GREEDY_BELOW:
        return chosen
    if sampling.temperature != 1:
        chosen.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        chosen.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chosen.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        chosen.append(MinPLogitsWarper(sampling.min_p))
    return chosen
