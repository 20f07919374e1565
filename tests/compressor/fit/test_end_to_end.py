"""The paper's last stage (Algorithm 2) and BitDelta's epoch, against float64 autograd through whole models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.config import Calibration, FitSettings
from compressor.fit.distill import Distillation, DistillSettings
from compressor.fit.fit import recipe_of
from compressor.fit.paper import WEIGHT_DECAY
from compressor.fit.trainable import TrainablePlane
from compressor.pairs import TensorPair
from deltastore.format.matrix import Axis, MatrixDelta, SignPlane, pack_signs, unpack_signs
from tests.compressor.helpers.fitting import Whole, ids_of, pairs_of, student_of, targets_of, weights_with
from tests.compressor.helpers.paper_oracle import DECAY, AdamW64
from tests.helpers.tiny_models import Change, TinyModels, make_pair

BATCHES = [ids_of(seed, 2, 10) for seed in range(3)]
# So large that the steps and their decay stand out from float32 rounding.
RATE, LARGE_DECAY = 1e-3, 5.0
METHODS: Mapping[str, tuple[Axis, ...]] = {"per-axis": ("out", "in"), "scalar": ("scalar",)}


@dataclass
class Scaled:
    """A matrix's signs, and the vector or number that trains."""

    signs: Tensor  # [out, in] float64
    axis: Axis
    scale: Tensor  # float64

    def dense(self) -> Tensor:
        return self.signs * (self.scale[:, None] if self.axis == "out" else self.scale)


def begun(pairs: Mapping[str, TensorPair], axes: tuple[Axis, ...]) -> dict[str, MatrixDelta]:
    """Deltas whose scales are mean magnitudes of the differences, on `axes` in turn."""
    deltas = {}
    for number, (name, pair) in enumerate(pairs.items()):
        axis, difference = axes[number % len(axes)], pair.row_block(slice(0, pair.shape[0]))
        size = difference.abs()
        scale = size.mean()[None] if axis == "scalar" else size.mean(1 if axis == "out" else 0)
        scales = (None, scale) if axis == "in" else (scale, None)
        deltas[name] = MatrixDelta((SignPlane.from_scales(pack_signs(difference), pair.shape[1], *scales),))
    return deltas


def scaled(delta: MatrixDelta) -> Scaled:
    plane = delta.planes[0]
    scale = plane.scale_in if plane.scale_out is None else plane.scale_out
    assert scale is not None
    return Scaled(
        unpack_signs(plane.signs, plane.in_features).double(), plane.axis, plane.gain * scale.double()
    )


def gradients(
    whole: Whole, pairs: Mapping[str, TensorPair], state: Mapping[str, Scaled], ids: Tensor
) -> dict[str, Tensor]:
    for own in state.values():
        own.scale = own.scale.detach().requires_grad_()
    weights = weights_with(pairs, {name: own.dense() for name, own in state.items()})
    torch.autograd.backward(whole.squared(ids, weights))
    found = {}
    for name, own in state.items():
        assert own.scale.grad is not None
        found[name] = own.scale.grad
    return found


def trained(
    models: TinyModels, deltas: Mapping[str, MatrixDelta], recipe: DistillSettings
) -> dict[str, tuple[Tensor, Tensor]]:
    """By matrix, scales before and after Algorithm 2, with batches in each epoch's own order."""
    pairs, whole = pairs_of(models), Whole(models)
    state = {name: scaled(delta) for name, delta in deltas.items()}
    first = {name: own.scale for name, own in state.items()}
    optimizers = {name: AdamW64(recipe.weight_decay) for name in state}
    for epoch in range(recipe.epochs):
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        for batch in torch.randperm(len(BATCHES), generator=generator).tolist():
            for name, gradient in gradients(whole, pairs, state, BATCHES[batch]).items():
                own = state[name]
                own.scale = optimizers[name].stepped(own.scale.detach(), gradient, recipe.rate)
    return {name: (first[name], own.scale) for name, own in state.items()}


def only_scale(plane: TrainablePlane) -> Tensor:
    scale = plane.scale_in if plane.scale_out is None else plane.scale_out
    assert scale is not None
    return scale.value.double()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(("method", "epochs"), [("per-axis", 2), ("scalar", 1)])
def test_scales_are_those_of_adamw_through_the_whole_model_in_float64(
    method: str, epochs: int, architecture: str, tmp_path: Path
) -> None:
    models = make_pair(architecture, tmp_path, changes=(Change(noise=0.2, added_tokens=2),))
    deltas = begun(pairs_of(models), METHODS[method])
    recipe = DistillSettings("squared", epochs, RATE, cosine=False, weight_decay=LARGE_DECAY)
    student = student_of(models, deltas, relative=False)
    run = Distillation(student, targets_of(models, BATCHES), recipe)
    for epoch in range(epochs):
        run.epoch(epoch)
    for name, (before, expected) in trained(models, deltas, recipe).items():
        (plane,) = student.deltas[name].planes
        assert torch.allclose(
            only_scale(plane), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().mean())
        )
        moved = (only_scale(plane) - before) - (expected - before)
        assert float(moved.norm()) < 0.02 * float((expected - before).norm())
        (stored,) = student.stored()[name].planes
        scale = stored.scale_in if stored.scale_out is None else stored.scale_out
        assert scale is not None
        assert scale.dtype == torch.float16
        assert torch.allclose(stored.gain * scale.double(), only_scale(plane), rtol=2**-11, atol=1e-9)


def test_gradients_of_early_scalars_flow_through_the_deltas_of_later_layers(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(noise=0.5),))
    pairs, whole = pairs_of(models), Whole(models)
    deltas = begun(pairs, ("scalar",))
    student = student_of(models, deltas, relative=False)
    Distillation(student, targets_of(models, BATCHES[:1]), DistillSettings("squared", 1, 0.0)).epoch(0)
    expected = gradients(whole, pairs, {name: scaled(delta) for name, delta in deltas.items()}, BATCHES[0])
    shallow = without_delta_paths(whole, pairs, deltas, "model.layers.0.mlp.up_proj.weight")
    for name, gradient in expected.items():
        plane = student.deltas[name].planes[0]
        assert plane.scale_out is not None
        assert plane.scale_out.leaf.grad is not None
        assert float(plane.scale_out.leaf.grad) == pytest.approx(float(gradient), rel=2e-3, abs=1e-5)
    assert abs(float(shallow / expected["model.layers.0.mlp.up_proj.weight"]) - 1) > 0.05


def without_delta_paths(
    whole: Whole, pairs: Mapping[str, TensorPair], deltas: Mapping[str, MatrixDelta], name: str
) -> Tensor:
    """Return the gradient of one scalar when no gradient flows through the deltas of later layers."""
    linears = [key for key in pairs if "embed" not in key]
    plain = {key: scaled(delta).dense() for key, delta in deltas.items()}
    weights = weights_with(pairs, plain | {key: torch.zeros(pairs[key].shape) for key in linears})
    target = whole.logits(BATCHES[0])
    scale = scaled(deltas[name]).scale.requires_grad_()
    hooks = []
    for key in linears:
        own = scaled(deltas[key])
        own.scale = scale if key == name else own.scale
        module = whole.model.get_submodule(key.removesuffix(".weight"))
        hooks.append(
            module.register_forward_hook(
                lambda module, args, output, own=own: output + args[0].detach() @ own.dense().T
            )
        )
    torch.autograd.backward((whole.logits(BATCHES[0], weights) - target).square().mean())
    for hook in hooks:
        hook.remove()
    assert scale.grad is not None
    return scale.grad


def test_the_papers_budget_is_five_epochs_of_vectors_and_one_of_scalars() -> None:
    paper = FitSettings(Calibration("self", 200, 192), recipe="paper")
    vectors, scalars = (recipe_of(paper, method).distillation for method in ("per-axis", "scalar"))
    assert (vectors.epochs, scalars.epochs, vectors.rate, scalars.rate) == (5, 1, 1e-4, 1e-4)
    assert vectors.weight_decay == scalars.weight_decay == WEIGHT_DECAY == DECAY
