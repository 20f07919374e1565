"""Biases and penalties of single tokens, against their definition, computed anew for each token."""

from __future__ import annotations

import math
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import SequenceBiasLogitsProcessor

from server.engine.sampler import PromptHistory, Sampler
from server.protocol.request import SamplingParams
from server.protocol.rules import GenerationRules, id_list

VOCAB = 12
PENALTIES = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 2.0])
PARAMS = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    frequency_penalty=PENALTIES,
    presence_penalty=PENALTIES,
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.0, 0.5, 3.0]), max_size=6
    ).map(lambda biases: tuple(biases.items())),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.frozensets(st.integers(0, 20), max_size=3),
    max_new_tokens=st.just(16),
    # With a rule, a row is changed in torch and not in the kernel.
    rules=st.sampled_from([GenerationRules(), GenerationRules(suppress_tokens=id_list([3]))]),
)


def defined(logits: Tensor, params: SamplingParams, generated: list[int]) -> Tensor:
    scores = logits.clone()
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    for token_id, count in Counter(generated).items():
        scores[token_id] -= count * params.frequency_penalty + params.presence_penalty
    if len(generated) < params.min_tokens:
        scores[[token_id for token_id in params.stop_token_ids if token_id < VOCAB]] = -math.inf
    if not params.rules.is_neutral:
        scores[3] = -math.inf
    return scores


@settings(max_examples=200, deadline=None)
@given(PARAMS, st.integers(0, 2**31))
def test_each_token_is_the_likeliest_of_the_changed_logits(params: SamplingParams, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sampler, generated = Sampler(params, 0, PromptHistory([0, 1, 2])), list[int]()
    for _ in range(16):
        # Multiples of a quarter: sums of them are exact in any order.
        logits = torch.randint(-40, 40, (VOCAB,), generator=generator) / 4
        before = logits.clone()
        token = sampler.draw(logits)
        scores = defined(logits, params, generated)
        assert scores[token] == scores.max()
        assert torch.equal(logits, before)
        sampler.add(token)
        generated.append(token)


def test_a_sequence_that_goes_on_in_another_engine_is_penalized_alike() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25)
    first, second = (Sampler(params, 0, PromptHistory([0])) for _ in range(2))
    logits = torch.tensor([0.0, 1.0, 0.75, 0.5])
    drawn = []
    for _ in range(4):
        drawn.append(first.draw(logits))
        first.add(drawn[-1])
    for token in drawn:
        second.add(token)
    assert second.draw(logits) == first.draw(logits)


def test_a_bias_is_that_of_transformers() -> None:
    biases = {3: 2.5, 7: -100.0}
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    processor = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])
    wanted = processor(torch.tensor([[0]]), logits)[0].argmax()
    sampler = Sampler(
        SamplingParams(temperature=0.0, logit_bias=tuple(biases.items())), 0, PromptHistory([0])
    )
    assert sampler.draw(logits[0]) == wanted


def test_a_constrained_sequence_ends_where_its_grammar_does() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=frozenset({2}), is_constrained=True)
    logits = torch.full((VOCAB,), -math.inf)
    logits[2] = 1.0
    assert Sampler(params, 0, PromptHistory([0])).draw(logits) == 2
