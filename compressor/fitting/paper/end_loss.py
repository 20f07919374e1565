"""The paper's Algorithm 3: the whole student's loss with one candidate in one layer; Algorithm 6 chooses by it.

Layers that are not fitted yet are the base's, as the student begins in Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.blockwise.decoder import Decoder
from compressor.blockwise.weights import Overlay, Weights
from compressor.evaluate.fidelity import last_hiddens
from compressor.fitting.layers.layerwise import StudentBlock
from compressor.fitting.weights import weight_with_delta
from compressor.io.pairs import TensorPair
from deltastore.format.sign_plane import SignPlane


class EndLoss:
    """Squared error of logits on validation batches, which are the last batches of a `StudentBlock`'s inputs.

    Reads every later block for each candidate.
    """

    def __init__(
        self,
        finetune: Weights,
        pairs: Mapping[str, TensorPair],
        validation: Sequence[Tensor],  # ids [sequences, tokens] each
        device: torch.device,
    ) -> None:
        self._pairs, self._fitted = pairs, set[str]()
        self._student = Decoder(Overlay(finetune, self._base), device, torch.float32)
        teacher = Decoder(finetune, device, torch.float32)
        head = teacher.load_head()
        with torch.no_grad():
            self._logits = [
                teacher.logits(head, hidden).cpu() for hidden in last_hiddens(teacher, validation)
            ]

    def __call__(self, pair: TensorPair, block: StudentBlock, delta: SignPlane) -> float:
        """Return the mean over batches of ``|| logits - the fine-tune's ||^2`` with `delta` in the layer of `pair`."""
        groups = block.decoder.linears(block.block, block.index)
        paths = {linear.name: linear.path for group in groups for linear in group}
        parameters = {
            name: block.block.get_submodule(paths[name]).get_parameter("weight")
            for name in paths.keys() & self._pairs.keys() - self._fitted
        }
        before = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                weight = weight_with_delta(self._pairs[name], delta if name == pair.name else None)
                parameter.data = weight.to(parameter.device, torch.float32)
            return self._of_student(block)
        finally:
            for name, parameter in parameters.items():
                parameter.data = before[name]

    def mark_fitted(self, name: str) -> None:
        """Mark a layer as fitted: later candidates are measured with its block's weight in place of the base's."""
        self._fitted.add(name)

    @torch.no_grad()
    def _of_student(self, block: StudentBlock) -> float:
        hiddens = [hidden.clone() for hidden in block.hiddens[-len(self._logits) :]]
        block.decoder.advance(block.block, block.index, hiddens)
        for index in range(block.index + 1, self._student.num_blocks):
            self._student.advance(self._student.load_block(index), index, hiddens)
        head, total = self._student.load_head(), 0.0
        for hidden, target in zip(hiddens, self._logits, strict=True):
            logits = self._student.logits(head, self._student.finish(hidden)).cpu()
            total += float(F.mse_loss(logits, target, reduction="sum"))
        return total / len(hiddens)

    def _base(self, name: str) -> Tensor | None:
        pair = self._pairs.get(name)
        return None if pair is None else weight_with_delta(pair, None)
