"""One matrix at one bit: signs and scales against formulas written out in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compressor.codec import T, code_matrix, row_blocks, workers
from compressor.config import Method
from deltastore.format.matrix import unpack_mask

SHAPES = [(2, 2), (3, 7), (5, 8), (17, 33), (64, 100), (131, 1031), (4099, 70)]
FP16_STEP = 2.0**-11  # half a unit in the last place of a normal FP16 number, relative


@dataclass(frozen=True, slots=True, eq=False)
class InMemory:
    """A difference in memory."""

    values: Tensor  # [out, in] float32

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def row_block(self, rows: slice) -> Tensor:
        return self.values[rows].clone()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Differences with rows and columns of unequal magnitude, as fine-tunes have them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(shape[0], 1, generator=generator) + 0.1
    return (
        1e-3
        * size
        * (torch.rand(shape[1], generator=generator) + 0.1)
        * torch.randn(shape, generator=generator)
    )


def relative_error(difference: Tensor, coded: Tensor) -> float:
    lost = (difference.double() - coded.double()).norm()
    return float(lost / difference.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_scalar_is_the_mean_size_of_the_difference(shape: tuple[int, int]) -> None:
    difference = drawn(*shape)
    coded = code_matrix(InMemory(difference), "scalar")
    assert coded.delta.axis == "scalar"
    expected = torch.where(difference > 0, 1.0, -1.0).double() * difference.double().abs().mean()
    torch.testing.assert_close(coded.delta.dense().double(), expected, rtol=FP16_STEP, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("axis", "dim"), [("out", 1), ("in", 0)])
def test_per_axis_scales_are_means_across_the_other_axis(shape: tuple[int, int], axis: str, dim: int) -> None:
    generator = torch.Generator().manual_seed(1)
    # One axis explains nearly all magnitudes.
    unequal = torch.rand(shape[1 - dim], generator=generator) + 0.01
    difference = torch.randn(shape, generator=generator).sign() * (
        unequal[:, None] if axis == "out" else unequal
    )
    difference += 0.01 * torch.randn(shape, generator=generator)
    coded = code_matrix(InMemory(difference), "per-axis")
    assert coded.delta.axis == axis
    means = difference.double().abs().mean(dim, keepdim=True)
    expected = torch.where(difference > 0, 1.0, -1.0) * means
    torch.testing.assert_close(coded.delta.dense().double(), expected, rtol=FP16_STEP, atol=0)


@pytest.mark.parametrize("seed", range(8))
def test_per_axis_takes_the_axis_that_errs_less(seed: int) -> None:
    difference = drawn(23, 41, seed=seed)
    sign, size = difference.double().sign(), difference.double().abs()
    errors = {
        axis: relative_error(difference, sign * size.mean(dim, keepdim=True))
        for axis, dim in (("out", 1), ("in", 0))
    }
    coded = code_matrix(InMemory(difference), "per-axis")
    assert coded.delta.axis == min(errors, key=lambda axis: errors[axis])


@pytest.mark.parametrize("shape", SHAPES)
def test_both_is_the_best_rank_one_fit_of_the_sizes(shape: tuple[int, int]) -> None:
    difference = drawn(*shape)
    coded = code_matrix(InMemory(difference), "both")
    assert coded.delta.axis == "both"
    left, values, right = torch.linalg.svd(difference.double().abs(), full_matrices=False)
    best = torch.where(difference > 0, 1.0, -1.0) * values[0] * torch.outer(left[:, 0], right[0])
    torch.testing.assert_close(
        coded.delta.dense().double(), best, rtol=4 * FP16_STEP, atol=1e-6 * float(values[0])
    )
    assert coded.error <= relative_error(difference, best) + 2 * FP16_STEP


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["scalar", "per-axis", "both"])
def test_the_error_is_that_of_what_is_stored(shape: tuple[int, int], method: Method) -> None:
    difference = drawn(*shape, seed=3)
    coded = code_matrix(InMemory(difference), method)
    assert coded.error == pytest.approx(relative_error(difference, coded.delta.dense()), rel=1e-4)


def test_more_scales_never_err_more() -> None:
    difference = InMemory(drawn(96, 160))
    errors = [code_matrix(difference, method).error for method in ("scalar", "per-axis", "both")]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("method", ["scalar", "per-axis", "both"])
def test_zeros_take_both_signs_in_turn(method: Method) -> None:
    difference = drawn(37, 1001)
    difference[5:, ::2] = 0
    difference[7] = 0
    coded = code_matrix(InMemory(difference), method)
    positive, zeros = unpack_mask(coded.delta.signs, 1001), difference == 0
    parity = (torch.arange(37)[:, None] + torch.arange(1001)) % 2 == 0
    assert torch.equal(positive, torch.where(zeros, parity, difference > 0))
    assert coded.num_zeros == int(zeros.sum())


def test_zeros_alternate_by_the_row_of_the_matrix_and_not_of_the_block() -> None:
    difference = torch.zeros(2 * 199, 1999)
    difference[0, 0] = 1.0
    assert next(row_blocks(tuple(difference.shape))).stop % 2 == 1  # so that blocks begin with odd rows too
    coded = code_matrix(InMemory(difference), "scalar")
    parity = (torch.arange(2 * 199)[:, None] + torch.arange(1999)) % 2 == 0
    assert torch.equal(unpack_mask(coded.delta.signs, 1999), parity)


@pytest.mark.parametrize("method", ["scalar", "per-axis", "both"])
def test_no_difference_is_coded_as_nothing(method: Method) -> None:
    coded = code_matrix(InMemory(torch.zeros(3, 9)), method)
    assert coded.is_zero
    assert not coded.delta.dense().any()
    assert coded.error == 0.0


def test_one_difference_in_a_zero_matrix_is_kept() -> None:
    difference = torch.zeros(9, 20)
    difference[4, 6] = -0.5
    coded = code_matrix(InMemory(difference), "both")
    assert not coded.is_zero
    assert coded.error < 2 * FP16_STEP
    assert float(coded.delta.dense()[4, 6]) == pytest.approx(-0.5, rel=2 * FP16_STEP)


@pytest.mark.parametrize("exponent", [-60, -20, 10])
def test_tiny_and_large_differences_keep_their_relative_error(exponent: int) -> None:
    difference = drawn(33, 65)
    scaled = code_matrix(InMemory(difference * 2.0**exponent), "per-axis")
    assert scaled.error == pytest.approx(code_matrix(InMemory(difference), "per-axis").error, rel=1e-3)


@pytest.mark.parametrize("method", ["scalar", "per-axis", "both"])
def test_threads_give_the_same_bits_as_one_loop(method: Method) -> None:
    difference = InMemory(drawn(4099, 301))
    assert len(list(row_blocks(difference.shape))) > 2

    def backwards(work: Callable[[slice], T], blocks: Iterable[slice], /) -> Iterator[T]:
        done = {rows.start: work(rows) for rows in reversed(list(blocks))}
        return iter([done[start] for start in sorted(done)])

    with workers() as each:
        coded = [code_matrix(difference, method, way) for way in (map, each, backwards)]
    for other in coded[1:]:
        assert torch.equal(coded[0].delta.signs, other.delta.signs)
        assert torch.equal(coded[0].delta.dense(), other.delta.dense())
        assert coded[0].error == other.error


def test_workers_leave_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    with workers() as each:
        assert list(each(lambda _: torch.get_num_threads(), row_blocks((4, 1), 1))) == [1] * 4
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("shape", [(), (0, 5), (1,), (7, 3), (1000, 1000), (3, 10_000_000)])
def test_blocks_cover_every_row_once(shape: tuple[int, ...]) -> None:
    blocks = list(row_blocks(shape, 100_000))
    if not shape:
        assert blocks == [slice(None)]
        return
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(shape[0]))
