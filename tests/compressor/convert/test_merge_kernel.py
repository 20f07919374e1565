"""The merge kernel against dense deltas added in torch, bit for bit."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.convert.merge_kernel import merge_delta, merge_rows
from deltastore.format.matrix import AXES, Axis, MatrixDelta, SignPlane, pack_signs

SHAPES = [(1, 1), (3, 7), (5, 31), (4, 32), (7, 33), (9, 92), (6, 128), (17, 1003)]
DTYPES = [  # what is stored, what is written
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
]


ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys, torch
from numba.core.event import install_recorder
from compressor.convert.merge_kernel import merge_rows
from deltastore.format.matrix import SignPlane
dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
plane = SignPlane.from_scales(torch.full((3, 5), 170, dtype=torch.uint8), 40, torch.ones(3), torch.ones(40))
for name in sys.argv[1:]:
    base = torch.zeros(3, 40, dtype=dtypes[name])
    with install_recorder("numba:run_pass") as recorder:
        merge_rows(base, plane, slice(0, 3), base)
    print(len(recorder.buffer), float(base[0, 0]), float(base[0, 1]))
"""


def drawn(shape: tuple[int, int], axis: Axis, seed: int = 0) -> SignPlane:
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = shape
    scale_out = 0.02 * torch.randn(1 if axis == "scalar" else out_features, generator=generator)
    scale_in = torch.randn(in_features, generator=generator)
    return SignPlane.from_scales(
        pack_signs(torch.randn(shape, generator=generator)),
        in_features,
        None if axis == "in" else scale_out,
        scale_in if axis in ("in", "both") else None,
    )


def merged(base: Tensor, delta: SignPlane, dtype: torch.dtype) -> Tensor:
    out = torch.empty(base.shape, dtype=dtype)
    merge_rows(base, delta, slice(None), out)
    return out


def summed(shape: tuple[int, int], axis: Axis, num_planes: int, rank: int) -> MatrixDelta:
    """A matrix of several planes and a residual, all drawn."""
    generator = torch.Generator().manual_seed(3)
    left, right = (
        torch.randn(size, generator=generator).half() / 9 for size in ((shape[0], rank), (rank, shape[1]))
    )
    planes = tuple(drawn(shape, axis, seed) for seed in range(num_planes))
    return MatrixDelta(planes, left, right) if rank else MatrixDelta(planes)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(("source", "target"), DTYPES)
def test_merging_is_dense_addition_rounded_once(source: torch.dtype, target: torch.dtype) -> None:
    for shape in SHAPES:
        for axis in AXES:
            delta = drawn(shape, axis)
            base = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(source)
            expected = (base.float() + delta.dense()).to(target)
            assert same_bits(merged(base, delta, target), expected), (shape, axis)


@pytest.mark.parametrize(("source", "target"), DTYPES)
@pytest.mark.parametrize(("num_planes", "rank"), [(1, 0), (2, 0), (4, 0), (1, 1), (2, 5)])
def test_planes_and_a_residual_are_rounded_once_together(
    num_planes: int, rank: int, source: torch.dtype, target: torch.dtype
) -> None:
    for shape, axis in zip([(1, 1), (3, 7), (7, 33), (17, 1003), (300, 1003)], (*AXES, "both"), strict=True):
        delta = summed(shape, axis, num_planes, rank)
        base = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(source)
        base[0, 0] = -0.0
        out = torch.empty(shape, dtype=target)
        merge_delta(base, delta, slice(None), out)
        assert same_bits(out, (base.float() + delta.dense()).to(target)), (shape, axis)


def test_some_rows_of_a_sum_merge_as_they_do_among_all() -> None:
    delta, base = summed((301, 1003), "both", 2, 3), torch.zeros(301, 1003)
    whole, part = torch.empty_like(base), torch.empty(280, 1003)
    merge_delta(base, delta, slice(None), whole)
    merge_delta(base[20:300], delta, slice(20, 300), part)
    assert same_bits(part, whole[20:300])


def test_some_rows_merge_as_they_do_among_all() -> None:
    delta, base = (
        drawn((9, 45), "both"),
        torch.randn(9, 45, generator=torch.Generator().manual_seed(2)).bfloat16(),
    )
    whole, part = merged(base, delta, torch.bfloat16), torch.empty(4, 45, dtype=torch.bfloat16)
    merge_rows(base[3:7], delta, slice(3, 7), part)
    assert same_bits(part, whole[3:7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_go_to_the_even_neighbour(dtype: torch.dtype) -> None:
    half_a_step = torch.finfo(dtype).eps / 2
    delta = SignPlane.from_scales(pack_signs(torch.ones(2, 40)), 40, torch.full((2,), half_a_step), None)
    base = torch.ones(2, 40, dtype=dtype)
    base[1] += torch.finfo(dtype).eps
    expected = torch.stack([torch.ones(40), torch.full((40,), 1 + 2 * torch.finfo(dtype).eps)]).to(dtype)
    assert same_bits(merged(base, delta, dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_overflows_becomes_infinity_and_nan_stays_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    delta = SignPlane.from_scales(pack_signs(torch.ones(1, 37)), 37, torch.tensor([0.01 * largest]), None)
    base = torch.zeros(1, 37, dtype=dtype)
    base[0, 0], base[0, 35], base[0, 36] = largest, largest, math.nan
    out = merged(base, delta, dtype)
    assert out[0, [0, 35]].tolist() == [math.inf, math.inf]
    assert out[0, 36].isnan()
    assert out[0, 1:35].isfinite().all()


def test_values_below_the_normal_range_are_kept() -> None:
    delta = SignPlane.from_scales(pack_signs(-torch.ones(3, 50)), 50, torch.full((3,), 2.0**-120), None)
    base = torch.full((3, 50), 2.0**-130).bfloat16()
    expected = (base.float() + delta.dense()).bfloat16()
    assert same_bits(merged(base, delta, torch.bfloat16), expected)
    subnormal = torch.full((3, 50), 2.0**-20).half()
    tiny = SignPlane.from_scales(pack_signs(torch.ones(3, 50)), 50, torch.full((3,), 2.0**-22), None)
    assert same_bits(merged(subnormal, tiny, torch.float16), (subnormal.float() + tiny.dense()).half())


def test_zeros_of_a_sum_keep_their_signs() -> None:
    nothing = SignPlane.from_scales(pack_signs(-torch.ones(2, 40)), 40, torch.zeros(2), None)
    delta, base = MatrixDelta((nothing, nothing)), torch.full((2, 40), -0.0)
    out = torch.empty(2, 40)
    merge_delta(base, delta, slice(None), out)
    assert same_bits(out, base + delta.dense())
    assert out.signbit().all()


def merge_in_a_process(cache: Path, *dtypes: str) -> list[list[str]]:
    """Return, for each dtype, how many passes of the compiler ran, and two of the merged values."""
    command = [sys.executable, "-c", PROGRAM, *dtypes]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def test_a_pair_of_dtypes_is_compiled_once_per_machine(tmp_path: Path) -> None:
    (first,) = merge_in_a_process(tmp_path, "bfloat16")
    assert int(first[0]) > 0
    second, other = merge_in_a_process(tmp_path, "bfloat16", "float32")
    assert second == ["0", "-1.0", "1.0"]
    assert int(other[0]) > 0
    assert other[1:] == ["-1.0", "1.0"]
