"""One forward pass: ids of one sequence in, logits of its last token out. Owns the model; knows no requests."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from server.deltas.batch import DeltaBatch
from server.deltas.resident import ResidentDelta
from server.model.loader import ServedModel


class Runner:
    """Runs the model for one sequence at a time, with the delta of its variant."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    @property
    def device(self) -> torch.device:
        return self._served.device

    def new_cache(self) -> DynamicCache:
        """An empty key-value cache for one sequence."""
        return DynamicCache(config=self._served.model.config)

    @torch.inference_mode()
    def forward(
        self,
        ids: list[int],  # the tokens that the cache does not hold yet
        cache: DynamicCache,  # grows by len(ids)
        delta: ResidentDelta | None,
        vocab_size: int,  # rows of the variant's embedding
    ) -> Tensor:  # [vocab_size] float32
        """Logits of the token that follows."""
        batch = DeltaBatch.of([delta], [len(ids)], [1])
        start = cache.get_seq_length()
        positions = torch.arange(start, start + len(ids), device=self.device)
        with self._served.context.step(batch):
            output = self._served.model(
                input_ids=torch.tensor([ids], device=self.device),
                position_ids=positions[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = output.logits[0, -1, :vocab_size].float()
        return logits

    def is_usable(self) -> bool:
        """Whether the device still works after a failed step; a sticky CUDA error leaves it lost."""
        try:
            return bool(torch.ones(1, device=self.device).sum() == 1)
        except RuntimeError:
            return False
