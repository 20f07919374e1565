"""The rival of a delta: a LoRA with as many bytes, extracted from the weight differences by truncated SVD.

It adapts the matrices that the delta codes, embedding and output head included, with factors in FP16. Tensors that the
delta stores whole, and rows that the base lacks, are the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from compressor.decoder.weights import DeltaModel, Overlay, weight_with_delta
from compressor.fidelity import Fidelity, fidelity
from compressor.pairs import ExpertPair, Pairs, TensorPair
from deltastore.console import progress_bar, rounded
from deltastore.format.artifact import Artifact
from deltastore.format.sizes import FP16_BYTES, tensor_bytes

# The exact decomposition of a square matrix of this size takes a second on one core.
LARGEST_EXACT = 1024
BATCH_TOKENS = 4096  # tokens of one forward
OVERSAMPLED, POWER_ITERATIONS = 16, 4  # of the randomised decomposition of larger ones


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of a LoRA within a number of bytes: one for all matrices, and one more for some of them."""

    rank: int  # a matrix with fewer rows or columns has as many as these
    raised: frozenset[int]  # indices of the matrices that have one rank more
    num_bytes: int  # of all factors


@dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """A model that is the base plus a LoRA."""

    weights: Overlay
    ranks: Ranks
    num_matrices: int
    # Of the artifact, with the LoRA's factors in place of signs, scales and low-rank residuals.
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Rival:
    """The distance from the fine-tune of a LoRA that has no more bytes than the artifact."""

    fidelity: Fidelity
    rank: int  # of every matrix that has as many rows and columns
    num_raised: int  # matrices with one rank more
    num_adapted: int  # matrices in all
    size_bytes: int
    artifact_bytes: int
    kept: float | None  # as `recovered_gain`

    @classmethod
    def of(cls, lora: Lora, artifact: Artifact, measured: Fidelity, base_kl: float) -> Self:
        return cls(
            measured,
            lora.ranks.rank,
            len(lora.ranks.raised),
            lora.num_matrices,
            lora.size_bytes,
            artifact.size_bytes,
            recovered_gain(measured.kl, base_kl),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "lora",
            **self.fidelity.as_json(),
            "kept": None if self.kept is None else rounded(self.kept),
            "rank": self.rank,
            "num_raised": self.num_raised,
            "num_adapted": self.num_adapted,
            "size_bytes": self.size_bytes,
            "artifact_bytes": self.artifact_bytes,
        }


def recovered_gain(kl: float, base_kl: float) -> float | None:
    """Return ``1 - KL / KL of the base``; None if base and fine-tune agree."""
    return 1 - kl / base_kl if base_kl else None


def measured_rival(
    pairs: Pairs,
    artifact: Artifact,
    text: Sequence[Tensor],  # [tokens] int64 each
    base_kl: float,
    device: torch.device,
    progress: bool,
) -> Rival:
    """Extract the LoRA and measure it on the text that the artifact's fidelity was measured on.

    Raises:
        CheckpointError: as `lora_of`, or logits that are not finite.
    """
    # Deferred, because they import transformers, which takes seconds.
    from compressor.decoder.decoder import Decoder
    from compressor.fit.calibration import batched

    lora = lora_of(pairs, DeltaModel(pairs.base, artifact), device, progress)
    teacher, student = (Decoder(each, device, torch.float32) for each in (pairs.finetune, lora.weights))
    measured = fidelity(teacher, student, batched(text, BATCH_TOKENS))
    return Rival.of(lora, artifact, measured, base_kl)


@dataclass(frozen=True, slots=True, eq=False)
class _Factors:
    """A truncated SVD, its singular values shared by both factors, in descending order."""

    left: Tensor  # [out, rank] float16
    right: Tensor  # [rank, in] float16
    sizes: Tensor  # [rank] float32: the singular values


@dataclass(frozen=True, slots=True, eq=False)
class _LoraDelta:
    """The difference that a LoRA gives for a matrix, or for each matrix of a stack."""

    matrices: Sequence[_Factors]
    is_stack: bool

    def dense(self, rows: slice) -> Tensor:
        """Return some rows ``[len(rows), in]``, or some matrices of a stack ``[len(rows), out, in]``, in float32."""
        if self.is_stack:
            return torch.stack([each.left.float() @ each.right.float() for each in self.matrices[rows]])
        (only,) = self.matrices
        return only.left[rows].float() @ only.right.float()


def lora_of(pairs: Pairs, variant: DeltaModel, device: torch.device, progress: bool) -> Lora:
    """Extract the LoRA that takes no more bytes than the delta's signs, scales and low-rank residuals.

    Every matrix gets the same rank, the largest that fits. Bytes that are left give one rank more to the matrices where
    it takes most off the squared weight error per byte. Factors of all matrices are held in memory in FP16.

    Args:
        pairs: Of the base and the fine-tune that the delta was made from.
        variant: The base with the delta.
        device: Where matrices are decomposed, one at a time in float32.
        progress: Show progress on stderr.

    Raises:
        CheckpointError: NaN or infinity in either checkpoint.
    """
    manifest = variant.artifact.manifest
    coded = [
        pair
        for pair in pairs.tensors
        if (spec := manifest.tensors.get(pair.name)) is not None and spec.codec != "whole"
    ]
    matrices = [matrix for pair in coded for matrix in _matrices(pair)]
    shapes = [(matrix.shape[0], matrix.shape[1]) for matrix in matrices]
    budget = sum(_coded_bytes(variant, pair.name) for pair in coded)
    rank = common_rank(shapes, budget)
    with progress_bar(len(matrices), "extracting the LoRA", "matrix", progress) as bar:
        factors = []
        for matrix in matrices:
            # One rank more than the common one, for the matrices that get it.
            factors.append(_truncated(_difference(matrix).to(device), rank + 1))
            bar.update()
    gains = [float(each.sizes[rank] ** 2) if len(each.sizes) > rank else 0.0 for each in factors]
    ranks = share(shapes, gains, rank, budget)
    kept = [
        _Factors(
            each.left[:, : rank + (number in ranks.raised)],
            each.right[: rank + (number in ranks.raised)],
            each.sizes,
        )
        for number, each in enumerate(factors)
    ]
    deltas: dict[str, tuple[TensorPair, _LoraDelta]] = {}
    for pair in coded:
        count = len(_matrices(pair))
        deltas[pair.name] = pair, _LoraDelta(kept[:count], pair.transposed is not None)
        kept = kept[count:]
    size_bytes = variant.artifact.size_bytes - budget + ranks.num_bytes
    return Lora(Overlay(variant, lambda name: _weight(deltas, name)), ranks, len(matrices), size_bytes)


def common_rank(shapes: Sequence[tuple[int, int]], budget_bytes: int) -> int:
    """Return the largest rank whose factors of all matrices fit into a number of bytes; 0 if none does."""
    rank, largest = 0, max((min(shape) for shape in shapes), default=0)
    while rank < largest and _num_bytes(shapes, rank + 1) <= budget_bytes:
        rank += 1
    return rank


def share(shapes: Sequence[tuple[int, int]], gains: Sequence[float], rank: int, budget_bytes: int) -> Ranks:
    """Give one rank more than the common one to matrices, the greatest gain per byte first, while bytes are left.

    Args:
        shapes: Of the matrices.
        gains: What a further rank takes off each squared weight error; 0 where the matrix has its full rank.
        rank: The common rank.
        budget_bytes: For all factors.
    """
    used, raised = _num_bytes(shapes, rank), set()
    for number in sorted(range(len(shapes)), key=lambda each: -gains[each] / sum(shapes[each])):
        cost = FP16_BYTES * sum(shapes[number])
        if gains[number] and used + cost <= budget_bytes:
            used += cost
            raised.add(number)
    return Ranks(rank, frozenset(raised), used)


def _num_bytes(shapes: Sequence[tuple[int, int]], rank: int) -> int:
    return sum(FP16_BYTES * sum(shape) * min(rank, *shape) for shape in shapes)


def _coded_bytes(variant: DeltaModel, name: str) -> int:
    sizes = tensor_bytes(variant.artifact, name)
    return sizes["signs"] + sizes["scales"] + sizes["low_rank"]


def _matrices(pair: TensorPair) -> Sequence[TensorPair | ExpertPair]:
    return [pair] if pair.transposed is None else pair.experts()


def _difference(matrix: TensorPair | ExpertPair) -> Tensor:  # [out, in] float32
    return matrix.row_block(slice(0, matrix.shape[0]))


def _truncated(difference: Tensor, rank: int) -> _Factors:
    """Return the first ranks of the SVD: exact for a small matrix, else with a seeded random projection."""
    rank = min(rank, *difference.shape)
    if min(difference.shape) <= LARGEST_EXACT:
        left, sizes, right = torch.linalg.svd(difference, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[difference.device] if difference.is_cuda else []):
            torch.manual_seed(0)
            width = min(rank + OVERSAMPLED, *difference.shape)
            left, sizes, turned = torch.svd_lowrank(difference, q=width, niter=POWER_ITERATIONS)
        right = turned.T
    root = sizes[:rank].sqrt()
    # Contiguous, so that the whole decomposition is not kept.
    return _Factors(
        (left[:, :rank] * root).half().cpu().contiguous(),
        (root[:, None] * right[:rank]).half().cpu().contiguous(),
        sizes[:rank].cpu().clone(),
    )


def _weight(deltas: Mapping[str, tuple[TensorPair, _LoraDelta]], name: str) -> Tensor | None:
    """Return the base's weights plus the LoRA's; None for a tensor that it does not adapt."""
    return None if name not in deltas else weight_with_delta(*deltas[name])
