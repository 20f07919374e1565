"""One forward pass over a mixed batch: pieces of sequences in, logits out. Owns the model; knows no requests."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from server.deltas.batch import DeltaBatch
from server.deltas.resident import ResidentDelta
from server.model.attention import Chunk, Layout
from server.model.loader import ServedModel


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence that a step computes."""

    ids: Items[int]
    chunk: Chunk
    delta: ResidentDelta | None
    num_kept: int  # of its last tokens, how many logits are wanted


class ModelRunner:
    """Runs the model for many sequences at a time, each with the delta of its variant."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    @property
    def device(self) -> torch.device:
        return self._served.device

    @torch.inference_mode()
    def forward(
        self,
        pieces: Items[Piece],  # those of one delta together
        fresh: Items[int],  # pages that hold another sequence's past
    ) -> Tensor:  # [kept, vocabulary] float32
        """Logits of the kept tokens, in order; minus infinity for tokens that a piece's variant lacks."""
        attention, counts = self._served.attention, [len(piece.ids) for piece in pieces]
        layout = Layout.of([piece.chunk for piece in pieces], attention.page_tokens, self.device)
        kept = [piece.num_kept for piece in pieces]
        batch = DeltaBatch.of([piece.delta for piece in pieces], counts, kept)
        ids = [token for piece in pieces for token in piece.ids]
        positions = [piece.chunk.start + i for piece in pieces for i in range(len(piece.ids))]
        attention.clear(fresh)
        with self._served.context.step(batch), attention.step(layout):
            output = self._served.model(
                input_ids=torch.tensor([ids], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                logits_to_keep=torch.tensor(_last(counts, kept), dtype=torch.long, device=self.device),
            )
        logits: Tensor = output.logits[0].float()
        return logits

    def is_usable(self) -> bool:
        """Whether the device still works after a failed step; a sticky CUDA error leaves it lost."""
        try:
            return bool(torch.ones(1, device=self.device).sum() == 1)
        except RuntimeError:
            return False


def _last(counts: Items[int], kept: Items[int]) -> list[int]:
    """Rows of the flat batch whose logits are wanted."""
    rows: list[int] = []
    end = 0
    for count, wanted in zip(counts, kept, strict=True):
        end += count
        rows += range(end - wanted, end)
    return rows
