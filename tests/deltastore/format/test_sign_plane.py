"""Signs and scales: bit order, arithmetic and bounds of rounding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltastore.format.matrix import (
    SignPlane,
    is_gain,
    num_stray_bits,
    pack_signs,
    packed_width,
    unpack_mask,
    unpack_signs,
)

sizes = st.integers(1, 67)
seeds = st.integers(0, 2**32)
exponents = st.integers(-100, 100)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("positive", "expected"),
    [
        ([1, 0, 0, 0, 0, 0, 0, 0], [0b0000_0001]),  # input 0 is the lowest bit
        ([0, 0, 0, 0, 0, 0, 0, 1], [0b1000_0000]),
        ([1, 1, 0, 1, 0, 0, 1, 0], [0b0100_1011]),
        ([0] * 8 + [1], [0, 1]),  # input 8 is the lowest bit of the second byte
        ([1] * 11, [0xFF, 0b0000_0111]),  # pad bits are 0
    ],
)
def test_bit_i_of_byte_j_is_input_8j_plus_i(positive: list[int], expected: list[int]) -> None:
    assert pack_signs(torch.tensor([positive], dtype=torch.bool)).tolist() == [expected]


def test_zero_is_no_positive_number() -> None:
    assert pack_signs(torch.tensor([[0.0, -0.0, 1e-30, -1e-30, math.nan]])).tolist() == [[0b00100]]


@given(sizes, sizes, seeds)
@settings(max_examples=100, deadline=None)
def test_unpack_restores_every_sign(rows: int, width: int, seed: int) -> None:
    delta = drawn(seed, rows, width)
    packed = pack_signs(delta)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, packed_width(width))
    assert num_stray_bits(packed, width) == 0
    assert torch.equal(unpack_signs(packed, width), torch.where(delta > 0, 1.0, -1.0))
    assert torch.equal(unpack_mask(packed, width), delta > 0)


@given(sizes, sizes, st.data())
@settings(max_examples=100, deadline=None)
def test_a_pad_bit_that_is_set_is_seen(rows: int, width: int, data: st.DataObject) -> None:
    packed = pack_signs(torch.ones(rows, width))
    row, bit = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(width % 8, 7))
    packed[row, -1] |= 1 << bit
    assert num_stray_bits(packed, width) == (1 if width % 8 else 0)


@pytest.mark.parametrize("size", [1e-6, 1e-12, 1e-30, 1.0, 3e4, 1e20])
@pytest.mark.parametrize("axis", ["scalar", "out", "in", "both"])
def test_scales_of_any_size_are_stored_within_half_an_ulp(axis: str, size: float) -> None:
    scale_out = torch.rand(1 if axis == "scalar" else 7, generator=torch.Generator().manual_seed(0)) + 0.5
    scale_in = torch.rand(9, generator=torch.Generator().manual_seed(1)) + 0.5
    signs = pack_signs(drawn(2, 7, 9))
    out = None if axis == "in" else scale_out * size
    into = {"in": scale_in * size, "both": scale_in}.get(axis)
    delta = SignPlane.from_scales(signs, 9, out, into)
    wanted = unpack_signs(signs, 9).double() * (1 if out is None else out.double()[:, None])
    wanted *= 1 if into is None else into.double()
    bound = 2.0**-11 if axis != "both" else 2.0**-10 + 2.0**-22
    assert delta.axis == axis
    assert torch.all((delta.dense().double() - wanted).abs() <= (bound + 2.0**-22) * wanted.abs())


@given(sizes, sizes, seeds, exponents)
@settings(max_examples=100, deadline=None)
def test_a_gain_is_the_power_of_two_below_the_largest_scale(
    rows: int, width: int, seed: int, exponent: int
) -> None:
    scale = drawn(seed, rows).double() * 2.0**exponent
    delta = SignPlane.from_scales(pack_signs(torch.ones(rows, width)), width, scale, None)
    assert is_gain(delta.gain)
    assert delta.gain <= float(scale.abs().max()) < 2 * delta.gain
    assert delta.scale_out is not None
    error = (delta.scale_out.double() * delta.gain - scale).abs()
    assert torch.all(error <= torch.maximum(2.0**-11 * scale.abs(), torch.tensor(2.0**-25 * delta.gain)))


@given(sizes, sizes, seeds, exponents)
@settings(max_examples=100, deadline=None)
def test_beside_scale_out_scale_in_has_mean_magnitude_one(
    rows: int, width: int, seed: int, exponent: int
) -> None:
    scale_in = drawn(seed, width).double() * 2.0**exponent
    delta = SignPlane.from_scales(pack_signs(torch.ones(rows, width)), width, drawn(seed + 1, rows), scale_in)
    assert delta.scale_in is not None
    assert float(delta.scale_in.double().abs().mean()) == pytest.approx(1, rel=2.0**-11)


def test_scales_of_zero_are_stored() -> None:
    delta = SignPlane.from_scales(pack_signs(torch.ones(2, 3)), 3, torch.zeros(2), torch.zeros(3))
    assert delta.gain == 1
    assert not delta.dense().any()


def test_a_gain_stays_in_the_normal_range_of_float32() -> None:
    delta = SignPlane.from_scales(
        pack_signs(torch.ones(1, 8)), 8, torch.tensor([1e-300], dtype=torch.float64), None
    )
    assert delta.gain == 2.0**-126


def test_the_delta_is_sign_times_out_times_in() -> None:
    mask = torch.tensor([[True, False, True], [False, False, True]])
    scale_out, scale_in = torch.tensor([2.0, -0.5]).half(), torch.tensor([1.0, -0.25, 4.0]).half()
    delta = SignPlane(pack_signs(mask), 3, 2.0**-3, scale_out, scale_in)
    assert delta.dense().tolist() == [[0.25, 0.0625, 1.0], [0.0625, -0.015625, -0.25]]


def test_rows_of_the_delta_are_rows_of_the_whole() -> None:
    delta = SignPlane.from_scales(pack_signs(drawn(0, 9, 21)), 21, drawn(1, 9), drawn(2, 21))
    assert torch.equal(delta.dense(slice(3, 7)), delta.dense()[3:7])


def test_a_scalar_scales_every_row() -> None:
    delta = SignPlane.from_scales(pack_signs(torch.ones(4, 8)), 8, torch.tensor([0.75]), None)
    assert delta.axis == "scalar"
    assert torch.equal(delta.dense(), torch.full((4, 8), 0.75))


@pytest.mark.parametrize("value", [0.0, -2.0, 3.0, 2.0**-127, math.inf, math.nan])
def test_what_is_no_normal_power_of_two_is_no_gain(value: float) -> None:
    assert not is_gain(value)
