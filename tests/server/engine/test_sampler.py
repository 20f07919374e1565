"""Sampling of tokens from logits."""

from __future__ import annotations

import pytest
import torch

from server.engine.sampler import PromptHistory, SampledToken, Sampler, sample
from server.errors import EngineFailed, InvalidRequest
from server.protocol.request import SamplingParams
from tests.server.helpers.drawing import sample_one

LOGITS = torch.tensor([0.0, 2.0, 1.0, -torch.inf, 1.9])


def make_sampler(sampling: SamplingParams, prompt: tuple[int, ...] = (0,), index: int = 0) -> Sampler:
    return Sampler(sampling, index, PromptHistory(prompt))


def draws(sampling: SamplingParams, count: int = 200, index: int = 0) -> list[int]:
    sampler = make_sampler(sampling, index=index)
    return [sample_one(sampler, LOGITS).token_id for _ in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert set(draws(SamplingParams(temperature=0))) == {1}


def test_a_temperature_that_would_overflow_is_greedy() -> None:
    assert set(draws(SamplingParams(temperature=1e-300))) == {1}


def test_a_seed_gives_the_same_tokens_again() -> None:
    assert draws(SamplingParams(seed=7)) == draws(SamplingParams(seed=7))


def test_sequences_of_one_request_differ_by_their_index() -> None:
    assert draws(SamplingParams(seed=7), index=0) != draws(SamplingParams(seed=7), index=1)


def test_the_second_sequence_is_the_one_of_the_next_seed() -> None:
    assert draws(SamplingParams(seed=7), index=1) == draws(SamplingParams(seed=8), index=0)


def test_a_token_that_the_variant_lacks_is_never_drawn() -> None:
    assert 3 not in draws(SamplingParams(seed=1, temperature=50.0), 2000)


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draws(SamplingParams(seed=1, top_k=2, temperature=5.0))) == {1, 4}


def test_top_k_above_the_vocabulary_keeps_everything() -> None:
    assert set(draws(SamplingParams(seed=1, top_k=10_000, temperature=5.0))) == {0, 1, 2, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert set(draws(SamplingParams(seed=1, top_p=0.5))) == {1, 4}


def test_min_p_drops_what_is_far_less_likely_than_the_best() -> None:
    assert set(draws(SamplingParams(seed=1, min_p=0.3))) == {1, 2, 4}


def test_repetition_penalty_lowers_tokens_of_the_history() -> None:
    sampler = make_sampler(SamplingParams(temperature=0, repetition_penalty=2.0), (1,))
    assert sample_one(sampler, LOGITS).token_id == 4


def test_logprobs_are_the_models_own_whatever_the_sampling() -> None:
    sampling = SamplingParams(temperature=0, logprobs=3, repetition_penalty=3.0)
    sampled = sample_one(make_sampler(sampling, (1,)), LOGITS)
    want = LOGITS.log_softmax(-1)
    assert sampled.logprob == pytest.approx(float(want[sampled.token_id]))
    assert [token for token, _ in sampled.top] == [1, 4, 2]
    assert [logprob for _, logprob in sampled.top] == pytest.approx(want[[1, 4, 2]].tolist())


def test_logprobs_never_name_a_token_that_the_variant_lacks() -> None:
    sampled = sample_one(make_sampler(SamplingParams(temperature=0, logprobs=5)), LOGITS)
    assert [token for token, _ in sampled.top] == [1, 4, 2, 0]


@pytest.mark.parametrize("logits", [torch.tensor([0.0, torch.nan]), torch.full((4,), -torch.inf)])
def test_logits_that_are_not_finite_fail_the_request(logits: torch.Tensor) -> None:
    rows = torch.stack([logits, torch.zeros_like(logits)])
    failed, token = sample(rows, [(make_sampler(SamplingParams()), len(logits)) for _ in rows])
    assert isinstance(failed, EngineFailed)
    assert "not finite" in str(failed)
    assert isinstance(token, SampledToken)


@pytest.mark.parametrize(
    "field",
    [
        {"max_new_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5},
        {"top_k": -1}, {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"logprobs": 21}, {"n": 0}, {"stop": ("",)},
        {"temperature": float("inf")},
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_by_name(field: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**field)  # type: ignore[arg-type]
    assert caught.value.param == next(iter(field))
