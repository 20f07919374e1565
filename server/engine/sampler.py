"""From logits to tokens: a generation config's rules, transformers' warpers in their order, one seeded draw.

The rules are equal to transformers' logits processors, in transformers' order. Those read the whole sequence for each
token; these keep what they need to know of it. Engine thread only.
"""

from __future__ import annotations

import math
import secrets
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

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

from server.errors import EngineFailed
from server.protocol.messages import ScoredToken
from server.protocol.request import GenerationRules, SamplingParams

# Indexed rules of generation configs, of at most a megabyte each.
MAX_INDEXED = 32
# Above any sum of biases and penalties that float32 holds after a division by the lowest temperature.
MAX_PENALTY = 1e20


class NGrams:
    """The tokens that have followed each `size - 1` tokens."""

    def __init__(self, size: int) -> None:
        self._num_before = size - 1
        # Most n-grams are followed by one token, and an integer is small.
        self._one: dict[tuple[int, ...], int] = {}
        self._several: dict[tuple[int, ...], _Several] = {}

    def add(self, before: tuple[int, ...], token_id: int) -> None:
        """Take in that a token has followed some tokens, of which the last `size - 1` count, if they are as many."""
        key = self._key(before)
        if key is None or (first := self._one.setdefault(key, token_id)) == token_id:
            return
        several = self._several.setdefault(key, _Several(array("q", [first]), {first}))
        if token_id not in several.members:
            several.members.add(token_id)
            several.token_ids.append(token_id)

    def following(self, before: tuple[int, ...]) -> Tensor:
        """Return the tokens ``[number]`` that have followed the same tokens as `before` ends with."""
        key = self._key(before)
        if key is None or key not in self._one:
            return torch.empty(0, dtype=torch.long)
        if key not in self._several:
            return torch.tensor([self._one[key]])
        # A copy: an array of which there is a view cannot grow.
        return torch.frombuffer(bytearray(self._several[key].token_ids), dtype=torch.long)

    def _key(self, before: tuple[int, ...]) -> tuple[int, ...] | None:
        first = len(before) - self._num_before
        return None if first < 0 else before[first:]


class _Several(NamedTuple):
    token_ids: array[int]
    members: set[int]


@dataclass(slots=True, eq=False)
class PromptHistory:
    """Facts of a prompt for the rules: computed once for all sequences of its request, when one needs it."""

    token_ids: tuple[int, ...]
    _seen: Tensor | None = None
    _ngrams: dict[int, NGrams] = field(default_factory=dict)

    def seen(self, num_embeddings: int) -> Tensor:
        """Return whether each token ``[num_embeddings]`` is in the prompt; do not change it."""
        if self._seen is None:
            ids = torch.tensor(self.token_ids, dtype=torch.long)
            self._seen = torch.zeros(num_embeddings, dtype=torch.bool).index_fill_(
                0, ids[ids < num_embeddings], True
            )
        return self._seen

    def ngrams(self, size: int) -> NGrams:
        """Return the prompt's n-grams of a size; do not change them."""
        if size not in self._ngrams:
            ngrams, num_before = NGrams(size), size - 1
            for end in range(num_before, len(self.token_ids)):
                ngrams.add(self.token_ids[end - num_before : end], self.token_ids[end])
            self._ngrams[size] = ngrams
        return self._ngrams[size]


class LogitsRules:
    """The rules of one sequence, and what they need to know of its tokens.

    Where they leave no token, they do not hold for that token: a sequence that a response format constrains then takes
    one that the format allows.
    """

    def __init__(self, params: SamplingParams, prompt: PromptHistory) -> None:
        self._params = params
        self._rules = rules = params.rules
        self._prompt = prompt
        self._num_tokens = len(prompt.token_ids)
        self._num_generated = 0
        num_recent = max(
            *(rules.no_repeat_ngram_size - 1, rules.encoder_no_repeat_ngram_size - 1, 0),
            *(len(ids) - 1 for ids, _ in rules.sequence_bias),
            *(len(ids) - 1 for ids in rules.bad_words_ids),
        )
        # The newest tokens: none of the rules looks further back.
        self._recent = deque(prompt.token_ids[-num_recent:] if num_recent else (), num_recent)
        self._ngrams = NGrams(rules.no_repeat_ngram_size)
        self._seen: Tensor | None = None  # once the size of the vocabulary is known
        self._added: list[int] = []  # tokens that `_seen` lacks
        self._indexed: Indexed | None = None

    def apply(
        self,
        logits: Tensor,  # [vocab] float32 on the CPU; minus infinity for tokens that a mask does not allow
    ) -> Tensor:  # [vocab]
        """Return the logits of the next token as the rules change them."""
        if self._indexed is None:
            self._indexed = _indexed(self._rules, self._params.stop_token_ids, len(logits))
        indexed = self._indexed
        recent = tuple(self._recent)
        scores = logits.clone()
        indexed.sequence_bias.add_to(scores, recent)
        self._penalize_repetition(scores)
        self._ban_ngrams(scores, recent)
        indexed.bad_words.add_to(scores, recent)
        if self._num_missing() > 0:
            scores[indexed.eos] = -math.inf
        self._force(scores, indexed)
        self._decay(scores, indexed.eos)
        scores[indexed.suppressed] = -math.inf
        if self._num_generated == self._begin():
            scores[indexed.begin_suppressed] = -math.inf
        if self._params.is_constrained:
            # A forced or biased token is none that the mask does not allow.
            scores[logits == -math.inf] = -math.inf
        return scores if scores.amax() > -math.inf else logits

    def add(self, token_id: int) -> None:
        """Take in the token that was sampled."""
        if self._rules.no_repeat_ngram_size:
            self._ngrams.add(tuple(self._recent), token_id)
        self._recent.append(token_id)
        if self._params.repetition_penalty != 1:
            self._added.append(token_id)
        self._num_tokens += 1
        self._num_generated += 1

    def _penalize_repetition(self, scores: Tensor) -> None:
        if self._rules.encoder_repetition_penalty != 1:
            seen = self._prompt.seen(len(scores))
            _penalize(scores, seen, 1 / self._rules.encoder_repetition_penalty)
        if self._params.repetition_penalty != 1:
            if self._seen is None:
                self._seen = self._prompt.seen(len(scores)).clone()
            self._seen[self._added] = True
            self._added.clear()
            _penalize(scores, self._seen, self._params.repetition_penalty)

    def _ban_ngrams(self, scores: Tensor, recent: tuple[int, ...]) -> None:
        rules = self._rules
        if rules.no_repeat_ngram_size:
            for ngrams in (self._prompt.ngrams(rules.no_repeat_ngram_size), self._ngrams):
                scores[ngrams.following(recent)] = -math.inf
        if rules.encoder_no_repeat_ngram_size:
            ngrams = self._prompt.ngrams(rules.encoder_no_repeat_ngram_size)
            scores[ngrams.following(recent)] = -math.inf

    def _num_missing(self) -> int:
        """Return how many more tokens the sequence must have before it may end."""
        if self._rules.min_new_tokens is not None:
            return self._rules.min_new_tokens - self._num_generated
        return self._rules.min_length - self._num_tokens

    def _force(self, scores: Tensor, indexed: Indexed) -> None:
        for is_now, forced in (
            (self._num_tokens == 1, indexed.forced_bos),
            (self._num_generated == self._params.max_new_tokens - 1, indexed.forced_eos),
        ):
            if is_now and len(forced):
                scores.fill_(-math.inf)
                scores[forced] = 0.0

    def _decay(self, scores: Tensor, eos: Tensor) -> None:
        if self._rules.exponential_decay_length_penalty is None:
            return
        start, factor = self._rules.exponential_decay_length_penalty
        if self._num_generated > start:
            try:
                grown = min(factor ** (self._num_generated - start) - 1, MAX_PENALTY)
            except OverflowError:
                grown = MAX_PENALTY
            own = scores[eos]
            scores[eos] = own + (own.abs() * grown).masked_fill(~own.isfinite(), 0.0)

    def _begin(self) -> int:
        """Return which generated token the tokens of `begin_suppress_tokens` must not be."""
        is_forced = self._rules.forced_bos_token_id is not None and len(self._prompt.token_ids) == 1
        return int(is_forced)


class Biases:
    """Numbers that are added to the logits of tokens behind some others.

    Args:
        biases: sequences of tokens, each with what is added to its last one behind the others.
        num_embeddings: tokens from here on are left out.
    """

    def __init__(self, biases: Iterable[tuple[tuple[int, ...], float]], num_embeddings: int) -> None:
        self._by_length: dict[int, dict[tuple[int, ...], tuple[Tensor, Tensor]]] = {}
        found: dict[tuple[int, ...], dict[int, float]] = {}
        # As in transformers, of equal sequences the last one holds, and single tokens are added first.
        for ids, bias in sorted(dict(biases).items(), key=lambda item: len(item[0]) > 1):
            if ids[-1] < num_embeddings:
                found.setdefault(ids[:-1], {})[ids[-1]] = bias
        for before, own in found.items():
            pair = torch.tensor(list(own)), torch.tensor(list(own.values()), dtype=torch.float32)
            self._by_length.setdefault(len(before), {})[before] = pair

    def add_to(self, scores: Tensor, recent: tuple[int, ...]) -> None:
        """Add to scores ``[vocab]`` in place what is due behind the newest tokens."""
        if not self._by_length:
            return
        # Added up apart, as in transformers: another order of additions rounds otherwise.
        total = torch.zeros_like(scores)
        for length, by_tokens in self._by_length.items():
            if length <= len(recent) and (due := by_tokens.get(recent[len(recent) - length :])) is not None:
                total.index_add_(0, *due)
        scores += total


@dataclass(frozen=True, slots=True, eq=False)
class Indexed:
    """Rules of a generation config as tensors of token ids, without those that a variant lacks."""

    sequence_bias: Biases
    bad_words: Biases
    eos: Tensor
    forced_bos: Tensor
    forced_eos: Tensor
    suppressed: Tensor
    begin_suppressed: Tensor


@lru_cache(MAX_INDEXED)
def _indexed(rules: GenerationRules, eos_token_ids: frozenset[int], num_embeddings: int) -> Indexed:
    def ids(given: Iterable[int]) -> Tensor:
        return torch.tensor(sorted({each for each in given if 0 <= each < num_embeddings}), dtype=torch.long)

    # transformers never bans an end token alone.
    bad_words = [ids for ids in rules.bad_words_ids if len(ids) > 1 or ids[0] not in eos_token_ids]
    return Indexed(
        sequence_bias=Biases(rules.sequence_bias, num_embeddings),
        bad_words=Biases(((ids, -math.inf) for ids in bad_words), num_embeddings),
        eos=ids(eos_token_ids),
        forced_bos=ids([] if rules.forced_bos_token_id is None else [rules.forced_bos_token_id]),
        forced_eos=ids(rules.forced_eos_token_id),
        suppressed=ids(rules.suppress_tokens),
        begin_suppressed=ids(rules.begin_suppress_tokens),
    )


def _penalize(scores: Tensor, seen: Tensor, penalty: float) -> None:
    """Lower in place the scores of tokens that were seen; a penalty below 1 raises them."""
    penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
    scores.copy_(torch.where(seen, penalized, scores))


# No warper looks at the tokens of the sequence.
NO_TOKENS = torch.empty((1, 0), dtype=torch.long)
# Below this, take the argmax: scaled logits would overflow float32.
GREEDY_BELOW = 1e-4


class SampledToken(Struct, frozen=True):
    """A sampled token; log-probabilities are the model's, before penalty, temperature and truncation."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), likeliest first


def draw_seed(seed: int, position: int) -> int:
    """Return the 63-bit seed of the draw of one token of a sequence, of which `position` tokens were drawn before."""
    key = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1


class Sampler:
    """Samples the tokens of one sequence.

    A draw depends on the seed, the sequence and the token's position alone: neither on other requests, nor on whether
    another engine has sampled the tokens before it.
    """

    def __init__(self, params: SamplingParams, index: int, prompt: PromptHistory) -> None:
        self.num_logprobs = params.logprobs
        self.greedy = params.temperature < GREEDY_BELOW
        has_rules = params.repetition_penalty != 1 or not params.rules.is_neutral
        self.rules = LogitsRules(params, prompt) if has_rules else None
        self.warpers = _warpers(params)
        # What another sampler would not draw.
        self.is_own = not params.rules.is_neutral or (params.seed is not None and not self.greedy)
        # The argmax of the logits is the answer, and no log-probabilities are reported.
        self.takes_argmax = self.greedy and not has_rules and self.num_logprobs is None
        self._seed = secrets.randbits(63) if params.seed is None else params.seed + index
        self._num_sampled = 0
        self._generator = torch.Generator()

    def add(self, token_id: int) -> None:
        """Take in the next token, sampled here or by an engine before this one."""
        self._num_sampled += 1
        if self.rules is not None:
            self.rules.add(token_id)

    def sample(
        self,
        logits: Tensor,  # [vocab] float32 on the CPU; minus infinity for tokens that the variant lacks
    ) -> SampledToken:
        """Sample the next token. At least one logit must be finite and none NaN."""
        token = self.draw(logits)
        self.add(token)
        if self.num_logprobs is None:
            return SampledToken(token)
        scored = score(logits[None], [token], self.num_logprobs)[0]
        return SampledToken(token, scored.logprob, scored.top)

    def draw(self, logits: Tensor) -> int:
        """Return the next token without taking it in: until then it is the same for the same logits ``[vocab]``."""
        scores = self.scores(logits)
        if self.greedy:
            return int(scores.argmax())
        generator = self._generator.manual_seed(draw_seed(self._seed, self._num_sampled))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))

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
            raise not_finite()
        if sampler.takes_argmax:
            return SampledToken(self._argmax[row])
        return sampler.sample(self._logits[row, :num_embeddings].cpu())


def not_finite() -> EngineFailed:
    """Return the error of a request whose logits hold NaN or no finite number."""
    return EngineFailed("the model's logits are not finite: this variant or its base is damaged")


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
