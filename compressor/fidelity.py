"""Compare the predictions of two models on given text: KL divergence, agreement, perplexity.

Logits are large, so a model's last hidden states are kept and logits are computed for some tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compressor.codec import row_blocks
from deltastore.console import rounded
from deltastore.errors import CheckpointError

# For types alone, because it imports transformers, which takes seconds.
if TYPE_CHECKING:
    from compressor.decoder.decoder import Decoder

LOGITS_NUMEL = 1 << 25  # logits of one model computed at a time: 128 MiB
DOUBLES_NUMEL = 1 << 21  # logits compared in float64 at a time
LARGEST_LOSS = 700.0  # its perplexity is still finite


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Distance of a model from its fine-tune on text."""

    kl: float  # nats per token: mean over positions of KL(fine-tune || model) of the next token's distributions
    agreement: float  # share of positions whose most likely next token is the same
    perplexity: float  # of the text under the model
    perplexity_finetune: float
    num_tokens: int  # positions, the last of each sequence included, which has no next token in the text

    def as_json(self) -> dict[str, float | int]:
        return {
            "kl": rounded(self.kl),
            "agreement": rounded(self.agreement),
            "perplexity": rounded(self.perplexity),
            "perplexity_finetune": rounded(self.perplexity_finetune),
            "num_tokens": self.num_tokens,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """A model's last hidden states on some batches, and the head that maps them to logits."""

    decoder: Decoder
    head: nn.Module
    hiddens: Sequence[Tensor]  # [sequences, tokens, hidden] each, one per batch, on any device

    @classmethod
    def of(
        cls, decoder: Decoder, batches: Sequence[Tensor], on_block: Callable[[], object] = lambda: None
    ) -> Predictions:
        """Run ids ``[sequences, tokens]`` through a model and load its head."""
        hiddens = last_hiddens(decoder, batches, on_block)
        return cls(decoder, decoder.load_head(), hiddens)

    def logits(self, batch: int, sequence: int, tokens: slice) -> Tensor:  # [tokens, vocabulary]
        """Return the logits of some tokens of one sequence.

        Raises:
            CheckpointError: they are not finite.
        """
        hidden = self.hiddens[batch][sequence : sequence + 1, tokens]
        logits = self.decoder.logits(self.head, hidden)[0]
        if not torch.isfinite(logits).all():
            raise CheckpointError(
                f"{self.decoder.weights.path}: its logits on this text are not finite: "
                "the checkpoint is damaged, or its training diverged"
            )
        return logits


@torch.no_grad()
def last_hiddens(
    decoder: Decoder, batches: Sequence[Tensor], on_block: Callable[[], object] = lambda: None
) -> list[Tensor]:
    """Return the last hidden states ``[sequences, tokens, hidden]`` of each batch of ids, on the CPU, block by block.

    Raises:
        CheckpointError: a model that cannot be run block by block, or a tensor that does not fit it.
    """
    hiddens = decoder.embed(batches)
    for index in range(decoder.num_blocks):
        decoder.advance(decoder.load_block(index), index, hiddens)
        on_block()
    decoder.finish_all(hiddens)
    return hiddens


def fidelity(teacher: Decoder, student: Decoder, batches: Sequence[Tensor]) -> Fidelity:
    """Return the fidelity of `student` to `teacher` on batches of ids ``[sequences, tokens]`` that are valid for both.

    Raises:
        CheckpointError: a model that cannot be run block by block, or whose logits are not finite.
    """
    return compare(Predictions.of(teacher, batches), Predictions.of(student, batches), batches)


@torch.no_grad()
def compare(teacher: Predictions, student: Predictions, batches: Sequence[Tensor]) -> Fidelity:
    """Return the fidelity of predictions on the same batches, over one vocabulary.

    KL(p || q) = sum over tokens of p log(p / q), in float64 from the logits on; perplexity is the exponential of the
    mean of -log q(next token).

    Raises:
        CheckpointError: logits that are not finite.
    """
    sums = _Sums()
    vocabulary = teacher.decoder.num_embeddings
    for batch, ids in enumerate(batches):
        for sequence, tokens in _chunks(ids, vocabulary):
            ours = student.logits(batch, sequence, tokens)
            # The last token of a sequence has no target.
            sums.add(
                teacher.logits(batch, sequence, tokens),
                ours,
                ids[sequence, tokens.start + 1 : tokens.stop + 1],
            )
    return sums.fidelity()


@dataclass(slots=True, eq=False)
class _Sums:
    """Sums over positions so far."""

    kl: float = 0.0
    num_agreeing: int = 0
    num_tokens: int = 0
    loss: float = 0.0
    loss_finetune: float = 0.0
    num_targets: int = 0

    def add(
        self,
        teacher: Tensor,  # [tokens, vocabulary] logits
        student: Tensor,  # [tokens, vocabulary] logits
        targets: Tensor,  # [tokens or one less] int64: the next ids
    ) -> None:
        targets = targets.to(teacher.device)
        for rows in row_blocks(tuple(teacher.shape), DOUBLES_NUMEL):
            log_p = teacher[rows].double().log_softmax(-1)
            log_q = student[rows].double().log_softmax(-1)
            came = targets[rows, None]
            self.loss_finetune -= float(log_p[: len(came)].gather(1, came).sum())
            self.loss -= float(log_q[: len(came)].gather(1, came).sum())
            self.num_targets += len(came)
            self.num_agreeing += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            self.num_tokens += len(log_p)
            self.kl += float((log_p.exp() * (log_p - log_q)).sum())

    def fidelity(self) -> Fidelity:
        return Fidelity(
            # Rounding can make a KL of zero negative.
            kl=max(0.0, self.kl / self.num_tokens),
            agreement=self.num_agreeing / self.num_tokens,
            perplexity=_perplexity(self.loss / self.num_targets),
            perplexity_finetune=_perplexity(self.loss_finetune / self.num_targets),
            num_tokens=self.num_tokens,
        )


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, LARGEST_LOSS))


def _chunks(ids: Tensor, vocabulary: int) -> Iterator[tuple[int, slice]]:
    """Yield the index of each sequence of a batch and slices of tokens whose logits are computed at once."""
    num_sequences, length = ids.shape
    step = max(1, LOGITS_NUMEL // vocabulary)
    for sequence in range(num_sequences):
        for first in range(0, length, step):
            yield sequence, slice(first, min(first + step, length))
