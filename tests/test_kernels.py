"""Every kernel against the plain reference, at odd shapes, and the reference against `OneBit.dense`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltastore.onebit import OneBit
from deltastore.signs import pack_signs
from server.kernels import numba, onebit_matmul, onebit_rows, reference

# rows, in, out: single values, no multiple of a byte, of a word, of a block; exact blocks; many blocks and a rest
SHAPES = [
    (1, 1, 1),
    (3, 7, 5),
    (2, 16, 3),
    (1, 63, 9),
    (4, 64, 2),
    (5, 65, 33),
    (2, 200, 17),
    (16, 1024, 77),
    (7, 1091, 31),
]


def operands(rows: int, in_features: int, out_features: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 7919 + in_features)
    x = torch.randn(rows, in_features, generator=generator)
    signs = pack_signs(torch.randn(out_features, in_features, generator=generator))
    factor_out = torch.randn(out_features, generator=generator)
    factor_in = torch.randn(in_features, generator=generator)
    return x, signs, factor_out, factor_in


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_the_product_with_the_dense_delta(shape: tuple[int, int, int]) -> None:
    x, signs, factor_out, factor_in = operands(*shape)
    coded = OneBit.from_scales(signs, x.shape[1], factor_out, factor_in)
    assert coded.scale_in is not None
    got = reference.onebit_matmul(x, signs, coded.factor_out(), coded.scale_in.float())
    torch.testing.assert_close(got, x @ coded.dense().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("both", [True, False])
def test_numba_equals_the_reference_at_odd_shapes(shape: tuple[int, int, int], both: bool) -> None:
    x, signs, factor_out, factor_in = operands(*shape)
    scale_in = factor_in if both else None
    got = numba.onebit_matmul(x, signs, factor_out, scale_in)
    torch.testing.assert_close(
        got, reference.onebit_matmul(x, signs, factor_out, scale_in), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    x, signs, factor_out, factor_in = operands(3, 333, 21)
    got = onebit_matmul(x.to(dtype), signs, factor_out, factor_in)
    assert got.dtype == torch.float32
    want = reference.onebit_matmul(x.to(dtype).float(), signs, factor_out, factor_in)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_signs_may_lie_unaligned_inside_a_larger_buffer() -> None:
    x, signs, factor_out, factor_in = operands(2, 130, 9)
    arena = torch.full((signs.numel() + 3,), 255, dtype=torch.uint8)
    arena[1 : 1 + signs.numel()] = signs.flatten()
    view = arena[1 : 1 + signs.numel()].view(signs.shape)
    assert torch.equal(
        onebit_matmul(x, view, factor_out, factor_in), onebit_matmul(x, signs, factor_out, factor_in)
    )


def test_a_row_of_nan_stays_in_its_row() -> None:
    x, signs, factor_out, factor_in = operands(3, 100, 12)
    clean = onebit_matmul(x, signs, factor_out, factor_in)
    x[1] = torch.nan
    got = onebit_matmul(x, signs, factor_out, factor_in)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_a_row_of_the_product_does_not_depend_on_its_batch_mates() -> None:
    x, signs, factor_out, factor_in = operands(6, 777, 40)
    alone = torch.cat([onebit_matmul(row[None], signs, factor_out, factor_in) for row in x])
    torch.testing.assert_close(onebit_matmul(x, signs, factor_out, factor_in), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("in_features", [1, 8, 61, 64])
def test_embedding_rows_are_rows_of_the_dense_delta(in_features: int) -> None:
    _, signs, factor_out, factor_in = operands(1, in_features, 50)
    coded = OneBit.from_scales(signs, in_features, factor_out, factor_in)
    assert coded.scale_in is not None
    ids = torch.tensor([3, 3, 49, 0])
    rows = onebit_rows(ids, signs, coded.factor_out(), coded.scale_in.float(), in_features)
    assert torch.equal(rows, coded.dense()[ids])
