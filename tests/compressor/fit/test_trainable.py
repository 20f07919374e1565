"""A delta in training: its weights and gradients against float64, and its stored form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from compressor.fit.trainable import LARGEST_LATENT, Rows, ScaledParameter, Trainable
from deltastore.format.matrix import AXES, Axis, MatrixDelta, SignPlane, pack_signs, unpack_signs
from tests.compressor.helpers.decoders import CPU
from tests.compressor.helpers.fitting import dense64, normal, random_delta

SHAPE = (12, 19)  # rows of 2 3/8 bytes of signs
IDS = torch.tensor([7, 0, 11, 4])
FORMS = pytest.mark.parametrize(("planes", "rank"), [(1, 0), (2, 0), (1, 3), (2, 3)])


def near(got: Tensor, expected: Tensor, part: float = 1e-5) -> bool:
    return float((got.double() - expected).abs().max()) <= part * float(expected.abs().max())


@FORMS
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("axis", AXES)
def test_its_weights_are_those_of_the_stored_delta(
    axis: Axis, relative: bool, planes: int, rank: int
) -> None:
    delta = random_delta(SHAPE, axis, planes, rank)
    trainable = Trainable.of(delta, CPU, relative=relative)
    for rows in (slice(None), slice(3, 9), IDS):
        assert near(trainable.dense(rows), dense64(delta)[rows], 1e-6)
        assert near(delta.dense()[rows], dense64(delta)[rows], 1e-6)


class Oracle:
    """A delta of float64 leaves by the formula: planes, then a residual."""

    def __init__(self, delta: MatrixDelta) -> None:
        self.scales_out, self.scales_in, self.signs = [], [], []
        for plane in delta.planes:
            unit = plane.gain if plane.scale_out is None else 1.0
            self.scales_out.append(
                None if plane.scale_out is None else _leaf(plane.scale_out.double() * plane.gain)
            )
            self.scales_in.append(None if plane.scale_in is None else _leaf(plane.scale_in.double() * unit))
            self.signs.append(_leaf(unpack_signs(plane.signs, plane.in_features).double()))
        self.left, self.right = (
            None if part is None else _leaf(part.double()) for part in (delta.left, delta.right)
        )

    def dense(self) -> Tensor:
        total = torch.zeros(SHAPE, dtype=torch.float64)
        for signs, scale_out, scale_in in zip(self.signs, self.scales_out, self.scales_in, strict=True):
            expanded = torch.ones(1) if scale_out is None else scale_out
            total = total + expanded[:, None] * signs * (torch.ones(1) if scale_in is None else scale_in)
        return total if self.left is None or self.right is None else total + self.left @ self.right


def _leaf(value: Tensor) -> Tensor:
    return value.clone().requires_grad_()


def agree(own: ScaledParameter | None, oracle: Tensor | None) -> None:
    assert (own is None) == (oracle is None)
    if own is not None and oracle is not None:
        assert own.leaf.grad is not None
        assert oracle.grad is not None
        assert near(own.leaf.grad, oracle.grad * own.unit)


@FORMS
@pytest.mark.parametrize("rows", [slice(None), slice(2, 7), IDS], ids=["all", "some", "by id"])
@pytest.mark.parametrize("axis", AXES)
def test_gradients_of_every_part_are_those_of_autograd(
    axis: Axis, rows: Rows, planes: int, rank: int
) -> None:
    delta = random_delta(SHAPE, axis, planes, rank)
    trainable, oracle = Trainable.of(delta, CPU, relative=True), Oracle(delta)
    trainable.unfreeze_signs(normal(5, *SHAPE))
    for seed in (20, 21):  # gradients add up
        gradient = normal(seed, *SHAPE)[rows]
        trainable.accumulate_grad(gradient.clone(), rows)
        torch.autograd.backward(oracle.dense()[rows], gradient.double())
    for plane, scale_out, scale_in, signs in zip(
        trainable.planes, oracle.scales_out, oracle.scales_in, oracle.signs, strict=True
    ):
        agree(plane.scale_out, scale_out)
        agree(plane.scale_in, scale_in)
        assert plane.latents is not None
        assert plane.latents.gradient is not None
        assert signs.grad is not None
        assert near(plane.latents.gradient, signs.grad)  # straight-through: the sign's own gradient
    agree(trainable.left, oracle.left)
    agree(trainable.right, oracle.right)


@FORMS
@pytest.mark.parametrize("axis", AXES)
def test_what_did_not_move_is_stored_as_it_was(axis: Axis, planes: int, rank: int) -> None:
    delta = random_delta(SHAPE, axis, planes, rank)
    trainable = Trainable.of(delta, CPU, relative=True)
    again = trainable.stored()
    trainable.unfreeze_signs(normal(5, *SHAPE))
    for stored in (again, trainable.stored()):
        assert (stored.axis, stored.num_planes, stored.rank) == (axis, planes, rank)
        for own, plane in zip(stored.planes, delta.planes, strict=True):
            assert torch.equal(own.signs, plane.signs)
        assert near(stored.dense(), dense64(delta), 2**-9)  # each FP16 vector is rounded once more
        if axis != "both":
            assert torch.equal(stored.dense(), delta.dense())
    if rank:
        assert again.left is not None
        assert delta.left is not None
        assert torch.equal(again.left, delta.left)


@pytest.mark.parametrize(("moved", "unit"), [(True, 0.25), (False, 1.0)])
def test_a_relative_step_is_in_units_of_the_vectors_mean_magnitude(moved: bool, unit: float) -> None:
    numbers = ScaledParameter.of(torch.tensor([0.5, -0.25, 0.0]), CPU, relative=moved)
    assert numbers.unit == unit
    with torch.no_grad():
        numbers.leaf.add_(0.01)
    assert torch.allclose(numbers.value, torch.tensor([0.5, -0.25, 0.0]) + 0.01 * unit, atol=1e-7)


@pytest.mark.parametrize("axis", AXES)
def test_a_delta_of_zeros_stays_one_however_far_relative_steps_go(axis: Axis) -> None:
    zeros = torch.zeros(1 if axis == "scalar" else SHAPE[0])
    scales = (None if axis == "in" else zeros, torch.zeros(SHAPE[1]) if axis in ("in", "both") else None)
    delta = MatrixDelta((SignPlane.from_scales(pack_signs(normal(0, *SHAPE)), SHAPE[1], *scales),))
    trainable = Trainable.of(delta, CPU, relative=True)
    trainable.accumulate_grad(normal(1, *SHAPE))
    for leaf in trainable.parameters():
        assert leaf.grad is not None
        assert not leaf.grad.any()
        with torch.no_grad():
            leaf -= 0.5
    assert not trainable.dense().any()


def test_unfrozen_signs_stay_and_the_smallest_differences_flip_first() -> None:
    difference = normal(3, *SHAPE)
    delta = MatrixDelta(
        (SignPlane.from_scales(pack_signs(difference), SHAPE[1], torch.ones(SHAPE[0]), None),)
    )
    trainable = Trainable.of(delta, CPU, relative=True)
    before = trainable.dense()
    trainable.unfreeze_signs(difference.clone())
    assert torch.equal(trainable.dense(), before)
    (latents,) = trainable.latents()
    values = latents.values.double()
    order = difference.abs().flatten().argsort(stable=True)
    sizes = values.abs().flatten()[order]
    assert torch.equal(sizes, sizes.sort().values)
    assert float(values.abs().mean()) == pytest.approx(1, rel=0.01)
    latents.gradient = values.sign().float()
    trainable.step_signs(SGD([latents.leaf], lr=0.1))
    flipped = trainable.dense() != before
    assert flipped.any()
    assert torch.equal(flipped, difference.abs() < 0.1 * difference.abs().mean())
    assert torch.equal(trainable.stored().dense(), trainable.dense())


def test_a_step_leaves_neither_gradient_nor_float32_behind_and_what_was_stored_as_it_was() -> None:
    difference = normal(3, *SHAPE)
    trainable = Trainable.of(random_delta(SHAPE), CPU, relative=True)
    before = trainable.stored()
    kept = before.dense()
    trainable.unfreeze_signs(difference)
    (latents,) = trainable.latents()
    optimizer = SGD([latents.leaf], lr=1.0)
    trainable.step_signs(optimizer)  # without a gradient
    assert torch.equal(trainable.dense().sign(), kept.sign())
    trainable.accumulate_grad(normal(4, *SHAPE))
    trainable.step_signs(optimizer)
    assert not torch.equal(trainable.dense().sign(), kept.sign())
    assert torch.equal(before.dense(), kept)
    assert latents.values.dtype == torch.float16
    assert (latents.leaf.numel(), latents.leaf.grad, latents.gradient) == (0, None, None)


@pytest.mark.parametrize("numel", [1, 100])
def test_a_matrix_is_added_and_its_gradient_accumulated_in_parts(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta, gradient, found = random_delta(SHAPE, planes=2, rank=3), normal(6, *SHAPE), list[list[Tensor]]()
    for part in (1 << 24, numel):
        monkeypatch.setattr("compressor.fit.trainable.CHUNK_NUMEL", part)
        trainable, weight = Trainable.of(delta, CPU, relative=True), normal(7, *SHAPE)
        trainable.unfreeze_signs(normal(5, *SHAPE))
        trainable.add_to(weight)
        trainable.accumulate_grad(gradient.clone())
        leaves = [leaf.grad for leaf in trainable.parameters() if leaf.grad is not None]
        latents = [own.gradient for own in trainable.latents() if own.gradient is not None]
        found.append([weight, *leaves, *latents])
    assert len(found[0]) == len(found[1]) == 9
    for whole, parts in zip(*found, strict=True):
        assert near(parts, whole.double(), 1e-5)


def test_a_sign_that_least_squares_turned_over_is_kept_and_no_difference_is_out_of_reach() -> None:
    difference = torch.tensor([[0.0, 1.0, -1000.0, 1.0]]).repeat(2, 1)
    signs = torch.tensor([[False, False, True, True]]).repeat(2, 1)
    plane = SignPlane.from_scales(pack_signs(signs), 4, torch.ones(2), None)
    trainable = Trainable.of(MatrixDelta((plane,)), CPU, relative=True)
    trainable.unfreeze_signs(difference)
    (latents,) = trainable.latents()
    assert torch.equal(latents.values > 0, signs)
    assert float(latents.values.abs().min()) > 0
    assert float(latents.values.abs().max()) <= LARGEST_LATENT


def test_latents_of_a_second_plane_are_of_what_the_first_one_leaves() -> None:
    delta = random_delta(SHAPE, "out", planes=2)
    difference = normal(4, *SHAPE)
    trainable = Trainable.of(delta, CPU, relative=True)
    trainable.unfreeze_signs(difference.clone())
    left = (difference - delta.planes[0].dense()).abs()
    _, latents = trainable.latents()
    assert near(latents.values.abs(), (left / left.mean()).clamp(1e-3, 4.0).double(), 2**-10)


@pytest.mark.parametrize("axis", AXES)
def test_all_arithmetic_is_on_the_device_that_it_is_given(axis: Axis) -> None:
    elsewhere = torch.device("meta")
    trainable = Trainable.of(random_delta(SHAPE, axis, planes=2, rank=3), elsewhere, relative=True)
    for plane in trainable.planes:
        plane.restore_signs(normal(5, *SHAPE).half())
    use: list[Callable[[], Tensor]] = [trainable.dense, lambda: trainable.dense(IDS)]
    assert {made().device for made in use} == {elsewhere}
    trainable.accumulate_grad(normal(6, *SHAPE).to(elsewhere))
    for leaf in trainable.parameters():
        assert leaf.device == elsewhere
        assert leaf.grad is not None
        assert leaf.grad.device == elsewhere
    for latents in trainable.latents():
        assert latents.leaf.device == elsewhere
        assert latents.gradient is not None
        assert latents.gradient.device == elsewhere
        assert latents.values.device == CPU  # because they are too many for a device
