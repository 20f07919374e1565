"""Distillation: gradients against autograd through the whole model, and what steps do to a student."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from compressor.checkpoints import TensorPair, pair_up
from compressor.codec import code_matrix
from compressor.decoder import Decoder
from compressor.fitting.distill import Lesson, Recipe, _backward, distill
from compressor.fidelity import last_hiddens
from compressor.fitting.student import Student
from compressor.fitting.trainable import Trainable
from deltastore.checkpoint import Checkpoint
from deltastore.matrix import MatrixDelta
from deltastore.plan import is_matrix
from tests.tiny_models import Change, TinyModels, make_pair

CPU = torch.device("cpu")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix_delta(pair: TensorPair, method: Any, planes: int = 1, rank: int = 0) -> MatrixDelta:
    """A delta of a pair, whose further planes and residual are arbitrary."""
    first = code_matrix(pair, method).delta
    left, right = (0.01 * random(1, pair.shape[0], rank).half(), random(2, rank, pair.shape[1]).half())
    return MatrixDelta((first,) * planes, *((left, right) if rank else (None, None)))


def student_of(
    models: TinyModels, deltas: Mapping[str, MatrixDelta] | None = None, **trainable: Any
) -> Student:
    finetune = Checkpoint.open(models.finetunes[0])
    pairs = {
        pair.name: pair
        for pair in pair_up(Checkpoint.open(models.base), finetune).tensors
        if is_matrix(pair.name, pair.shape)
    }
    own = {name: matrix_delta(pair, "both") for name, pair in pairs.items()} | dict(deltas or {})
    return Student(
        finetune,
        pairs,
        {name: Trainable.of(delta, relative=True) for name, delta in own.items()},
        CPU,
    )


def lesson_of(models: TinyModels, count: int = 4, batch: int = 2, length: int = 12) -> Lesson:
    teacher = Decoder(Checkpoint.open(models.finetunes[0]), CPU, torch.float32)
    generator = torch.Generator().manual_seed(3)
    batches = [
        torch.randint(0, teacher.num_embeddings, (batch, length), generator=generator) for _ in range(count)
    ]
    return Lesson(batches, last_hiddens(teacher, batches), teacher, teacher.load_head())


class Oracle(nn.Module):
    """The weight of a coded matrix as a function of leaves of its own, in float64."""

    def __init__(self, base: Tensor, rows: int, delta: MatrixDelta) -> None:
        super().__init__()
        self.base, self.rows = base.double(), rows
        self.signs = [plane.dense().sign().double() for plane in delta.planes]
        self.out = [plane.factor_out().double().requires_grad_() for plane in delta.planes]
        self.across = [
            plane.scale_in.double().requires_grad_() for plane in delta.planes if plane.scale_in is not None
        ]

    def forward(self, weight: Tensor) -> Tensor:
        total = self.base[: self.rows]
        for signs, out, across in zip(self.signs, self.out, self.across, strict=True):
            total = total + signs * out[:, None] * across
        return torch.cat([total, weight[self.rows :]])


@pytest.mark.parametrize("loss", ["kl", "squared"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma", "gpt_neox"])
def test_gradients_are_those_of_autograd_through_the_whole_model(
    architecture: str, loss: Any, tmp_path: Path
) -> None:
    models = make_pair(architecture, tmp_path, changes=(Change(added_tokens=2, noise=0.2),))
    student, lesson = student_of(models), lesson_of(models)
    _backward(student, lesson, 1, loss)
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(models.finetunes[0], dtype=torch.float64).requires_grad_(False)
        for _ in range(2)
    )
    model.get_input_embeddings().padding_idx = None  # whose gradient the library would drop
    oracles = {}
    for name, pair in student.pairs.items():
        base = pair.base.read(pair.base_tensor.name)
        oracles[name] = Oracle(base, len(base), student.deltas[name].stored())
        is_head = name == student.decoder.head_name != student.decoder.embedding_name
        owner = model.get_output_embeddings() if is_head else model.get_submodule(name.rpartition(".")[0])
        nn.utils.parametrize.register_parametrization(owner, "weight", oracles[name], unsafe=True)
    if model.config.tie_word_embeddings:
        nn.utils.parametrize.register_parametrization(
            model.get_output_embeddings(), "weight", oracles[str(student.decoder.embedding_name)], unsafe=True
        )
    target, got = (net(input_ids=lesson.batches[1]).logits.flatten(0, 1) for net in (teacher, model))
    if loss == "kl":
        value = F.kl_div(got.log_softmax(-1), target.log_softmax(-1), reduction="batchmean", log_target=True)
    else:
        value = (got - target).square().mean()
    torch.autograd.backward(value)
    for name, oracle in oracles.items():
        plane = student.deltas[name].planes[0]
        assert plane.out is not None
        assert plane.across is not None
        for own, expected in ((plane.out, oracle.out[0].grad), (plane.across, oracle.across[0].grad)):
            assert expected is not None
            assert own.leaf.grad is not None
            # The oracle's factors share their product otherwise; what a step along one changes is the same.
            assert torch.allclose(
                own.leaf.grad.double() / own.unit, expected, rtol=2e-3, atol=1e-4 * expected.abs().max()
            )
