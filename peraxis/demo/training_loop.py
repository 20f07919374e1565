"""The training loop: gradient clipping, one learning rate schedule per optimizer, and progress lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import get_cosine_schedule_with_warmup

LINE_INTERVAL_S = 5.0
CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The length of a training and the receiver of its progress lines."""

    name: str
    num_steps: int
    num_warmup_steps: int
    progress: Callable[[str], None]


def train(
    model: torch.nn.Module,
    optimizers: Sequence[Optimizer],
    losses: Iterator[Tensor],
    run: TrainingRun,
) -> None:
    """Take one step for each of the first `run.num_steps` losses; `losses` computes each from the current weights.

    Learning rates rise linearly from 0 over the warmup and then fall to 0 by half a cosine.
    """
    schedules = [
        get_cosine_schedule_with_warmup(optimizer, run.num_warmup_steps, run.num_steps)
        for optimizer in optimizers
    ]
    model.train()
    last_line_s = time.monotonic()
    for step in range(1, run.num_steps + 1):
        loss = next(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if time.monotonic() - last_line_s >= LINE_INTERVAL_S or step == run.num_steps:
            last_line_s = time.monotonic()
            run.progress(f"training {run.name}: step {step} of {run.num_steps}, loss {loss.item():.3f}")
    model.eval()
