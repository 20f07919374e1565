"""From logits to tokens: a batch is drawn at once; rows with rules of a generation config are changed by these before.

The rules are equal to transformers' logits processors, in transformers' order. Those read the whole sequence for each
token; these keep what they need to know of it, and look for n-grams alone in all of its tokens. Engine thread only.
"""

from __future__ import annotations

import math
import secrets
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b

import numpy as np
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

from server import kernels
from server.errors import EngineFailed
from server.kernels import Draw
from server.protocol.messages import ScoredToken
from server.protocol.request import GenerationRules, SamplingParams

# Indexed rules of generation configs, of at most a megabyte each.
MAX_INDEXED = 32
# Above any sum of biases and penalties that float32 holds after a division by the lowest temperature.
MAX_PENALTY = 1e20


class PromptHistory:
    """Facts of a prompt for the rules: computed once for all sequences of its request, when one needs it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._seen: Tensor | None = None

    @cached_property
    def ids(self) -> np.ndarray:
        """The prompt's tokens ``[tokens]``, int32: the request's own memory."""
        return np.asarray(self.token_ids, np.int32)

    def seen(self, num_embeddings: int) -> Tensor:
        """Return whether each token ``[num_embeddings]`` is in the prompt; do not change it."""
        if self._seen is None:
            ids = torch.tensor(self.ids[self.ids < num_embeddings], dtype=torch.long)
            self._seen = torch.zeros(num_embeddings, dtype=torch.bool).index_fill_(0, ids, True)
        return self._seen


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
        # The generated tokens behind as many of the prompt's as an n-gram can begin with.
        num_before = max(0, rules.no_repeat_ngram_size - 1)
        self._own = array("i", prompt.token_ids[len(prompt.token_ids) - num_before :] if num_before else ())
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
            self._own.append(token_id)
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
        size = self._rules.no_repeat_ngram_size
        # No view of it may be left: an array of which there is one cannot grow.
        own = np.asarray(self._own)
        for ids, num_before in (
            (self._prompt.ids, size - 1),
            (own, size - 1),
            (self._prompt.ids, self._rules.encoder_no_repeat_ngram_size - 1),
        ):
            if 0 <= num_before <= len(recent):
                scores[_following(ids, recent[len(recent) - num_before :])] = -math.inf

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
        # Of each number of tokens before: which part of the numbers is due behind which tokens.
        self._by_length: dict[int, dict[tuple[int, ...], slice]] = {}
        found: dict[tuple[int, ...], dict[int, float]] = {}
        # As in transformers, of equal sequences the last one holds, and single tokens are added first.
        for ids, bias in sorted(dict(biases).items(), key=lambda item: len(item[0]) > 1):
            if ids[-1] < num_embeddings:
                found.setdefault(ids[:-1], {})[ids[-1]] = bias
        # In two tensors: one pair for each sequence of tokens would take ten times as long to make.
        last, added = array("q"), array("f")
        for before, own in found.items():
            self._by_length.setdefault(len(before), {})[before] = slice(len(last), len(last) + len(own))
            last.extend(own)
            added.extend(own.values())
        self._last = torch.tensor(last, dtype=torch.long)
        self._added = torch.tensor(added, dtype=torch.float32)

    def add_to(self, scores: Tensor, recent: tuple[int, ...]) -> None:
        """Add to scores ``[vocab]`` in place what is due behind the newest tokens."""
        if not self._by_length:
            return
        # Added up apart, as in transformers: another order of additions rounds otherwise.
        total = torch.zeros_like(scores)
        for length, by_tokens in self._by_length.items():
            if length <= len(recent) and (due := by_tokens.get(recent[len(recent) - length :])) is not None:
                total.index_add_(0, self._last[due], self._added[due])
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


def _following(ids: np.ndarray, before: tuple[int, ...]) -> Tensor:
    """Return the tokens that follow tokens equal to `before` in a sequence ``[tokens]``, int64.

    Reads the sequence once for each token of `before`, as far as anything equals it: less than attention to it does. A
    table of its n-grams would take half a second to make for a prompt of 128k tokens, on the thread of all requests.
    """
    num_ends = len(ids) - len(before)
    if num_ends <= 0:
        return torch.empty(0, dtype=torch.long)
    equal = np.ones(num_ends, bool)
    for place, token_id in enumerate(before):
        equal &= ids[place : place + num_ends] == token_id
        if not equal.any():
            break
    return torch.from_numpy(ids[len(before) :][equal]).long()


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


def draw_uniform(seed: int, position: int) -> float:
    """Return the number, from 0 to below 1, that draws one token of a sequence, behind `position` drawn ones."""
    key = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


class TokenBiases:
    """Numbers that are added to the logits of single tokens, before all else: a client's, and penalties.

    A penalty is taken from the logits of tokens that were generated, as in OpenAI's API. A token costs the same
    whatever the context.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._frequency, self._presence = params.frequency_penalty, params.presence_penalty
        # A grammar ends where it ends.
        self._ends, self._num_missing = (
            params.stop_token_ids,
            0 if params.is_constrained else params.min_tokens,
        )
        self._ids = array("i", [token_id for token_id, _ in params.logit_bias])
        self._values = array("f", [bias for _, bias in params.logit_bias])
        # Of each token that was generated: its place behind those of the client.
        self._places: dict[int, int] = {}
        self.are_none = not (self._ids or self._frequency or self._presence or self._num_missing)

    def add(self, token_id: int) -> None:
        """Take in a token that was generated."""
        self._num_missing -= 1
        if not self._frequency and not self._presence:
            return
        if (place := self._places.get(token_id)) is None:
            place = self._places[token_id] = len(self._ids)
            self._ids.append(token_id)
            self._values.append(-self._presence)
        self._values[place] -= self._frequency

    def due(self, num_embeddings: int) -> tuple[array[int], array[float]]:
        """Return token ids below `num_embeddings`, some of them twice, and what is added to their logits.

        While tokens are missing, none that ends the sequence can be drawn.
        """
        if self._num_missing <= 0:
            return self._ids, self._values
        ends = array("i", [token_id for token_id in self._ends if token_id < num_embeddings])
        return self._ids + ends, self._values + array("f", [-math.inf]) * len(ends)


class Sampler:
    """Knows how the tokens of one sequence are drawn.

    A draw depends on the seed, the sequence and the token's position alone: neither on other requests, nor on whether
    another engine has sampled the tokens before it.
    """

    def __init__(self, params: SamplingParams, index: int, prompt: PromptHistory) -> None:
        self.num_logprobs = params.logprobs
        self.greedy = params.temperature < GREEDY_BELOW
        # What `draw` of kernels does not know, one row at a time.
        self.rules = None if params.rules.is_neutral else LogitsRules(params, prompt)
        self.warpers = _warpers(params)
        self._biases = TokenBiases(params)
        # What another sampler would not draw.
        self.is_own = (
            self.rules is not None
            or (params.seed is not None and not self.greedy)
            or not self._biases.are_none
        )
        self.cost = _cost(params, self.rules)
        self._params, self._prompt = params, prompt
        self._seed = secrets.randbits(63) if params.seed is None else params.seed + index
        self._num_sampled = 0
        self._seen = array("i")  # tokens so far, each once; of a sequence with a penalty and no rules
        self._is_seen: Tensor | None = None  # of each token; once the size of the vocabulary is known
        self._added: list[int] = []  # tokens that both lack

    def add(self, token_id: int) -> None:
        """Take in the next token, sampled here or by an engine before this one."""
        self._num_sampled += 1
        self._biases.add(token_id)
        if self.rules is not None:
            self.rules.add(token_id)
        elif self._params.repetition_penalty != 1:
            self._added.append(token_id)

    def draw(self, logits: Tensor) -> int:
        """Return the next token without taking it in: until then it is the same for the same logits ``[vocab]``."""
        return draw_all(logits[None], [(self, len(logits))])[0]

    def plan(self, num_embeddings: int) -> Draw:
        """Return how the next token is drawn from `num_embeddings` logits, or `scores` of a sequence with rules."""
        uniform = 0.0 if self.greedy else draw_uniform(self._seed, self._num_sampled)
        temperature = 0.0 if self.greedy else 1.0
        if self.rules is not None:
            return Draw(num_embeddings, uniform, temperature)
        params = self._params
        biased, biases = self._biases.due(num_embeddings)
        if not self.greedy:
            temperature = params.temperature
        return Draw(
            num_embeddings,
            uniform,
            temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            self._seen_ids(num_embeddings),
            biased,
            biases,
        )

    def scores(self, logits: Tensor) -> Tensor:
        """Return the logits ``[vocab]`` of the next token as the rules and the sampling parameters change them."""
        biased, biases = self._biases.due(len(logits))
        if biased:
            ids = torch.tensor(biased, dtype=torch.long)
            logits = logits.index_add(0, ids, torch.tensor(biases, dtype=torch.float32))
        ruled = logits if self.rules is None else self.rules.apply(logits)
        scores: Tensor = self.warpers(NO_TOKENS, ruled[None])[0]  # type: ignore[arg-type]
        return scores

    def _seen_ids(self, num_embeddings: int) -> array[int]:
        if self._params.repetition_penalty == 1:
            return self._seen
        if self._is_seen is None:
            self._is_seen = self._prompt.seen(num_embeddings).clone()
            self._seen.frombytes(self._is_seen.nonzero().int().numpy().tobytes())
        for token_id in self._added:
            if not self._is_seen[token_id]:
                self._is_seen[token_id] = True
                self._seen.append(token_id)
        self._added.clear()
        return self._seen


def sample(
    logits: Tensor,  # [rows, vocab] float32, on any device
    rows: Sequence[tuple[Sampler, int]],  # of each row: its sampler, and the size of its variant's vocabulary
) -> list[SampledToken | EngineFailed]:
    """Sample the next token of each sequence of a batch, and take it in. A row that cannot be sampled gets its error.

    Logits beyond a variant's vocabulary belong to tokens of other variants in the batch and would change the draw.
    """
    tokens = draw_all(logits, rows)
    wanted = [row for row, token in enumerate(tokens) if rows[row][0].num_logprobs is not None and token >= 0]
    scored = dict[int, ScoredToken]()
    if wanted:
        num_top = max(rows[row][0].num_logprobs or 0 for row in wanted)
        own = logits if len(wanted) == len(rows) else logits[wanted]
        scored = dict(zip(wanted, score(own, [tokens[row] for row in wanted], num_top), strict=True))
    sampled: list[SampledToken | EngineFailed] = []
    for row, (sampler, _) in enumerate(rows):
        if tokens[row] < 0:
            sampled.append(not_finite())
            continue
        sampler.add(tokens[row])
        one = scored.get(row)
        logprob, top = (None, ()) if one is None else (one.logprob, one.top[: sampler.num_logprobs])
        sampled.append(SampledToken(tokens[row], logprob, top))
    return sampled


def draw_all(logits: Tensor, rows: Sequence[tuple[Sampler, int]]) -> list[int]:
    """Return the next token of each sequence without taking it in; -1 where NaN or no finite logit leaves none."""
    plans = [sampler.plan(num_embeddings) for sampler, num_embeddings in rows]
    ruled = [row for row, (sampler, _) in enumerate(rows) if sampler.rules is not None]
    if ruled:
        logits = logits.clone()
    for row in ruled:
        sampler, num_embeddings = rows[row]
        logits[row, :num_embeddings] = sampler.scores(logits[row, :num_embeddings].cpu())
    return kernels.draw(logits, plans)[0]


def not_finite() -> EngineFailed:
    """Return the error of a request whose logits hold NaN or no finite number."""
    return EngineFailed("the model's logits are not finite: this variant or its base is damaged")


def score(
    logits: Tensor,  # [tokens, vocab] float32
    token_ids: Sequence[int],
    num_top: int,
) -> list[ScoredToken]:
    """Return each token's log-probability under its row of logits, with the row's `num_top` likeliest tokens."""
    return [
        ScoredToken(token, own, tuple((i, v) for i, v in zip(ids, values, strict=True) if v > -torch.inf))
        for token, own, ids, values in zip(token_ids, *kernels.score(logits, token_ids, num_top), strict=True)
    ]


# What a token takes more than an argmax, in argmaxes (`python -m bench.sampling`, 128k tokens): in the kernels, with
# rules of a generation config, and with warpers of transformers that sort.
DRAWN, WITH_TOP_P, WITH_MIN_P, WITH_PENALTY, WITH_LOGPROBS = 0.8, 2.6, 0.4, 1.0, 2.6
# A greater top-k than a row has blocks takes as much as top-p.
WITH_TOP_K, SMALL_TOP_K = 0.2, 64
RULED, SORTED = 20.0, 500.0


def _cost(params: SamplingParams, rules: LogitsRules | None) -> float:
    """Return about what a token takes to sample, in argmaxes."""
    cost = 1.0 + (0.0 if params.logprobs is None else WITH_LOGPROBS)
    is_drawn = params.temperature >= GREEDY_BELOW
    own = params.rules
    if rules is not None:
        sorts = is_drawn and (
            params.top_p < 1 or own.typical_p < 1 or own.eta_cutoff > 0 or own.top_h is not None
        )
        return cost + (SORTED if sorts else RULED)
    if params.repetition_penalty != 1:
        cost += WITH_PENALTY
    if is_drawn:
        cost += DRAWN + WITH_TOP_K * (params.top_k > 0) + WITH_MIN_P * (params.min_p > 0)
        cost += WITH_TOP_P * ((params.top_p < 1) + (params.top_k > SMALL_TOP_K))
    return cost


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
