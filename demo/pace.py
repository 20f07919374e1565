"""The pace of a training loop: its learning rate at each step, and a line about it every ten seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

LINE_INTERVAL_S = 10.0
CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How long, how fast, and who hears of it."""

    what: str
    steps: int
    warmup: int
    progress: Callable[[str], None]

    def factor(self, step: int) -> float:
        """Of the learning rate: a linear rise, then half a cosine down to nearly nothing."""
        rise = min(1.0, (step + 1) / self.warmup)
        return rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / self.steps)))


def train(
    model: torch.nn.Module,
    optimizers: Sequence[Optimizer],
    losses: Iterator[Tensor],
    pace: Pace,
) -> None:
    """Take a step for each of the first `pace.steps` losses. `losses` computes each from the model as it is then."""
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    model.train()
    told = time.monotonic()
    for step in range(pace.steps):
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * pace.factor(step)
        loss = next(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if time.monotonic() - told >= LINE_INTERVAL_S or step + 1 == pace.steps:
            told = time.monotonic()
            pace.progress(f"training {pace.what}: step {step + 1} of {pace.steps}, loss {loss.item():.3f}")
    model.eval()
