"""A delta that trains: its weights and gradients against float64, and its way back to the stored form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compressor.fitting.trainable import LARGEST_LATENT, Numbers, Rows, Trainable
from deltastore.matrix import MatrixDelta
from deltastore.onebit import AXES, Axis, OneBit
from deltastore.signs import pack_signs, unpack_signs
from tests.decoders import CPU
from tests.fitting import dense64, normal, random_delta

SHAPE = (12, 19)  # two and three eighths bytes of signs
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
    """A delta of float64 leaves, written from the formula: planes, then a residual."""

    def __init__(self, delta: MatrixDelta) -> None:
        self.outs, self.acrosses, self.signs = [], [], []
        for plane in delta.planes:
            unit = plane.gain if plane.scale_out is None else 1.0
            self.outs.append(
                None if plane.scale_out is None else _leaf(plane.scale_out.double() * plane.gain)
            )
            self.acrosses.append(None if plane.scale_in is None else _leaf(plane.scale_in.double() * unit))
            self.signs.append(_leaf(unpack_signs(plane.signs, plane.in_features).double()))
        self.left, self.right = (
            None if part is None else _leaf(part.double()) for part in (delta.left, delta.right)
        )

    def dense(self) -> Tensor:
        total = torch.zeros(SHAPE, dtype=torch.float64)
        for signs, out, across in zip(self.signs, self.outs, self.acrosses, strict=True):
            down = torch.ones(1) if out is None else out
            total = total + down[:, None] * signs * (torch.ones(1) if across is None else across)
        return total if self.left is None or self.right is None else total + self.left @ self.right


def _leaf(value: Tensor) -> Tensor:
    return value.clone().requires_grad_()


def agree(own: Numbers | None, oracle: Tensor | None) -> None:
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
    trainable.release_signs(normal(5, *SHAPE))
    for seed in (20, 21):  # gradients add up
        gradient = normal(seed, *SHAPE)[rows]
        trainable.collect(gradient, rows)
        torch.autograd.backward(oracle.dense()[rows], gradient.double())
    for plane, out, across, signs in zip(
        trainable.planes, oracle.outs, oracle.acrosses, oracle.signs, strict=True
    ):
        agree(plane.out, out)
        agree(plane.across, across)
        assert plane.latent is not None
        assert plane.latent.grad is not None
        assert signs.grad is not None
        assert near(plane.latent.grad, signs.grad)  # straight through: the sign's own gradient
    agree(trainable.left, oracle.left)
    agree(trainable.right, oracle.right)


@FORMS
@pytest.mark.parametrize("axis", AXES)
def test_what_did_not_move_is_stored_as_it_was(axis: Axis, planes: int, rank: int) -> None:
    delta = random_delta(SHAPE, axis, planes, rank)
    trainable = Trainable.of(delta, CPU, relative=True)
    again = trainable.stored()
    trainable.release_signs(normal(5, *SHAPE))
    for stored in (again, trainable.stored()):
        assert (stored.axis, stored.num_planes, stored.rank) == (axis, planes, rank)
        for own, plane in zip(stored.planes, delta.planes, strict=True):
            assert torch.equal(own.signs, plane.signs)
        assert near(stored.dense(), dense64(delta), 2**-9)  # of FP16, each vector rounded once more
        if axis != "both":
            assert torch.equal(stored.dense(), delta.dense())
    if rank:
        assert again.left is not None
        assert delta.left is not None
        assert torch.equal(again.left, delta.left)


@pytest.mark.parametrize(("moved", "unit"), [(True, 0.25), (False, 1.0)])
def test_a_relative_step_is_in_units_of_the_vectors_mean_magnitude(moved: bool, unit: float) -> None:
    numbers = Numbers.of(torch.tensor([0.5, -0.25, 0.0]), CPU, relative=moved)
    assert numbers.unit == unit
    with torch.no_grad():
        numbers.leaf.add_(0.01)
    assert torch.allclose(numbers.value, torch.tensor([0.5, -0.25, 0.0]) + 0.01 * unit, atol=1e-7)


@pytest.mark.parametrize("axis", AXES)
def test_a_delta_of_zeros_stays_one_however_far_relative_steps_go(axis: Axis) -> None:
    zeros = torch.zeros(1 if axis == "scalar" else SHAPE[0])
    scales = (None if axis == "in" else zeros, torch.zeros(SHAPE[1]) if axis in ("in", "both") else None)
    delta = MatrixDelta((OneBit.from_scales(pack_signs(normal(0, *SHAPE)), SHAPE[1], *scales),))
    trainable = Trainable.of(delta, CPU, relative=True)
    trainable.collect(normal(1, *SHAPE))
    for leaf in trainable.numbers():
        assert leaf.grad is not None
        assert not leaf.grad.any()
        with torch.no_grad():
            leaf -= 0.5
    assert not trainable.dense().any()


def test_released_signs_stay_and_the_smallest_differences_flip_first() -> None:
    difference = normal(3, *SHAPE)
    delta = MatrixDelta((OneBit.from_scales(pack_signs(difference), SHAPE[1], torch.ones(SHAPE[0]), None),))
    trainable = Trainable.of(delta, CPU, relative=True)
    before = trainable.dense()
    trainable.release_signs(difference)
    assert torch.equal(trainable.dense(), before)
    (latent,) = trainable.latents()
    order = latent.detach().abs().flatten().argsort(stable=True)
    sizes = difference.abs().flatten()[order]
    assert torch.equal(sizes, sizes.sort().values)
    assert float(latent.detach().abs().mean()) == pytest.approx(1, rel=0.01)
    with torch.no_grad():
        latent -= 0.1 * latent.sign()
    flipped = trainable.dense() != before
    assert flipped.any()
    assert torch.equal(flipped, difference.abs() < 0.1 * difference.abs().mean())
    assert torch.equal(trainable.stored().dense(), trainable.dense())


def test_a_sign_that_least_squares_turned_over_is_kept_and_no_difference_is_out_of_reach() -> None:
    difference = torch.tensor([[0.0, 1.0, -1000.0, 1.0]]).repeat(2, 1)
    signs = torch.tensor([[False, False, True, True]]).repeat(2, 1)
    plane = OneBit.from_scales(pack_signs(signs), 4, torch.ones(2), None)
    trainable = Trainable.of(MatrixDelta((plane,)), CPU, relative=True)
    trainable.release_signs(difference)
    (latent,) = trainable.latents()
    assert torch.equal(latent > 0, signs)
    assert float(latent.detach().abs().min()) > 0
    assert float(latent.detach().abs().max()) <= LARGEST_LATENT


def test_latents_of_a_second_plane_are_of_what_the_first_one_leaves() -> None:
    delta = random_delta(SHAPE, "out", planes=2)
    difference = normal(4, *SHAPE)
    trainable = Trainable.of(delta, CPU, relative=True)
    trainable.release_signs(difference.clone())
    left = (difference - delta.planes[0].dense()).abs()
    _, latent = trainable.latents()
    assert near(latent.detach().abs(), (left / left.mean()).clamp(1e-3, 4.0).double())


@pytest.mark.parametrize("axis", AXES)
def test_all_arithmetic_is_on_the_device_that_it_is_given(axis: Axis) -> None:
    elsewhere = torch.device("meta")
    trainable = Trainable.of(random_delta(SHAPE, axis, planes=2, rank=3), elsewhere, relative=True)
    trainable.release_signs(normal(5, *SHAPE).to(elsewhere))
    use: list[Callable[[], Tensor]] = [trainable.dense, lambda: trainable.dense(IDS)]
    assert {made().device for made in use} == {elsewhere}
    trainable.collect(normal(6, *SHAPE).to(elsewhere))
    for leaf in (*trainable.numbers(), *trainable.latents()):
        assert leaf.device == elsewhere
        assert leaf.grad is not None
        assert leaf.grad.device == elsewhere
