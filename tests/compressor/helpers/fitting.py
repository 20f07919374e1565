"""Students, teacher targets, and oracles that run whole models in float64, for tests of fitting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from compressor.codec import code_matrix
from compressor.config import Method
from compressor.decoder.decoder import Decoder
from compressor.fidelity import last_hiddens
from compressor.fit.distill import TeacherTargets
from compressor.fit.student import Student
from compressor.fit.trainable import Trainable
from compressor.pairs import TensorPair, pair_up
from deltastore.checkpoint import Checkpoint
from deltastore.format.matrix import Axis, MatrixDelta, SignPlane, pack_signs
from deltastore.format.sizes import is_matrix
from tests.compressor.helpers.compressing import SINGLE
from tests.compressor.helpers.decoders import CPU, make_model
from tests.helpers.tiny_models import TinyModels

# By the name in checkpoints, the name of the module in transformers.
LATER_NAMES = {"embed_out.weight": "lm_head.weight"}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids_of(seed: int, sequences: int, tokens: int, below: int = 259) -> Tensor:
    return torch.randint(below, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def random_delta(
    shape: tuple[int, int], axis: Axis = "both", planes: int = 1, rank: int = 0, size: float = 0.1
) -> MatrixDelta:
    """A delta of random signs and uneven scales, some of them negative."""

    def plane(number: int) -> SignPlane:
        signs = pack_signs(normal(10 * number, *shape))
        out = size * normal(10 * number + 1, *((1,) if axis == "scalar" else shape[:1]))
        scale_in = 1 + 0.5 * normal(10 * number + 2, shape[1])
        scales = (None if axis == "in" else out, scale_in if axis in ("in", "both") else None)
        return SignPlane.from_scales(signs, shape[1], *scales)

    first = tuple(plane(number) for number in range(planes))
    if not rank:
        return MatrixDelta(first)
    return MatrixDelta(first, normal(7, shape[0], rank).half(), size * normal(8, rank, shape[1]).half())


def dense64(delta: MatrixDelta) -> Tensor:
    """The weights of a delta by their formula, in float64."""
    total = torch.zeros(delta.out_features, delta.in_features, dtype=torch.float64)
    for plane in delta.planes:
        signs = torch.tensor(
            [
                [1.0 if row[column // 8] >> column % 8 & 1 else -1.0 for column in range(plane.in_features)]
                for row in plane.signs.tolist()
            ]
        ).double()
        out = torch.ones(1) if plane.scale_out is None else plane.scale_out
        scale_in = torch.ones(1) if plane.scale_in is None else plane.scale_in
        total += plane.gain * out.double()[:, None] * signs * scale_in.double()
    if delta.left is not None and delta.right is not None:
        total += delta.left.double() @ delta.right.double()
    return total


def with_experts(architecture: str, directory: Path, noise: float = 0.2) -> TinyModels:
    """A base of any architecture of `decoders.py`, and a fine-tune that is the base with noise."""
    base, finetune = make_model(architecture, directory), directory / "finetune-0"
    tensors = load_file(base / SINGLE)
    finetune.mkdir()
    for file in base.iterdir():
        if file.name != SINGLE:
            (finetune / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor += noise * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, finetune / SINGLE, metadata={"format": "pt"})
    return TinyModels(base, [finetune])


def pairs_of(models: TinyModels, *, embeddings: bool = True) -> dict[str, TensorPair]:
    """Return the matrices to code, by name."""
    both = pair_up(Checkpoint.open(models.base), Checkpoint.open(models.finetunes[0]))
    return {
        pair.name: pair for pair in both.tensors if is_matrix(pair.name, pair.shape, embeddings=embeddings)
    }


def coded(pairs: Mapping[str, TensorPair], method: Method = "both") -> dict[str, MatrixDelta]:
    """Deltas from weights alone."""
    return {name: MatrixDelta((code_matrix(pair, method).delta,)) for name, pair in pairs.items()}


def student_of(
    models: TinyModels, deltas: Mapping[str, MatrixDelta] | None = None, *, relative: bool = True
) -> Student:
    """A student with `deltas`, by default those of `both` axes from weights alone."""
    pairs = pairs_of(models)
    own = coded(pairs) if deltas is None else deltas
    pairs = {name: pair for name, pair in pairs.items() if name in own}
    trainable = {name: Trainable.of(own[name], CPU, relative=relative) for name in pairs}
    return Student(Checkpoint.open(models.finetunes[0]), pairs, trainable, CPU)


def targets_of(models: TinyModels, batches: Sequence[Tensor]) -> TeacherTargets:
    """Return the first fine-tune's targets on ids ``[sequences, tokens]``."""
    teacher = Decoder(Checkpoint.open(models.finetunes[0]), CPU, torch.float32)
    return TeacherTargets(batches, last_hiddens(teacher, batches), teacher, teacher.load_head())


class Whole:
    """The fine-tune in transformers and float64; each call can replace some of its weights."""

    def __init__(self, models: TinyModels) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(models.finetunes[0], dtype=torch.float64)
        self.model.requires_grad_(False)
        # The gradient of a padding row would be dropped.
        setattr(self.model.get_input_embeddings(), "padding_idx", None)  # noqa: B010

    def logits(self, ids: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return logits ``[sequences, tokens, vocabulary]``; `weights` does not name a tied head."""
        own = {LATER_NAMES.get(name, name): weight for name, weight in (weights or {}).items()}
        output = torch.func.functional_call(self.model, own, (), {"input_ids": ids})
        logits: Tensor = output.logits
        return logits

    def squared(self, ids: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Mean squared error of logits."""
        return (self.logits(ids, weights) - self.logits(ids)).square().mean()

    def kl(self, ids: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Mean KL(fine-tune || with `weights`) per token."""
        target, got = (self.logits(ids, own).flatten(0, 1).log_softmax(-1) for own in (None, weights))
        return F.kl_div(got, target, reduction="batchmean", log_target=True)


def weights_with(
    pairs: Mapping[str, TensorPair], deltas: Mapping[str, Tensor]
) -> dict[str, Tensor]:  # float64
    """By name, the base's weights plus a delta ``[out, in]``, with the rows that the fine-tune adds."""
    weights = {}
    for name, delta in deltas.items():
        base, added = pairs[name].base.read(pairs[name].base_tensor.name).double(), pairs[name].added()
        weight = base + delta
        weights[name] = weight if added is None else torch.cat([weight, added.double()])
    return weights
