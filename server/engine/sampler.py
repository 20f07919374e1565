"""From logits to tokens: a batch is drawn at once; rows with rules of a generation config are changed by these before.

The rules are equal to transformers' logits processors, in transformers' order. Those read the whole sequence for each
token; these keep what they need to know of it, and look for n-grams alone in all of its tokens. Engine thread only.
"""

from __future__ import annotations

import math
import secrets
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional
from transformers import EpsilonLogitsWarper, EtaLogitsWarper, MinPLogitsWarper, TopHLogitsWarper

from server import kernels
from server.errors import EngineFailed
from server.kernels import Draw
from server.protocol.messages import ScoredToken
from server.protocol.request import SamplingParams
from server.protocol.rules import BiasTable

# Above any sum of biases and penalties that float32 holds after a division by the lowest temperature.
MAX_PENALTY = 1e20


class PromptHistory:
    """Facts of a prompt for the rules: computed once for all sequences of its request, when one needs it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._seen: np.ndarray | None = None
        self._seen_ids: np.ndarray | None = None

    @cached_property
    def ids(self) -> np.ndarray:
        """The prompt's tokens ``[tokens]``, int32: the request's own memory."""
        return np.asarray(self.token_ids, np.int32)

    def seen(self, num_embeddings: int) -> np.ndarray:
        """Return whether each token ``[num_embeddings]`` is in the prompt, bool; do not change it."""
        if self._seen is None:
            self._seen = np.zeros(num_embeddings, bool)
            self._seen[self.ids[self.ids < num_embeddings]] = True
        return self._seen

    def seen_ids(self, num_embeddings: int) -> np.ndarray:
        """Return the tokens of the prompt, int32, each once and in their order; do not change them."""
        if self._seen_ids is None:
            self._seen_ids = self.seen(num_embeddings).nonzero()[0].astype(np.int32)
        return self._seen_ids


class SeenTokens:
    """The tokens of a sequence, each once, from the first call on that asks for them."""

    def __init__(self, prompt: PromptHistory) -> None:
        self._prompt = prompt
        self._ids = array("i")
        self._is_seen: np.ndarray | None = None  # [vocab] bool; once the size of the vocabulary is known
        self._added: list[int] = []  # tokens that both lack

    def add(self, token_id: int) -> None:
        """Take in a token that was generated."""
        self._added.append(token_id)

    def ids(self, num_embeddings: int) -> array[int]:
        """Return the tokens so far; do not change them."""
        if self._is_seen is None:
            self._is_seen = self._prompt.seen(num_embeddings).copy()
            self._ids.frombytes(self._prompt.seen_ids(num_embeddings).tobytes())
        for token_id in self._added:
            if not self._is_seen[token_id]:
                self._is_seen[token_id] = True
                self._ids.append(token_id)
        self._added.clear()
        return self._ids


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
        self._biases = Biases(rules.sequence_bias)
        self._bans = Biases(rules.bad_words_ids), Biases(rules.bad_words)
        num_before = max(
            *(rules.no_repeat_ngram_size - 1, rules.encoder_no_repeat_ngram_size - 1, 0),
            *(biases.num_before for biases in (self._biases, *self._bans)),
        )
        # The generated tokens behind as many of the prompt's as any rule looks at.
        self._own = array("i", prompt.token_ids[-num_before:] if num_before else ())
        self._seen = None if params.repetition_penalty == 1 else SeenTokens(prompt)
        self._ends = np.array(sorted(params.stop_token_ids), np.int32)
        self._forced_bos = np.array(
            [] if rules.forced_bos_token_id is None else [rules.forced_bos_token_id], np.int32
        )
        self._forced_eos = _ids(rules.forced_eos_token_id)
        self._suppressed = _ids(rules.suppress_tokens)
        self._begin_suppressed = _ids(rules.begin_suppress_tokens)

    def apply(
        self,
        logits: Tensor,  # [vocab] float32 on the CPU; minus infinity for tokens that a mask does not allow
    ) -> Tensor:  # [vocab]
        """Return the logits of the next token as the rules change them."""
        scores = logits.clone()
        # The same memory.
        values = scores.numpy()
        ends = _below(self._ends, len(values))
        self._biases.add_to(values, self._own)
        self._penalize_repetition(values)
        self._ban_ngrams(values)
        self._ban_words(values, ends)
        if self._num_missing() > 0:
            values[ends] = -math.inf
        self._force(values)
        self._decay(values, ends)
        values[_below(self._suppressed, len(values))] = -math.inf
        if self._num_generated == self._begin():
            values[_below(self._begin_suppressed, len(values))] = -math.inf
        if self._params.is_constrained:
            # A forced or biased token is none that the mask does not allow.
            scores[logits == -math.inf] = -math.inf
        return scores if scores.amax() > -math.inf else logits

    def add(self, token_id: int) -> None:
        """Take in the token that was sampled."""
        self._own.append(token_id)
        if self._seen is not None:
            self._seen.add(token_id)
        self._num_tokens += 1
        self._num_generated += 1

    def _penalize_repetition(self, scores: np.ndarray) -> None:
        if self._rules.encoder_repetition_penalty != 1:
            seen = self._prompt.seen_ids(len(scores))
            _penalize(scores, seen, 1 / self._rules.encoder_repetition_penalty)
        if self._seen is not None:
            own = np.asarray(self._seen.ids(len(scores)))
            _penalize(scores, own, self._params.repetition_penalty)

    def _ban_ngrams(self, scores: np.ndarray) -> None:
        size = self._rules.no_repeat_ngram_size
        # No view of it may be left: an array of which there is one cannot grow.
        own = np.asarray(self._own)
        for ids, num_before in (
            (self._prompt.ids, size - 1),
            (own, size - 1),
            (self._prompt.ids, self._rules.encoder_no_repeat_ngram_size - 1),
        ):
            if 0 <= num_before <= len(own):
                scores[_following(ids, own[len(own) - num_before :])] = -math.inf

    def _ban_words(self, scores: np.ndarray, ends: np.ndarray) -> None:
        due = [bans.due(self._own, len(scores)) for bans in self._bans]
        # transformers never bans an end token alone.
        spared = scores[ends]
        for alone, _ in (first for first, *_ in due):
            scores[alone] = -math.inf
        scores[ends] = spared
        for ids, _ in (one for _, *behind in due for one in behind):
            scores[ids] = -math.inf

    def _num_missing(self) -> int:
        """Return how many more tokens the sequence must have before it may end."""
        if self._rules.min_new_tokens is not None:
            return self._rules.min_new_tokens - self._num_generated
        return self._rules.min_length - self._num_tokens

    def _force(self, scores: np.ndarray) -> None:
        for is_now, given in (
            (self._num_tokens == 1, self._forced_bos),
            (self._num_generated == self._params.max_new_tokens - 1, self._forced_eos),
        ):
            if is_now and len(forced := _below(given, len(scores))):
                scores.fill(-math.inf)
                scores[forced] = 0.0

    def _decay(self, scores: np.ndarray, ends: np.ndarray) -> None:
        if self._rules.exponential_decay_length_penalty is None:
            return
        start, factor = self._rules.exponential_decay_length_penalty
        if self._num_generated > start:
            try:
                grown = min(factor ** (self._num_generated - start) - 1, MAX_PENALTY)
            except OverflowError:
                grown = MAX_PENALTY
            own = scores[ends]
            scores[ends] = own + np.where(np.isfinite(own), np.abs(own), 0) * np.float32(grown)

    def _begin(self) -> int:
        """Return which generated token the tokens of `begin_suppress_tokens` must not be."""
        is_forced = self._rules.forced_bos_token_id is not None and len(self._prompt.token_ids) == 1
        return int(is_forced)


class Biases:
    """A `BiasTable` as arrays over the bytes of its request."""

    def __init__(self, table: BiasTable) -> None:
        self._tokens, self._children, self._entries, self._lengths = (
            memoryview(part).cast("i")
            for part in (table.tokens, table.children, table.entries, table.lengths)
        )
        self._ids, self._values = _ids(table.ids), np.frombuffer(table.values, np.float32)

    @property
    def num_before(self) -> int:
        """The most tokens that stand before one whose logit changes."""
        return max(self._lengths, default=0)

    def due(self, tokens: Sequence[int], num_embeddings: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return what is due behind the end of a sequence, in the order in which it is added up.

        Args:
            tokens: the last `num_before` of the sequence at least, or all of it.
            num_embeddings: ids from here on are left out.

        Returns:
            Different ids ``[number]`` int32 and their numbers ``[number]`` float32, for each length of tokens before;
            the first are due behind any. Views.
        """
        if not self._lengths:
            return [(self._ids, self._values)]
        found, node = {0: 0}, 0
        for length, token in enumerate(reversed(tokens), 1):
            end = self._children[node + 1]
            node = bisect_left(self._tokens, token, self._children[node], end)
            if node == end or self._tokens[node] != token:
                break
            found[length] = node
        return [self._of_node(found[length], num_embeddings) for length in self._lengths if length in found]

    def add_to(self, scores: np.ndarray, tokens: Sequence[int]) -> None:
        """Add to scores ``[vocab]`` float32 in place what is due behind the end of a sequence."""
        due = [one for one in self.due(tokens, len(scores)) if len(one[0])]
        if len(due) > 1:
            # Added up apart, as in transformers: another order of additions rounds otherwise.
            total = np.zeros_like(scores)
            for ids, values in due:
                total[ids] += values
            scores += total
        elif due:
            ids, values = due[0]
            scores[ids] += values

    def _of_node(self, node: int, num_embeddings: int) -> tuple[np.ndarray, np.ndarray]:
        begin, end = self._entries[node], self._entries[node + 1]
        ids = _below(self._ids[begin:end], num_embeddings)
        return ids, self._values[begin : begin + len(ids)]


def _ids(raw: bytes) -> np.ndarray:
    """Return a list of `GenerationRules` as an array ``[number]`` int32 over its bytes."""
    return np.frombuffer(raw, np.int32)


def _below(ids: np.ndarray, num_embeddings: int) -> np.ndarray:
    """Return those of token ids in their order that a variant has."""
    return ids[: ids.searchsorted(num_embeddings)]


def _following(ids: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the tokens int32 that follow tokens equal to `before` in a sequence ``[tokens]`` int32.

    Reads the sequence once for each token of `before`, as far as anything equals it: less than attention to it does. A
    table of its n-grams would take half a second to make for a prompt of 128k tokens, on the thread of all requests.
    """
    num_ends = len(ids) - len(before)
    if num_ends <= 0:
        return ids[:0]
    equal = np.ones(num_ends, bool)
    for place, token_id in enumerate(before):
        equal &= ids[place : place + num_ends] == token_id
        if not equal.any():
            break
    return ids[len(before) :][equal]


def _penalize(scores: np.ndarray, seen: np.ndarray, penalty: float) -> None:
    """Lower in place the scores of different tokens that were seen; a penalty below 1 raises them."""
    own = scores[seen]
    scores[seen] = np.where(own < 0, own * np.float32(penalty), own / np.float32(penalty))


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
        self._num_missing = 0 if params.is_constrained else params.min_tokens
        self._ends = array("i", sorted(params.stop_token_ids) if self._num_missing else ())
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
        ends = self._ends[: bisect_left(self._ends, num_embeddings)]
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
        self.warpers = [] if self.greedy else _warpers(params)
        self._biases = TokenBiases(params)
        # What another sampler would not draw.
        self.is_own = (
            self.rules is not None
            or (params.seed is not None and not self.greedy)
            or not self._biases.are_none
        )
        # Of a sequence with a penalty and no rules.
        has_seen = self.rules is None and params.repetition_penalty != 1
        self._seen = SeenTokens(prompt) if has_seen else None
        # About what a token takes in the kernels, and in all, in argmaxes.
        self.drawn_cost = _drawn_cost(params, is_ruled=self.rules is not None, is_warped=bool(self.warpers))
        self._unseen_cost = self.drawn_cost
        self.cost = self.drawn_cost + RULED * (self.rules is not None) + WARPED * len(self.warpers)
        self._changing_s = 0.0
        self._params = params
        self._seed = secrets.randbits(63) if params.seed is None else params.seed + index
        self._num_sampled = 0

    def add(self, token_id: int) -> None:
        """Take in the next token, sampled here or by an engine before this one."""
        self._num_sampled += 1
        self._biases.add(token_id)
        if self.rules is not None:
            self.rules.add(token_id)
        elif self._seen is not None:
            self._seen.add(token_id)

    def draw(self, logits: Tensor) -> int:
        """Return the next token without taking it in: until then it is the same for the same logits ``[vocab]``."""
        return draw_all(logits[None], [(self, len(logits))])[0]

    def take_changing_s(self) -> float:
        """Return the seconds that the rules took since the last call."""
        seconds, self._changing_s = self._changing_s, 0.0
        return seconds

    def plan(self, num_embeddings: int) -> Draw:
        """Return how the next token is drawn from `num_embeddings` logits, or `scores` of a sequence with rules."""
        params, uniform = self._params, 0.0 if self.greedy else draw_uniform(self._seed, self._num_sampled)
        if self.warpers:
            return Draw(num_embeddings, uniform)
        truncation = 0.0 if self.greedy else params.temperature, params.top_k, params.top_p, params.min_p
        if self.rules is not None or (self._seen is None and self._biases.are_none):
            return Draw(num_embeddings, uniform, *truncation)
        seen = array("i") if self._seen is None else self._seen.ids(num_embeddings)
        self.drawn_cost = self._unseen_cost + len(seen) / SEEN_PER_ARGMAX
        return Draw(
            *(num_embeddings, uniform, *truncation, params.repetition_penalty, seen),
            *self._biases.due(num_embeddings),
        )

    def scores(self, logits: Tensor) -> Tensor:
        """Return the logits ``[vocab]`` of the next token behind all that `plan` leaves out for a row with rules."""
        began = time.monotonic()
        scores = self._changed(logits)
        self._changing_s += time.monotonic() - began
        return scores

    def _changed(self, logits: Tensor) -> Tensor:
        biased, biases = self._biases.due(len(logits))
        if biased:
            ids = torch.tensor(biased, dtype=torch.long)
            logits = logits.index_add(0, ids, torch.tensor(biases, dtype=torch.float32))
        scores = logits if self.rules is None else self.rules.apply(logits)
        # Others cannot be drawn from, and some warpers refuse them.
        if self.warpers and scores.amax().isfinite():
            for warp in self.warpers:
                scores = warp(scores)
        return scores


def divided(samplers: Sequence[Sampler], seconds: float) -> list[float]:
    """Divide what drawing a batch took among its rows: to each what its rules took, and of the rest by its parameters.

    A row with rules may read its context, and by an estimate others would pay for it.
    """
    own = [sampler.take_changing_s() for sampler in samplers]
    costs = [sampler.drawn_cost for sampler in samplers]
    rate = max(0.0, seconds - sum(own)) / sum(costs)
    return [changing + cost * rate for changing, cost in zip(own, costs, strict=True)]


def sample(
    logits: Tensor,  # [rows, vocab] float32, on any device
    rows: Sequence[tuple[Sampler, int]],  # of each row: its sampler, and the size of its variant's vocabulary
) -> list[SampledToken | EngineFailed]:
    """Sample the next token of each sequence of a batch, and take it in. A row that cannot be sampled gets its error.

    Logits beyond a variant's vocabulary belong to tokens of other variants in the batch and would change the draw.
    """
    tokens = draw_all(logits, rows)
    wanted = [row for row, token in enumerate(tokens) if rows[row][0].num_logprobs is not None and token >= 0]
    scored: dict[int, ScoredToken] = {}
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
# rules of a generation config, whatever their number, and for each warper that the kernels do not know.
DRAWN, WITH_TOP_P, WITH_MIN_P, WITH_PENALTY, WITH_LOGPROBS = 0.8, 2.6, 0.4, 1.0, 2.6
# A greater top-k than a row has blocks takes as much as top-p.
WITH_TOP_K, SMALL_TOP_K = 0.2, 64
RULED, WARPED = 2.0, 40.0
# Tokens that were seen whose penalties take as long as an argmax.
SEEN_PER_ARGMAX = 15_000


def _drawn_cost(params: SamplingParams, *, is_ruled: bool, is_warped: bool) -> float:
    """Return about what the kernels take for a token, in argmaxes."""
    cost = 1.0 + (0.0 if params.logprobs is None else WITH_LOGPROBS)
    if params.repetition_penalty != 1 and not is_ruled:
        cost += WITH_PENALTY
    if params.temperature >= GREEDY_BELOW:
        cost += DRAWN
        if not is_warped:
            cost += WITH_TOP_K * (params.top_k > 0) + WITH_MIN_P * (params.min_p > 0)
            cost += WITH_TOP_P * ((params.top_p < 1) + (params.top_k > SMALL_TOP_K))
    return cost


Warper = Callable[[Tensor], Tensor]


def _warpers(params: SamplingParams) -> list[Warper]:
    """Return what changes logits ``[vocab]`` in turn, if some of it is nothing that `draw` of kernels does."""
    rules = params.rules
    if rules.top_h is None and rules.typical_p >= 1 and not _cuts(rules.epsilon_cutoff, rules.eta_cutoff):
        return []
    chosen: list[Warper] = [lambda scores: scores / params.temperature]
    if rules.top_h is not None:
        chosen.append(_warper(TopHLogitsWarper(rules.top_h)))
    if params.top_k > 0:
        chosen.append(lambda scores: _keep_first(scores, -scores, torch.ones_like(scores), params.top_k))
    if params.top_p < 1:
        chosen.append(lambda scores: _keep_first(scores, -scores, scores.softmax(-1), params.top_p))
    if params.min_p > 0:
        chosen.append(_warper(MinPLogitsWarper(params.min_p)))
    if rules.typical_p < 1:
        chosen.append(lambda scores: _keep_typical(scores, rules.typical_p))
    if _cuts(rules.epsilon_cutoff):
        chosen.append(_warper(EpsilonLogitsWarper(rules.epsilon_cutoff)))
    if _cuts(rules.eta_cutoff):
        chosen.append(_warper(EtaLogitsWarper(rules.eta_cutoff)))
    return chosen


def _cuts(*cutoffs: float) -> bool:
    return any(0 < cutoff < 1 for cutoff in cutoffs)


def _warper(warper: Callable[[Any, Tensor], Tensor]) -> Warper:
    """Return a warper of transformers, none of which looks at the tokens of the sequence, for one row."""
    return lambda scores: warper(NO_TOKENS, scores[None])[0]


def _keep_typical(scores: Tensor, mass: float) -> Tensor:
    """Return scores ``[vocab]`` as transformers' TypicalLogitsWarper does: those about as likely as a token is."""
    logprobs = functional.log_softmax(scores, -1)
    weights = logprobs.exp()
    entropy = -(logprobs * weights).nansum()
    return _keep_first(scores, (-logprobs - entropy).abs(), weights, mass)


def _keep_first(
    scores: Tensor,  # [vocab]
    order: Tensor,  # [vocab] float32: the least come first
    weights: Tensor,  # [vocab] float32
    amount: float,
) -> Tensor:
    """Return the scores; all behind the first whose weights add up to `amount` are minus infinity. Equals are kept.

    A sort would take several times as long. The last one that is kept is found by the upper bits of its key, and then
    by the lower ones of those that share them, so the time is the same whatever the logits are.
    """
    bits = (order + 0.0).numpy().view(np.uint32)
    # In the order of the numbers that they are the bits of.
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    own, upper = weights.numpy(), keys >> 16
    high, before = _bin_of(upper, own, amount)
    inside = upper == high
    low, _ = _bin_of(keys[inside] & 0xFFFF, own[inside], amount - before)
    kept = torch.from_numpy(keys <= np.uint32(high << 16 | low))
    return torch.where(kept, scores, -torch.inf)


def _bin_of(bins: np.ndarray, weights: np.ndarray, amount: float) -> tuple[int, float]:
    """Return the first bin with which the weights add up to `amount`, or else the last one, and the sum before it."""
    sums = np.bincount(bins, weights).cumsum()
    found = min(int(sums.searchsorted(amount)), len(sums) - 1)
    return found, float(sums[found - 1]) if found else 0.0
