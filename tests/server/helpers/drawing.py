"""Draws of tokens, one by one in the order of the tokens, to compare the draws of batches with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from server.engine.sampler import SampledToken, Sampler, draw_uniform, sample


def walked(weights: Tensor, uniform: float) -> int:
    """Return the first token with which the sum of the weights ``[vocab]`` exceeds `uniform` of their total."""
    sums = weights.double().cumsum(-1)
    return int(torch.searchsorted(sums, uniform * sums[-1], right=True))


def sample_one(sampler: Sampler, logits: Tensor) -> SampledToken:
    """Sample and take in the next token of a sequence with logits ``[vocab]``."""
    (token,) = sample(logits[None], [(sampler, len(logits))])
    if isinstance(token, Exception):
        raise token
    return token


@contextmanager
def draws_of(seed: int) -> Iterator[None]:
    """Let transformers' `generate` draw as the first sequence of a request with a seed does."""
    positions = itertools.count()

    def multinomial(probabilities: Tensor, num_samples: int) -> Tensor:
        return torch.tensor([[walked(probabilities[0], draw_uniform(seed, next(positions)))]])

    with mock.patch.object(torch, "multinomial", multinomial):
        yield
