"""End to end: all scales together, and signs with them, until the student predicts what the fine-tune predicts.

Knows a student, what the fine-tune gives at the end, and steps; nothing of where text or deltas come from. One batch
goes forward block by block, keeping what entered each, and backward block by block, computing each anew; so memory
holds one block and a batch's hidden states, whatever the model's size. A matrix's signs move as soon as its gradient is
complete, so that one matrix at a time has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adafactor, AdamW, Optimizer

from compressor.blockwise.decoder import Decoder
from compressor.fitting.distillation.student import Student

LOGITS_NUMEL = 1 << 22  # of one model at a time; some eight such tensors are there at once
LOGITS_TOKENS = 128  # at least, because each part makes a gradient of the whole head
Loss = Literal["kl", "squared"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the numbers move."""

    loss: Loss  # KL(fine-tune || student) per token, or the mean squared error of logits (paper, Algorithm 2)
    epochs: int
    rate: float  # of scales, relative or not as their `Trainable` says
    cosine: bool = True  # down to nothing over all steps
    weight_decay: float = 0.0
    sign_rate: float = 0.0  # of latents, in units of an average difference; 0 keeps the signs
    signs_from: int = 1  # the first epoch in which signs move
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TeacherTargets:
    """Text, and what the fine-tune makes of it: last hidden states, because logits would be many times larger."""

    batches: Sequence[Tensor]  # [sequences, tokens] int64 each
    hiddens: Sequence[Tensor]  # [sequences, tokens, hidden] each
    teacher: Decoder
    head: nn.Module  # the fine-tune's

    def first(self, count: int) -> TeacherTargets:
        """Its first sequences alone, of the first batch."""
        return replace(self, batches=[self.batches[0][:count]], hiddens=[self.hiddens[0][:count]])

    def logits(self, number: int, rows: slice) -> Tensor:  # [1, len(rows), vocabulary]
        """The fine-tune's, for some of a batch's tokens, sequence after sequence."""
        with torch.no_grad():
            return self.teacher.logits(self.head, self.hiddens[number].flatten(0, -2)[None, rows])


class Distillation:
    """A student that learns, epoch by epoch. Its state after an epoch is all that the next one depends on."""

    def __init__(self, student: Student, lesson: TeacherTargets, recipe: Recipe) -> None:
        self.student, self.lesson, self.recipe = student, lesson, recipe
        self._scales = AdamW(self._numbers(), lr=recipe.rate, weight_decay=recipe.weight_decay)
        self._signs: Adafactor | None = None  # until they move

    def epoch(self, number: int, on_step: Callable[[], object] = lambda: None) -> None:
        """Learn from every batch once; epochs count from 0 and come in their order."""
        if self.recipe.sign_rate and number == self.recipe.signs_from:
            self.student.release_signs()
            self._optimize_signs()
        num_batches = len(self.lesson.batches)
        generator = torch.Generator().manual_seed(self.recipe.seed + number)
        for step, batch in enumerate(torch.randperm(num_batches, generator=generator).tolist()):
            part = (number * num_batches + step) / (self.recipe.epochs * num_batches)
            for optimizer in self._optimizers:
                _slow_down(optimizer, part if self.recipe.cosine else 0.0)
            self._scales.zero_grad()
            for name in _backward(self.student, self.lesson, batch, self.recipe.loss):
                self._step_signs(name)
            self._scales.step()
            on_step()

    def state(self) -> dict[str, Any]:
        """Everything that has moved, as tensors and plain containers; no copy, so keep it before the next epoch."""
        return {
            "numbers": [leaf.detach() for leaf in self._numbers()],
            "latents": {}
            if self._signs is None
            else {
                name: [latents.values for latents in delta.latents()]
                for name, delta in self.student.trained.items()
            },
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`, which is taken over; the student is as it was when the first epoch began."""
        if state["latents"]:
            self.student.adopt_signs(state["latents"])
            self._optimize_signs()
        with torch.no_grad():
            for leaf, value in zip(self._numbers(), state["numbers"], strict=True):
                leaf.copy_(value)
        for optimizer, own in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [self._scales] if self._signs is None else [self._scales, self._signs]

    def _optimize_signs(self) -> None:
        # Its second moments are one row and one column per matrix: a latent is enough of a burden. On a GPU it would
        # else keep the updates of several matrices at a time.
        leaves = [latents.leaf for delta in self.student.trained.values() for latents in delta.latents()]
        self._signs = Adafactor(leaves, lr=self.recipe.sign_rate, eps=(None, 1.0), foreach=False)

    def _step_signs(self, name: str) -> None:
        """Move the signs of a matrix whose gradient is complete. Nothing asks for them again in this step."""
        if self._signs is not None:
            self.student.deltas[name].step_signs(self._signs)

    def _numbers(self) -> list[Tensor]:
        return [leaf for delta in self.student.trained.values() for leaf in delta.numbers()]


@torch.no_grad()
def divergence(student: Student, lesson: TeacherTargets) -> float:
    """Mean KL(fine-tune || student) per token, in nats."""
    hiddens = [student.enter(ids).hidden for ids in lesson.batches]
    for index in range(student.num_blocks):
        block = student.block(index)
        hiddens = [student.decoder.run(block, index, hidden) for hidden in hiddens]
    return divergence_of(student, lesson, hiddens)


@torch.no_grad()
def divergence_of(student: Student, lesson: TeacherTargets, hiddens: Sequence[Tensor]) -> float:
    """`divergence` from what leaves the last block, ``[sequences, tokens, hidden]`` for each batch."""
    total, count, head = 0.0, 0, student.head()
    for number, hidden in enumerate(hiddens):
        read = student.decoder.finish(hidden).flatten(0, -2)
        for rows in _some_tokens(student, len(read)):
            logits = student.decoder.logits(head, read[None, rows])
            total += float(_loss(logits, lesson.logits(number, rows), "kl")) * logits.shape[1]
        count += len(read)
    return total / count


def _slow_down(optimizer: Optimizer, part: float) -> None:
    """Half a cosine: the first rate at `part` 0, nothing at 1."""
    for group in optimizer.param_groups:
        first = group.setdefault("first_lr", group["lr"])
        group["lr"] = first * (1 + math.cos(math.pi * part)) / 2


def _backward(student: Student, lesson: TeacherTargets, number: int, loss: Loss) -> Iterator[str]:
    """Gradients of one batch's loss, collected in the deltas; the name of each matrix whose gradient is complete."""
    entry = student.enter(lesson.batches[number])
    hiddens = [entry.hidden.detach()]
    with torch.no_grad():
        for index in range(student.num_blocks):
            hiddens.append(student.decoder.run(student.block(index), index, hiddens[-1]))
    head, last = student.head(), hiddens.pop()
    gradient = _backward_head(student, lesson, number, head, last, loss)
    yield from student.collect_head(head)
    for index in reversed(range(student.num_blocks)):
        hidden, block = hiddens.pop().requires_grad_(), student.block(index)
        torch.autograd.backward(student.decoder.run(block, index, hidden), gradient)
        yield from student.collect_block(index, block)
        assert hidden.grad is not None
        gradient = hidden.grad
    if entry.hidden.requires_grad:
        torch.autograd.backward(entry.hidden, gradient)
        yield from student.collect_entry(entry)


def _backward_head(
    student: Student, lesson: TeacherTargets, number: int, head: nn.Linear, hidden: Tensor, loss: Loss
) -> Tensor:  # the gradient of `hidden`
    """From what leaves the last block to the loss and back, some tokens' logits at a time."""
    last = student.decoder.finish(hidden.requires_grad_())
    read = last.detach().flatten(0, -2).requires_grad_()
    for rows in _some_tokens(student, len(read)):
        target = lesson.logits(number, rows)
        part = _loss(student.decoder.logits(head, read[None, rows]), target, loss)
        torch.autograd.backward(part * (target.shape[1] / len(read)))
    assert read.grad is not None
    torch.autograd.backward(last, read.grad.view_as(last))
    assert hidden.grad is not None
    return hidden.grad


def _some_tokens(student: Student, count: int) -> Iterator[slice]:
    """Runs of tokens whose logits are there at a time."""
    step = max(LOGITS_TOKENS, LOGITS_NUMEL // student.decoder.num_embeddings)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _loss(logits: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """Per token: KL in nats, or the mean squared error of its logits."""
    if loss == "squared":
        return F.mse_loss(logits, target)
    return F.kl_div(
        logits.log_softmax(-1).flatten(0, 1),
        target.log_softmax(-1).flatten(0, 1),
        reduction="batchmean",
        log_target=True,
    )
