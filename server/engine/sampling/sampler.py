"""From logits to tokens: rules, transformers' warpers in transformers' order, then one seeded draw per sequence."""

from __future__ import annotations

import secrets

import torch
from msgspec import Struct
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from server.engine.sampling.logits_rules import LogitsRules, PromptHistory
from server.errors import EngineFailed
from server.protocol.events import ScoredToken
from server.protocol.sampling_params import SamplingParams

# No warper looks at the tokens of the sequence.
NO_TOKENS = torch.empty((1, 0), dtype=torch.long)
# Below this, take the argmax: scaled logits would overflow float32.
GREEDY_BELOW = 1e-4


class SampledToken(Struct, frozen=True):
    """A sampled token; log-probabilities are the model's, before penalty, temperature and truncation."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), likeliest first


class Sampler:
    """Samples the tokens of one sequence. Its draws depend on its seed alone, never on other requests."""

    def __init__(self, params: SamplingParams, index: int, prompt: PromptHistory) -> None:
        self.num_logprobs = params.logprobs
        self.greedy = params.temperature < GREEDY_BELOW
        has_rules = params.repetition_penalty != 1 or not params.rules.is_neutral
        self.rules = LogitsRules(params, prompt) if has_rules else None
        self.warpers = _warpers(params)
        # The argmax of the logits is the answer, and no log-probabilities are reported.
        self.takes_argmax = self.greedy and not has_rules and self.num_logprobs is None
        seed = secrets.randbits(63) if params.seed is None else params.seed + index
        self.generator = torch.Generator().manual_seed(seed % 2**63)

    def sample(
        self,
        logits: Tensor,  # [vocab] float32 on the CPU; minus infinity for tokens that the variant lacks
    ) -> SampledToken:
        """Sample the next token. At least one logit must be finite and none NaN."""
        scores = self.scores(logits)
        if self.greedy:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))
        if self.rules is not None:
            self.rules.add(token)
        if self.num_logprobs is None:
            return SampledToken(token)
        scored = score(logits[None], [token], self.num_logprobs)[0]
        return SampledToken(token, scored.logprob, scored.top)

    def scores(self, logits: Tensor) -> Tensor:
        """Return the logits ``[vocab]`` of the next token as the rules and the sampling parameters change them."""
        ruled = logits if self.rules is None else self.rules.apply(logits)
        scores: Tensor = self.warpers(NO_TOKENS, ruled[None])[0]  # type: ignore[arg-type]
        return scores


class LastLogits:
    """One row of logits per sequence whose last token this step computes.

    Args:
        logits: ``[sequences, vocab]`` float32, on any device.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._usable = _usable(logits)
        self._argmax = logits.argmax(-1).tolist()

    def sample(self, row: int, num_embeddings: int, sampler: Sampler) -> SampledToken:
        """Sample the next token of the sequence in `row` from its variant's `num_embeddings` logits.

        Logits beyond those belong to tokens of other variants in the batch and would change the draw.

        Raises:
            EngineFailed: the row holds NaN or no finite number.
        """
        if not self._usable[row]:
            raise EngineFailed("the model's logits are not finite: this variant or its base is damaged")
        if sampler.takes_argmax:
            return SampledToken(self._argmax[row])
        return sampler.sample(self._logits[row, :num_embeddings].cpu())


def _usable(logits: Tensor) -> list[bool]:
    """Return whether each row holds a finite number and no NaN."""
    # A finite maximum proves both, because NaN is larger than any number to `amax`. One pass instead of four.
    usable = logits.amax(-1).isfinite()
    if not usable.all():
        usable = ~logits.isnan().any(-1) & logits.isfinite().any(-1)
    found: list[bool] = usable.tolist()
    return found


def score(
    logits: Tensor,  # [tokens, vocab] float32
    token_ids: list[int],
    num_top: int,
) -> list[ScoredToken]:
    """Return each token's log-probability under its row of logits, with the row's `num_top` likeliest tokens."""
    # Only the results leave the device: those of a prompt are thousands of rows.
    logprobs = logits.log_softmax(-1)
    wanted = torch.tensor(token_ids, dtype=torch.long, device=logits.device)
    own = logprobs.gather(1, wanted[:, None])[:, 0].tolist()
    values, ids = (found.tolist() for found in logprobs.topk(min(num_top, logprobs.shape[1])))
    return [
        ScoredToken(
            token,
            own[row],
            tuple((i, v) for i, v in zip(ids[row], values[row], strict=True) if v > -torch.inf),
        )
        for row, token in enumerate(token_ids)
    ]


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    chosen, rules = LogitsProcessorList(), params.rules
    if params.temperature >= GREEDY_BELOW:
        if params.temperature != 1:
            chosen.append(TemperatureLogitsWarper(params.temperature))
        if rules.top_h is not None:
            chosen.append(TopHLogitsWarper(rules.top_h))
        if params.top_k > 0:
            chosen.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            chosen.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            chosen.append(MinPLogitsWarper(params.min_p))
        if rules.typical_p < 1:
            chosen.append(TypicalLogitsWarper(rules.typical_p))
        if 0 < rules.epsilon_cutoff < 1:
            chosen.append(EpsilonLogitsWarper(rules.epsilon_cutoff))
        if 0 < rules.eta_cutoff < 1:
            chosen.append(EtaLogitsWarper(rules.eta_cutoff))
    if rules.renormalize_logits:
        chosen.append(LogitNormalization())
    return chosen
