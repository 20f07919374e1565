"""From logits to tokens: the library's own processors in the library's own order, then one seeded draw per sample."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Items
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

from server.engine.request import SamplingParams, ScoredToken
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

    def __init__(self, sampling: SamplingParams, index: int) -> None:
        self.num_logprobs = sampling.logprobs
        self.greedy = sampling.temperature < GREEDY_BELOW
        self.processors = _processors(sampling)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed + index
        self.generator = torch.Generator().manual_seed(seed % 2**63)

    @property
    def takes_likeliest(self) -> bool:
        """Whether the likeliest token is all there is to find."""
        return self.greedy and not self.processors and self.num_logprobs is None

    def choose(
        self,
        logits: Tensor,  # [vocab] float32 on the CPU; minus infinity for tokens that the variant lacks
        history: list[int],  # prompt and tokens so far
    ) -> Choice:
        """The next token; at least one logit is finite and none is NaN."""
        scores = self.processors(torch.tensor([history]), logits[None].clone())[0]  # type: ignore[arg-type]
        if self.greedy:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))
        if self.num_logprobs is None:
            return Choice(token, None, ())
        scored = score(logits[None], [token], self.num_logprobs)[0]
        return Choice(token, scored.logprob, scored.top)


class LastLogits:
    """What a step says of the next token of each sequence in it."""

    def __init__(self, logits: Tensor) -> None:
        """Args: logits: ``[sequences, vocab]`` float32, on any device."""
        self._logits = logits
        self._usable = (~logits.isnan().any(-1) & logits.isfinite().any(-1)).tolist()
        self._likeliest = logits.argmax(-1).tolist()

    def choose(self, row: int, num_ids: int, sampler: Sampler, history: list[int]) -> Choice:
        """The next token of sequence `row`; EngineFailed where its logits hold NaN or no finite number.

        Only its variant's `num_ids` logits are drawn from: how many others there are is another variant's business, and
        would change the draw.
        """
        if not self._usable[row]:
            raise EngineFailed("the model's logits are not finite: this variant or its base is damaged")
        if sampler.takes_likeliest:
            return Choice(self._likeliest[row], None, ())
        return sampler.choose(self._logits[row, :num_ids].cpu(), history)


def score(
    logits: Tensor,  # [tokens, vocab] float32
    token_ids: Items[int],
    num_top: int,
) -> list[ScoredToken]:
    """What a model thought of tokens, each by the logits before it; `num_top` likeliest beside each."""
    logprobs = logits.log_softmax(-1).cpu()
    own = logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    values, ids = (found.tolist() for found in logprobs.topk(min(num_top, logprobs.shape[1])))
    return [
        ScoredToken(
            token,
            own[row],
            tuple((i, v) for i, v in zip(ids[row], values[row], strict=True) if v > -torch.inf),
        )
        for row, token in enumerate(token_ids)
    ]


def _processors(sampling: SamplingParams) -> LogitsProcessorList:
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
