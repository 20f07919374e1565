"""The fine-tune as a teacher: its last hidden states on batches of text, and logits from them.

Runs the fine-tune's decoder; independent of students, deltas and losses. Hidden states are kept in place of logits,
which would be many times larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from compressor.blockwise.decoder import Decoder
from compressor.evaluate.fidelity import last_hiddens
from compressor.fitting.calibration import batched


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
