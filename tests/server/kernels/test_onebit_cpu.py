"""Every CPU kernel equals the torch reference at odd shapes, and the reference equals `SignPlane.dense`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from deltastore.format.matrix import SignPlane, pack_signs
from server.kernels import add_planes, add_rows, onebit_cpu, openmp, vectors
from server.kernels import reference as onebit_reference
from server.kernels.onebit_cpu import Choice
from tests.server.helpers.grouped import ROWS, SHAPES, check, mixed, operands

# One rounding of bfloat16: sums in another order may be rounded the other way.
HALF_STEP = 2**-7
needs_lookup = pytest.mark.skipif(not vectors.supports_lookup(), reason="this processor has no AVX-512")
SELECT, LOOKUP = Choice(by_lookup=False), Choice(by_lookup=True)
WAYS = [
    pytest.param(partial(onebit_cpu.add_planes, choice=LOOKUP), id="lookup", marks=needs_lookup),
    pytest.param(partial(onebit_cpu.add_planes, choice=SELECT), id="select"),
]


def coded(in_features: int, out_features: int) -> SignPlane:
    generator = torch.Generator().manual_seed(in_features)
    signs = pack_signs(torch.randn(out_features, in_features, generator=generator))
    scale_out, scale_in = (torch.randn(n, generator=generator) for n in (out_features, in_features))
    return SignPlane.from_scales(signs, in_features, scale_out, scale_in)


def table_of(delta: SignPlane) -> tuple[Tensor, Tensor]:
    """Return a table of a delta in one slot, [1, 1, FIELDS], and the gain that it points to."""
    gain = torch.tensor([delta.gain])
    return onebit_reference.row_of([(delta.signs, delta.scale_out, delta.scale_in, gain)]).view(
        1, 1, -1
    ), gain


def rows_from(first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return order and ranges that give one slot the rows from `first` to before `last`."""
    order = torch.arange(first, last, dtype=torch.int32)
    return order, torch.tensor([[0, last - first]], dtype=torch.int32)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_the_product_with_the_dense_delta(shape: tuple[int, int]) -> None:
    delta = coded(*shape)
    table, _gain = table_of(delta)
    x, output = torch.ones(3, shape[0]).cumsum(0), torch.ones(3, shape[1])
    onebit_reference.add_planes(output, x, table, *rows_from(1, 3), [shape[1]])
    want = torch.cat([torch.ones(1, shape[1]), 1 + x[1:] @ delta.dense().T])
    torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("product", [*WAYS, pytest.param(torch.ops.peraxis.add_planes, id="operation")])
@pytest.mark.parametrize("num_rows", [1, 13, 90])
@pytest.mark.parametrize(("in_features", "sizes"), [(1, [1]), (61, [5, 33, 2]), (513, [16, 9])])
def test_terms_of_every_kind_equal_the_reference_for_rows_in_any_order(
    product: onebit_cpu.Product, num_rows: int, in_features: int, sizes: list[int]
) -> None:
    check(product, mixed(in_features, sizes, num_rows), 1e-3)


@pytest.mark.parametrize("product", WAYS)
@pytest.mark.parametrize("num_rows", [13, 90])
def test_terms_of_every_kind_are_rounded_once(product: onebit_cpu.Product, num_rows: int) -> None:
    given = mixed(61, [5, 33, 2], num_rows, torch.bfloat16)
    wide = replace(given, output=given.output.float(), x=given.x.float())
    want = wide.after(onebit_reference.add_planes).bfloat16()
    # A product with a whole tensor of many rows is rounded as the base's is.
    torch.testing.assert_close(given.after(product), want, rtol=2 * HALF_STEP, atol=HALF_STEP)


@pytest.mark.parametrize("product", WAYS)
@pytest.mark.parametrize("groups", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_equals_the_reference_and_leaves_other_rows(
    product: onebit_cpu.Product, groups: Sequence[tuple[int, int]], shape: tuple[int, int]
) -> None:
    check(product, operands(*shape, groups))


@pytest.mark.parametrize("product", WAYS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, HALF_STEP), (torch.float16, 2**-10)])
def test_half_precision_is_summed_in_float32_and_rounded_once(
    product: onebit_cpu.Product, dtype: torch.dtype, tolerance: float
) -> None:
    check(product, operands(333, 21, ROWS[2], dtype), tolerance)


@needs_lookup
@pytest.mark.parametrize("groups", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_groups_expanded_to_bfloat16_equal_the_reference_within_their_rounding(
    groups: Sequence[tuple[int, int]], shape: tuple[int, int]
) -> None:
    given = operands(*shape, groups, torch.bfloat16)
    choice = Choice(by_lookup=True, half_rows={shape[0]: 3})
    got = given.after(partial(onebit_cpu.add_planes, choice=choice))
    want = given.after(onebit_reference.add_planes)
    # The product's inputs, sums and result are each rounded, relative to its size.
    size = HALF_STEP * shape[0] ** 0.5
    torch.testing.assert_close(got, want, rtol=2 * HALF_STEP, atol=4 * size, equal_nan=True)


@needs_lookup
def test_only_groups_with_enough_rows_are_expanded() -> None:
    given = operands(333, 21, [(0, 2), (2, 9)], torch.bfloat16)
    mixed, never = (
        given.after(partial(onebit_cpu.add_planes, choice=Choice(True, {333: rows}))) for rows in (3, 8)
    )
    assert torch.equal(mixed[:2], never[:2])
    assert not torch.equal(mixed[2:9], never[2:9])
    looked_up = given.after(partial(onebit_cpu.add_planes, choice=LOOKUP))
    assert torch.equal(never[:9], looked_up[:9])


@needs_lookup
def test_a_choice_never_changes_float32() -> None:
    given = operands(333, 21, [(0, 9)])
    expanded = partial(onebit_cpu.add_planes, choice=Choice(True, {333: 1}))
    looked_up = partial(onebit_cpu.add_planes, choice=LOOKUP)
    assert torch.equal(given.after(expanded)[:9], given.after(looked_up)[:9])


@pytest.mark.parametrize("product", WAYS)
def test_a_bfloat16_output_is_rounded_to_nearest_even(product: onebit_cpu.Product) -> None:
    values = torch.tensor([1.0, 1.0 + 2**-7, -1.0, torch.inf, torch.nan]).bfloat16()
    output, ones = values[:, None].clone(), torch.ones(5, 1)
    # Half the spacing of bfloat16 at 1.
    signs, gain = torch.ones(1, 1, dtype=torch.uint8), torch.tensor([2.0**-8])
    table = onebit_reference.row_of([(signs, None, None, gain)]).view(1, 1, -1)
    product(output, ones, table, *rows_from(0, 5), [1])
    want = (values.float() + 2.0**-8).bfloat16()
    torch.testing.assert_close(output[:, 0], want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("product", WAYS)
def test_large_products_are_shared_between_threads(product: onebit_cpu.Product) -> None:
    before = torch.get_num_threads()
    try:
        # Does not divide the number of tiles.
        torch.set_num_threads(3)
        check(product, operands(1024, 520, [(0, 1), (1, 4)]), 1e-3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("product", WAYS)
def test_a_large_odd_matrix_gives_every_output_to_one_thread(product: onebit_cpu.Product) -> None:
    check(product, operands(4109, 2331, [(0, 1), (1, 2), (2, 3), (3, 8)]), 1e-3)


def test_kernels_find_torchs_openmp_runtime() -> None:
    assert openmp.runtime() is not None


@pytest.mark.parametrize("product", WAYS)
def test_outputs_and_inputs_may_be_strided_and_signs_unaligned(product: onebit_cpu.Product) -> None:
    given = operands(130, 9, [(0, 2)])
    signs = given.planes[0][0]
    memory = torch.full((signs.numel() + 3,), 255, dtype=torch.uint8)
    memory[1 : 1 + signs.numel()] = signs.flatten()
    table = given.table.clone()
    table[0, 0, onebit_reference.SIGNS] = memory.data_ptr() + 1
    moved = replace(
        given,
        output=torch.cat([given.output, given.output], dim=1)[:, 3:12].contiguous(),
        x=given.x.T.contiguous().T,
        table=table,
    )
    wide = torch.full((len(given.output), 30), torch.nan)
    wide[:, 5:14] = moved.output
    product(wide[:, 5:14], moved.x, table, given.order, given.ranges, given.ends)
    torch.testing.assert_close(wide[:, 5:14], moved.after(onebit_reference.add_planes), equal_nan=True)
    assert wide[:, :5].isnan().all()
    assert wide[:, 14:].isnan().all()


@pytest.mark.parametrize("product", WAYS)
def test_a_row_of_nan_stays_in_its_row(product: onebit_cpu.Product) -> None:
    given = operands(100, 12, [(0, 4)])
    clean = given.after(product)
    given.x[1] = torch.nan
    got = given.after(product)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("product", WAYS)
def test_a_row_is_the_same_bits_in_any_batch(product: onebit_cpu.Product) -> None:
    together = operands(777, 40, [(0, 7)])
    want = together.after(product)
    for row in range(7):
        alone = together.output.clone()
        product(alone, together.x, together.table, *rows_from(row, row + 1), together.ends)
        assert torch.equal(alone[row], want[row])


@pytest.mark.parametrize("in_features", [1, 8, 61, 64])
@pytest.mark.parametrize("rows", [add_rows, onebit_reference.add_rows])
def test_embedding_rows_are_rows_of_the_dense_delta(rows: onebit_cpu.Product, in_features: int) -> None:
    delta = coded(in_features, 50)
    table, _gain = table_of(delta)
    ids = torch.tensor([1, 3, 3, 49, 0, 2])
    output = torch.full((6, in_features), torch.nan)
    output[1:5] = 0
    rows(output, ids, table, *rows_from(1, 5), 50, 2.0)
    assert torch.equal(output[1:5], 2 * delta.dense()[ids[1:5]])
    assert output[[0, 5]].isnan().all()


def test_embedding_rows_beyond_two_gib_of_signs_are_found() -> None:
    num_ids, in_features = 2**20 + 1, 2**14
    # Memory that is never touched is not allocated.
    signs = torch.zeros(num_ids, in_features // 8, dtype=torch.uint8)
    signs[-1] = 255
    scale, gain, output = torch.ones(num_ids).half(), torch.tensor([0.5]), torch.zeros(2, in_features)
    table = onebit_reference.row_of([(signs, scale, None, gain)]).view(1, 1, -1)
    ids = torch.tensor([num_ids - 1, 0])
    add_rows(output, ids, table, *rows_from(0, 2), num_ids, 1.0)
    assert torch.equal(output, torch.tensor([[0.5], [-0.5]]).expand(2, in_features))


def test_embedding_rows_in_bfloat16_are_rounded_once() -> None:
    delta = coded(61, 50)
    table, _gain = table_of(delta)
    ids, output = torch.tensor([7, 9]), torch.ones(2, 61).bfloat16()
    add_rows(output, ids, table, *rows_from(0, 2), 50, 1.0)
    assert torch.equal(output, (1 + delta.dense()[ids]).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_rows_of_every_kind_equal_the_reference(dtype: torch.dtype) -> None:
    given = mixed(61, [50, 50], 40, dtype)
    # The second part has rows that the base lacks, here as many as a whole tensor has.
    ids = torch.arange(40) * 7 % 100
    got, want = given.x.clone(), given.x.clone()
    arguments = (ids, given.table, given.order, given.ranges, 50, 1.5)
    add_rows(got, *arguments)
    onebit_reference.add_rows(want, *arguments)
    torch.testing.assert_close(got, want, rtol=1e-5 if dtype == torch.float32 else HALF_STEP, atol=1e-5)


def test_ids_that_no_tensor_has_read_nothing() -> None:
    table, _gain = table_of(coded(61, 50))
    output = torch.ones(3, 61)
    add_rows(output, torch.tensor([-1, 50, 1 << 40]), table, *rows_from(0, 3), 50, 1.0)
    assert torch.equal(output, torch.ones(3, 61))


def test_the_device_of_the_input_chooses_the_kernel() -> None:
    given = operands(65, 33, ROWS[2])
    torch.testing.assert_close(
        given.after(add_planes), given.after(onebit_reference.add_planes), equal_nan=True
    )
