"""Train all scales, and signs with them, end to end until the student predicts as the fine-tune does.

The paper's stage 3. Steps a `Student` toward `TeacherTargets`; independent of where text and deltas come from: which
text it sees is decided by `fit.TextSplit`. One batch goes forward block by block, keeping the input of each, and
backward block by block, computing each anew; so memory holds one block and a batch's hidden states, for a model of any
size. A matrix's signs move as soon as its gradient is complete, so that one matrix at a time has one.

Of the fine-tune, the teacher, hidden states are kept in place of logits, which would be many times larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_constant_schedule, get_cosine_schedule_with_warmup

from compressor.decoder.decoder import Decoder
from compressor.fidelity import last_hiddens
from compressor.fit.calibration import batched
from compressor.fit.student import Student


@dataclass(frozen=True, slots=True, eq=False)
class TeacherTargets:
    """Batches of text and the fine-tune's last hidden states on them."""

    batches: Sequence[Tensor]  # [sequences, tokens] int64 each
    hiddens: Sequence[Tensor]  # [sequences, tokens, hidden] each
    teacher: Decoder
    head: nn.Module  # the fine-tune's

    def first(self, count: int) -> TeacherTargets:
        """Return the first `count` sequences of the first batch alone."""
        return replace(self, batches=[self.batches[0][:count]], hiddens=[self.hiddens[0][:count]])

    def logits(self, number: int, rows: slice) -> Tensor:  # [1, len(rows), vocabulary]
        """Return the fine-tune's logits for a range of tokens of batch `number`, counted sequence after sequence."""
        with torch.no_grad():
            return self.teacher.logits(self.head, self.hiddens[number].flatten(0, -2)[None, rows])


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """The fine-tune with its head loaded, which makes targets of text."""

    decoder: Decoder
    head: nn.Module
    batch_tokens: int  # per batch at most

    def targets(self, sequences: Sequence[Tensor]) -> TeacherTargets:
        """Run sequences ``[tokens]`` int64 through the fine-tune, in batches."""
        batches = batched(sequences, self.batch_tokens)
        return TeacherTargets(batches, last_hiddens(self.decoder, batches), self.decoder, self.head)


LOGITS_NUMEL = 1 << 22  # of one model at a time; about eight such tensors exist at once
LOGITS_TOKENS = 128  # at least, because each part makes a gradient of the whole head
Loss = Literal["kl", "squared"]


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """Loss, epochs and learning rates of one distillation."""

    loss: Loss  # KL(fine-tune || student) per token, or the mean squared error of logits (paper, Algorithm 2)
    epochs: int
    rate: float  # of scales
    relative: bool = True  # `rate` is in units of each vector's mean magnitude
    cosine: bool = True  # lower the rates to 0 over all steps
    weight_decay: float = 0.0
    sign_rate: float = 0.0  # of latents, in units of an average difference; 0 keeps the signs
    signs_from: int = 1  # the first epoch in which signs move
    seed: int = 0
    keeps_best: bool = True  # keep the epoch that does best on validation text, else the last one

    @property
    def moves_signs(self) -> bool:
        """True if signs move in any epoch."""
        return self.sign_rate > 0 and self.epochs > self.signs_from


class Distillation:
    """A student in training, epoch by epoch. `state` after an epoch is all that the next epoch depends on."""

    def __init__(self, student: Student, targets: TeacherTargets, settings: DistillSettings) -> None:
        self.student, self.targets, self.settings = student, targets, settings
        self._scales = AdamW(self._parameters(), lr=settings.rate, weight_decay=settings.weight_decay)
        # Its optimizer is made when signs begin to move.
        self._signs: Adafactor | None = None
        self._schedules = [self._schedule(self._scales)]

    def epoch(self, number: int, on_step: Callable[[], object] = lambda: None) -> None:
        """Train on every batch once, in an order drawn from the seed; epochs count from 0 and come in their order."""
        num_batches = len(self.targets.batches)
        if self.settings.sign_rate and number == self.settings.signs_from:
            self.student.unfreeze_signs()
            self._optimize_signs(number * num_batches)
        generator = torch.Generator().manual_seed(self.settings.seed + number)
        for batch in torch.randperm(num_batches, generator=generator).tolist():
            self._scales.zero_grad()
            for name in _backward(self.student, self.targets, batch, self.settings.loss):
                self._step_signs(name)
            self._scales.step()
            on_step()
            for schedule in self._schedules:
                schedule.step()

    def state(self) -> dict[str, Any]:
        """Return everything that has moved, as tensors and plain containers.

        The tensors are not copied: write them out before the next epoch.
        """
        return {
            "numbers": [leaf.detach() for leaf in self._parameters()],
            "latents": {}
            if self._signs is None
            else {
                name: [latents.values for latents in delta.latents()]
                for name, delta in self.student.trained.items()
            },
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "schedules": [schedule.state_dict() for schedule in self._schedules],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`, whose tensors are taken over; the student is as before its first epoch."""
        if state["latents"]:
            self.student.restore_signs(state["latents"])
            self._optimize_signs(0)
        with torch.no_grad():
            for leaf, value in zip(self._parameters(), state["numbers"], strict=True):
                leaf.copy_(value)
        for optimizer, own in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        for schedule, own in zip(self._schedules, state["schedules"], strict=True):
            schedule.load_state_dict(own)

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [self._scales] if self._signs is None else [self._scales, self._signs]

    def _optimize_signs(self, num_steps_done: int) -> None:
        leaves = [latents.leaf for delta in self.student.trained.values() for latents in delta.latents()]
        groups = [{"params": leaves, "initial_lr": self.settings.sign_rate}]
        # Adafactor's second moments are one row and one column per matrix: the latents take enough memory. `foreach`
        # would keep the updates of several matrices at a time on a GPU.
        self._signs = Adafactor(groups, lr=self.settings.sign_rate, eps=(None, 1.0), foreach=False)
        self._schedules.append(self._schedule(self._signs, num_steps_done))

    def _schedule(self, optimizer: Optimizer, num_steps_done: int = 0) -> LambdaLR:
        """Half a cosine from the first rate down to 0 over all steps of all epochs, or a constant rate."""
        schedule: LambdaLR
        if self.settings.cosine:
            num_steps = self.settings.epochs * len(self.targets.batches)
            schedule = get_cosine_schedule_with_warmup(optimizer, 0, num_steps, last_epoch=num_steps_done - 1)
        else:
            schedule = get_constant_schedule(optimizer, last_epoch=num_steps_done - 1)
        return schedule

    def _step_signs(self, name: str) -> None:
        """Move the signs of a matrix whose gradient is complete; this step reads them no more."""
        if self._signs is not None:
            self.student.deltas[name].step_signs(self._signs)

    def _parameters(self) -> list[Tensor]:
        return [leaf for delta in self.student.trained.values() for leaf in delta.parameters()]


@torch.no_grad()
def divergence(student: Student, targets: TeacherTargets) -> float:
    """Mean KL(fine-tune || student) per token, in nats."""
    hiddens = [student.enter(ids).hidden for ids in targets.batches]
    for index in range(student.num_blocks):
        block = student.block(index)
        hiddens = [student.decoder.run(block, index, hidden) for hidden in hiddens]
    return divergence_of(student, targets, hiddens)


@torch.no_grad()
def divergence_of(student: Student, targets: TeacherTargets, hiddens: Sequence[Tensor]) -> float:
    """`divergence` from the last block's output, ``[sequences, tokens, hidden]`` for each batch."""
    total, count, head = 0.0, 0, student.head()
    for number, hidden in enumerate(hiddens):
        last = student.decoder.finish(hidden).flatten(0, -2)
        for rows in _token_ranges(student, len(last)):
            logits = student.decoder.logits(head, last[None, rows])
            total += float(_loss(logits, targets.logits(number, rows), "kl")) * logits.shape[1]
        count += len(last)
    return total / count


def _backward(student: Student, targets: TeacherTargets, number: int, loss: Loss) -> Iterator[str]:
    """Accumulate one batch's gradients in the deltas; yield the name of each matrix whose gradient is complete."""
    embedded = student.enter(targets.batches[number])
    hiddens = [embedded.hidden.detach()]
    with torch.no_grad():
        for index in range(student.num_blocks):
            hiddens.append(student.decoder.run(student.block(index), index, hiddens[-1]))
    head, last = student.head(), hiddens.pop()
    gradient = _backward_head(student, head, last, partial(targets.logits, number), loss)
    yield from student.accumulate_head_grad(head)
    for index in reversed(range(student.num_blocks)):
        hidden, block = hiddens.pop().requires_grad_(), student.block(index)
        torch.autograd.backward(student.decoder.run(block, index, hidden), gradient)
        yield from student.accumulate_block_grads(index, block)
        assert hidden.grad is not None
        gradient = hidden.grad
    if embedded.hidden.requires_grad:
        torch.autograd.backward(embedded.hidden, gradient)
        yield from student.accumulate_embedding_grad(embedded)


def _backward_head(
    student: Student, head: nn.Linear, hidden: Tensor, target_logits: Callable[[slice], Tensor], loss: Loss
) -> Tensor:
    """Return the loss's gradient of `hidden`, the last block's output; some tokens' logits exist at a time.

    Args:
        target_logits: the fine-tune's ``[1, tokens, vocabulary]`` for a range of the batch's tokens.
    """
    finished = student.decoder.finish(hidden.requires_grad_())
    last = finished.detach().flatten(0, -2).requires_grad_()
    for rows in _token_ranges(student, len(last)):
        target = target_logits(rows)
        part = _loss(student.decoder.logits(head, last[None, rows]), target, loss)
        torch.autograd.backward(part * (target.shape[1] / len(last)))
    assert last.grad is not None
    torch.autograd.backward(finished, last.grad.view_as(finished))
    assert hidden.grad is not None
    return hidden.grad


def _token_ranges(student: Student, count: int) -> Iterator[slice]:
    """Ranges of tokens whose logits exist at a time."""
    step = max(LOGITS_TOKENS, LOGITS_NUMEL // student.decoder.num_embeddings)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _loss(logits: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """Mean over tokens: KL in nats, or the squared error of logits."""
    if loss == "squared":
        return F.mse_loss(logits, target)
    return F.kl_div(
        logits.log_softmax(-1).flatten(0, 1),
        target.log_softmax(-1).flatten(0, 1),
        reduction="batchmean",
        log_target=True,
    )
