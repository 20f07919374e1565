"""One forward pass over a mixed batch: sequences in, logits out. Owns the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from server.deltas.resident import ResidentDelta
from server.engine.sequence import Sequence
from server.model.attention import AttentionMetadata, Chunk
from server.model.loader import ServedModel


class ScheduledSequence(NamedTuple):
    """A sequence in a step."""

    sequence: Sequence
    num_tokens: int  # how many of its next tokens the step computes
    delta: ResidentDelta | None  # None is the base


Batch = list[ScheduledSequence]


class ModelRunner:
    """Runs the model for a batch of sequences, each with the delta of its variant."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    @property
    def device(self) -> torch.device:
        return self._served.device

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,  # sequences of one delta stand together
        pages_to_zero: list[int],  # pages that hold keys and values of another sequence
    ) -> Tensor:  # [logits, vocab] float32
        """Compute the batch's tokens. Return `Sequence.num_logits` rows per sequence, in the batch's order.

        Logits are minus infinity for tokens that a sequence's variant lacks.
        """
        attention = self._served.attention
        counts = [item.num_tokens for item in batch]
        num_logits = [item.sequence.num_logits(item.num_tokens) for item in batch]
        chunks = [_chunk(item, attention.page_tokens) for item in batch]
        metadata = AttentionMetadata.of(chunks, attention.page_tokens, self.device)
        own_deltas = [item.delta for item in batch]
        token_ids: list[int] = []
        positions: list[int] = []
        for sequence, num_tokens, _ in batch:
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
            token_ids += sequence.token_ids(start, end)
            positions += range(start, end)
        attention.clear(pages_to_zero)
        with self._served.context.step(own_deltas, counts, num_logits), attention.step(metadata):
            output = self._served.model(
                input_ids=torch.tensor([token_ids], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                logits_to_keep=torch.tensor(
                    _logits_rows(counts, num_logits), dtype=torch.long, device=self.device
                ),
            )
        logits: Tensor = output.logits[0].float()
        if self.device.type == "cuda":
            # Otherwise the time of the pass would count as that of sampling, which waits for it.
            torch.cuda.synchronize(self.device)
        return logits

    def is_usable(self) -> bool:
        """Return whether the device still works after a failed step; a sticky CUDA error leaves it lost."""
        try:
            return bool(torch.ones(1, device=self.device).sum() == 1)
        except RuntimeError:
            return False


def _chunk(item: ScheduledSequence, page_tokens: int) -> Chunk:
    """Return what a step computes of a sequence, without the pages of tokens that later steps compute."""
    start, pages = item.sequence.num_computed_tokens, item.sequence.page_table.pages
    return Chunk(start, item.num_tokens, pages[: -(-(start + item.num_tokens) // page_tokens)])


def _logits_rows(counts: list[int], num_logits: list[int]) -> list[int]:
    """Return the rows of the flat batch whose logits are computed: the last ones of each sequence."""
    rows: list[int] = []
    end = 0
    for count, kept in zip(counts, num_logits, strict=True):
        end += count
        rows += range(end - kept, end)
    return rows
