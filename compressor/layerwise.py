"""Coding layer by layer: each matrix is fitted to what the layers before it, coded already, will really feed it.

The student is the fine-tune with its coded matrices in place of its own (paper, section 2: X from the compressed stack
so far, Y from the fine-tune). Two blocks are in memory at a time, one of each model. Embeddings, and matrices that no
forward reaches with every token (experts), are coded from weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from compressor.calibration import Calibration, batched, calibration_text
from compressor.checkpoints import TensorPair
from compressor.codec import Method, code_matrix
from compressor.decoder import Decoder
from compressor.moments import Moments, Stage, block_moments, head_moments
from compressor.solve import Problem, Solved, solve
from compressor.weights import Overlay
from deltastore.checkpoint import Checkpoint
from deltastore.onebit import Axis, OneBit
from deltastore.signs import pack_signs

BATCH_TOKENS = 4096  # that one forward sees
AXES_OF: Mapping[Method, tuple[Axis, ...]] = {
    "scalar": ("scalar",),
    "per-axis": ("out", "in"),
    "both": ("both",),
}


@dataclass(frozen=True, slots=True)
class Fit:
    """How matrices are fitted."""

    method: Method
    sign_rounds: int  # 0 keeps the signs of the differences
    progress: bool = False


def fit_layerwise(
    pairs: Mapping[str, TensorPair], finetune: Checkpoint, calibration: Calibration, fit: Fit
) -> Mapping[str, OneBit]:
    """Fit matrices to calibration text; those that it cannot reach are not in the result.

    Raises:
        CheckpointError: a model that cannot be run block by block.
        UsageError: text that cannot be had or is too short.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = Decoder(finetune, device, torch.float32)
    sequences = calibration_text(calibration, teacher)
    with tqdm(total=teacher.num_blocks, desc="fitting layers", unit="block", disable=not fit.progress) as bar:
        layerwise = Layerwise(pairs, fit)
        return layerwise.run(
            finetune, batched(sequences, BATCH_TOKENS), device, on_block=lambda: bar.update(1)
        )


@dataclass(slots=True)
class Layerwise:
    """The coded matrices so far, by name, and the student that they make of the fine-tune."""

    pairs: Mapping[str, TensorPair]  # the matrices to code
    fit: Fit
    coded: dict[str, OneBit] = field(default_factory=dict)

    def run(
        self,
        finetune: Checkpoint,
        batches: Sequence[Tensor],
        device: torch.device,
        on_block: Callable[[], object],
    ) -> Mapping[str, OneBit]:
        """Fit every matrix that calibration reaches; `batches` are ids ``[sequences, tokens]``."""
        teacher = Decoder(finetune, device, torch.float32)
        student = Decoder(Overlay(finetune, self.replacement), device, torch.float32)
        entering_t, entering_s = teacher.embed(batches), student.embed(batches)
        for index in range(teacher.num_blocks):
            stages = (
                Stage(teacher, index, teacher.load_block(index), entering_t),
                Stage(student, index, student.load_block(index), entering_s),
            )
            self._block(*stages)
            for stage, hiddens in zip(stages, (entering_t, entering_s), strict=True):
                stage.decoder.advance(stage.block, index, hiddens)
            on_block()
        head = self.pairs.get(teacher.head_name or "")
        if head is not None and head.name != teacher.embedding_name:
            teacher.finish_all(entering_t)
            student.finish_all(entering_s)
            self._solve(head, head_moments(entering_t, entering_s, device))
        return self.coded

    def replacement(self, name: str) -> Tensor | None:
        """What the student has instead of one of the fine-tune's tensors, in its shape; None where it has the same."""
        pair = self.pairs.get(name)
        if pair is None:
            return None
        if name not in self.coded:
            self.coded[name] = code_matrix(pair, self.fit.method).delta
        added = pair.added()
        weight = pair.base.read(pair.base_tensor.name).float() + self.coded[name].dense()
        return weight if added is None else torch.cat([weight, added.float()])

    def _block(self, teacher: Stage, student: Stage) -> None:
        """Fit the linear layers of one block, in the order in which inputs reach them."""
        for group in student.decoder.linears(student.block, student.index):
            reached = [linear for linear in group if linear.name in self.pairs]
            if not reached:
                continue
            moments = block_moments(group[0], teacher, student)
            for linear in reached:
                self._solve(self.pairs[linear.name], moments)
                weight = student.block.get_submodule(linear.path).weight
                assert isinstance(weight, Tensor)
                replaced = self.replacement(linear.name)
                assert replaced is not None
                weight.data.copy_(replaced)

    def _solve(self, pair: TensorPair, moments: Moments) -> None:
        rows = slice(0, pair.shape[0])
        device = moments.gram.device
        finetune = pair.finetune.read(pair.tensor.name, rows).float().to(device)
        delta = pair.block(rows).to(device)
        problem = Problem(delta, moments.gram, moments.cross(delta, finetune), moments.count)
        best = min(self._solutions(problem), key=lambda solved: solved.loss)
        self.coded[pair.name] = OneBit.from_scales(
            pack_signs(best.signs.cpu()),
            delta.shape[1],
            None if best.scale_out is None else best.scale_out.cpu(),
            None if best.scale_in is None else best.scale_in.cpu(),
        )

    def _solutions(self, problem: Problem) -> Iterator[Solved]:
        for axis in AXES_OF[self.fit.method]:
            yield solve(problem, axis, sign_rounds=self.fit.sign_rounds)
