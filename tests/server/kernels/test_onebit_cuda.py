"""The Triton products equal the torch reference at odd shapes. Triton's interpreter runs them without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.kernels import reference as onebit_reference
from tests.server.helpers.grouped import ROWS, SHAPES, Operands, check, mixed, operands

onebit_cuda = pytest.importorskip("server.kernels.onebit_cuda", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A short and a long group in a batch of many rows.
LONG = [(0, 20), (20, 90)]
given_on = partial(operands, device=DEVICE)


@pytest.mark.parametrize("groups", [*ROWS, LONG])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_equals_the_reference_and_leaves_other_rows(
    shape: tuple[int, int], groups: Sequence[tuple[int, int]]
) -> None:
    check(onebit_cuda.add_planes, given_on(*shape, groups))


@pytest.mark.parametrize(
    ("in_features", "sizes", "num_rows"), [(61, [5, 33, 2], 13), (4096, [9, 70], 9), (61, [40], 90)]
)
def test_terms_of_every_kind_equal_the_reference_for_rows_in_any_order(
    in_features: int, sizes: list[int], num_rows: int
) -> None:
    check(onebit_cuda.add_planes, mixed(in_features, sizes, num_rows, device=DEVICE), 2e-3)


def test_embedding_rows_of_every_kind_equal_the_reference() -> None:
    given = mixed(61, [50, 50], 40, device=DEVICE)
    ids = (torch.arange(42) * 7 % 103 - 1).to(DEVICE)[:40]
    got, want = given.x.clone(), given.x.clone()
    arguments = (ids, given.table, given.order, given.ranges, 50, 1.5)
    onebit_cuda.add_rows(got, *arguments)
    onebit_reference.add_rows(want, *arguments)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_parts_of_long_rows_are_added_up_and_their_counters_left_at_zero() -> None:
    given = given_on(4096, 70, [(0, 1), (1, 3)])
    check(onebit_cuda.add_planes, given, 1e-3)
    check(onebit_cuda.add_planes, given, 1e-3)


def scaled_before(given: Operands) -> Operands:
    """Return the same product with inputs that are scaled in advance, rounded as the kernel rounds them."""
    x, table = given.x.clone(), given.table.clone()
    for (first, last), (_, _, scale_in, _) in zip(given.ranges.tolist(), given.planes, strict=True):
        if scale_in is not None:
            x[first:last] = (x[first:last].float() * scale_in.float()).to(x.dtype)
    table[..., onebit_reference.SCALE_IN] = 0
    return replace(given, x=x, table=table)


@pytest.mark.parametrize("groups", [ROWS[2], LONG])
def test_float16_is_rounded_after_scaling_and_at_the_end(groups: Sequence[tuple[int, int]]) -> None:
    given = given_on(333, 21, groups, torch.float16)
    got = given.after(onebit_cuda.add_planes)
    want = scaled_before(given).after(onebit_reference.add_planes)
    torch.testing.assert_close(got, want, rtol=2**-9, atol=2**-9, equal_nan=True)


@pytest.mark.parametrize("groups", [ROWS[2], LONG])
def test_bfloat16_is_exact_where_nothing_is_rounded(groups: Sequence[tuple[int, int]]) -> None:
    # Numbers that need no rounding: the interpreter does not round to nearest.
    given = given_on(100, 21, groups, torch.bfloat16)
    for tensor in (given.x, given.output):
        tensor.clamp_(-1, 1).round_()
    for _, *scales in given.planes:
        for scale in scales:
            if scale is not None:
                scale.sign_()
    got, want = given.after(onebit_cuda.add_planes), given.after(onebit_reference.add_planes)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_row_of_nan_stays_in_its_row() -> None:
    given = given_on(100, 12, [(0, 4)])
    clean = given.after(onebit_cuda.add_planes)
    given.x[1] = torch.nan
    got = given.after(onebit_cuda.add_planes)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


def test_outputs_may_be_strided() -> None:
    given = given_on(130, 9, [(0, 2)])
    wide = torch.full((len(given.output), 30), torch.nan, device=DEVICE)
    wide[:, 5:14] = given.output
    onebit_cuda.add_planes(wide[:, 5:14], given.x, given.table, given.order, given.ranges, given.ends)
    want = given.after(onebit_reference.add_planes)
    torch.testing.assert_close(wide[:, 5:14], want, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert wide[:, :5].isnan().all()
    assert wide[:, 14:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("in_features", [1, 61, 1091])
def test_embedding_rows_equal_the_reference(in_features: int, dtype: torch.dtype) -> None:
    given = given_on(in_features, 50, [(0, 2), (3, 4), (4, 6)])
    ids = torch.tensor([3, 49, 0, 1, 3, 2, 7, 7], device=DEVICE)
    got = torch.full((8, in_features), torch.nan, dtype=dtype, device=DEVICE)
    got[[0, 1, 3, 4, 5]] = 1
    want: Tensor = got.clone()
    onebit_cuda.add_rows(got, ids, given.table, given.order, given.ranges, 50, 1.5)
    onebit_reference.add_rows(want, ids, given.table, given.order, given.ranges, 50, 1.5)
    torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-6, equal_nan=True)


def test_preparing_changes_no_result() -> None:
    onebit_cuda.prepare(torch.device(DEVICE), {(33, 65)}, torch.bfloat16)
    check(onebit_cuda.add_planes, given_on(65, 33, ROWS[0]))


def test_rows_of_a_slot_lie_on_both_sides_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_on(100, 21, [(0, 3), (5, 45), (45, 100)])
    want = given.after(onebit_reference.add_planes)
    monkeypatch.setattr(onebit_cuda, "POSITIONS", 40)
    monkeypatch.setattr(onebit_cuda, "SMALL_BATCH", 16)
    torch.testing.assert_close(
        given.after(onebit_cuda.add_planes), want, rtol=1e-4, atol=1e-3, equal_nan=True
    )


@pytest.mark.parametrize("size", [2.0**-50, 2.0**60])
def test_bfloat16_of_extreme_size_keeps_its_precision(size: float) -> None:
    given = given_on(333, 21, ROWS[2], torch.bfloat16)
    given.x.mul_(size)
    given.output.zero_()
    want = given.after(onebit_reference.add_planes).float()
    torch.testing.assert_close(
        given.after(onebit_cuda.add_planes).float(), want, rtol=2**-6, atol=0.2 * size, equal_nan=True
    )


def test_tensor_cores_take_signs_from_registers_and_small_devices_have_the_memory(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    clean["TRITON_CACHE_DIR"] = str(tmp_path)
    program = [sys.executable, "-m", "tests.server.helpers.compile_onebit_cuda"]
    built = subprocess.run(program, env=clean, capture_output=True, text=True, check=True)
    *operands_of, _, shared = built.stdout.split()
    assert operands_of == ["decode", "registers", "prefill", "registers"]
    # What a block may have on sm_86 and sm_89.
    assert int(shared) <= 99 * 1024
