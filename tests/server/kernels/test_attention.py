"""Paged attention kernels equal attention written out in float64. Without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from server.kernels.reference import AttentionGroup, AttentionParams
from server.model import attention as paged
from server.model.attention import AttentionMetadata, Chunk, PagedAttention

pytest.importorskip("triton", reason="Triton is not installed")
from server.kernels import attention_cpu, attention_cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (37, 1, 150, 16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    page: int


SHAPES = [Shape(6, 2, 12, 12, 4), Shape(5, 1, 80, 72, 16), Shape(3, 3, 100, 20, 5), Shape(4, 2, 256, 256, 16)]

# Llama-3.1-8B's heads and Gemma-3-1B's.
LARGE_SHAPES = [Shape(32, 8, 128, 128, 16), Shape(4, 1, 256, 256, 16)]


def params_of(name: str, num_heads: int) -> AttentionParams:
    sinks = torch.linspace(-2, 3, num_heads, device=DEVICE)
    return {
        "plain": AttentionParams(None, None, None, None),
        "window": AttentionParams(0.3, 5, None, None),
        "wide window": AttentionParams(None, 1000, None, None),
        "soft cap": AttentionParams(0.7, None, 1.5, None),
        "sinks": AttentionParams(None, None, None, sinks),
        "all": AttentionParams(0.2, 33, 2.0, sinks),
    }[name]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Sequences in a cache whose other elements are NaN."""

    keys: list[Tensor]  # of each sequence: [length, kv heads, key_dim]
    values: list[Tensor]
    cached: tuple[Tensor, Tensor]
    query: Tensor  # [rows, heads, key_dim]
    group: AttentionGroup

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype) -> Case:
        generator = torch.Generator().manual_seed(0)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(DEVICE, dtype)

        keys = [drawn(length, shape.kv_heads, shape.key_dim) for length in LENGTHS]
        values = [drawn(length, shape.kv_heads, shape.value_dim) for length in LENGTHS]
        needs = [-(-length // shape.page) for length in LENGTHS]
        free = torch.randperm(sum(needs) + 3, generator=generator).tolist()
        pages = [[free.pop() for _ in range(need)] for need in needs]
        cached = tuple(
            torch.full(
                (sum(needs) + 3, shape.page, shape.kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE
            )
            for dim in (shape.key_dim, shape.value_dim)
        )
        for sequence, own in enumerate(pages):
            for at in range(LENGTHS[sequence]):
                slot = own[at // shape.page], at % shape.page
                cached[0][slot], cached[1][slot] = keys[sequence][at], values[sequence][at]
        table = torch.tensor([own + [free[0]] * (max(needs) + 1 - len(own)) for own in pages], device=DEVICE)
        rows = torch.tensor([[3], [0], [6], [4]], device=DEVICE)
        positions = torch.tensor(LENGTHS, device=DEVICE)[:, None] - 1
        query = drawn(8, shape.heads, shape.key_dim)
        return cls(keys, values, (cached[0], cached[1]), query, AttentionGroup(rows, table, positions))

    def run(self, params: AttentionParams, kernel: ModuleType = attention_cuda) -> Tensor:
        """Return all rows of the output. Rows of no sequence are NaN before."""
        sizes = (*self.query.shape[:2], self.cached[1].shape[3])
        output = torch.full(sizes, torch.nan, dtype=self.query.dtype, device=DEVICE)
        kernel.attend(output, self.query, self.cached, self.group, params)
        return output

    def expected(self, sequence: int, params: AttentionParams) -> Tensor:  # [heads, value_dim] float64
        """Compute one sequence's output from its own keys."""
        query = self.query[self.group.row_index[sequence, 0]].double()
        first = 0 if params.window is None else max(0, LENGTHS[sequence] - params.window)
        repeats = len(query) // self.keys[0].shape[1]
        keys = self.keys[sequence][first:].double().repeat_interleave(repeats, 1)
        values = self.values[sequence][first:].double().repeat_interleave(repeats, 1)
        scores = torch.einsum("hd,khd->hk", query, keys)
        scores *= query.shape[1] ** -0.5 if params.scaling is None else params.scaling
        if params.softcap is not None:
            scores = params.softcap * (scores / params.softcap).tanh()
        weights = scores.exp()
        sinks = 0 if params.sinks is None else params.sinks.double().exp()
        return torch.einsum("hk,khd->hd", weights / (weights.sum(1) + sinks)[:, None], values)


def check(case: Case, params: AttentionParams, kernel: ModuleType = attention_cuda) -> None:
    output = case.run(params, kernel)
    tolerance = TOLERANCE[output.dtype]
    for sequence, row in enumerate(case.group.row_index[:, 0].tolist()):
        expected = case.expected(sequence, params)
        torch.testing.assert_close(output[row].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["plain", "window", "wide window", "soft cap", "sinks", "all"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_attends_to_its_own_keys_whatever_the_rest_of_the_cache_holds(
    shape: Shape, name: str
) -> None:
    check(Case.of(shape, torch.float32), params_of(name, shape.heads))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the cache is on the GPU")
@pytest.mark.parametrize("name", ["plain", "window", "wide window", "soft cap", "sinks", "all"])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE_SHAPES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_on_the_cpu_attends_to_its_own_keys(dtype: torch.dtype, shape: Shape, name: str) -> None:
    check(Case.of(shape, dtype), params_of(name, shape.heads), attention_cpu)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the cache is on the GPU")
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_scores_on_the_cpu_may_be_hundreds_apart(shape: Shape) -> None:
    case, params = Case.of(shape, torch.float32), AttentionParams(8.0, None, None, None)
    output = case.run(params, attention_cpu)
    for sequence, row in enumerate(case.group.row_index[:, 0].tolist()):
        expected = case.expected(sequence, params)
        # A score of some hundreds is rounded by 1e-5, and its weight by as much of itself.
        torch.testing.assert_close(output[row].double(), expected, rtol=3e-4, atol=3e-4)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the cache is on the GPU")
@pytest.mark.parametrize("shape", [*SHAPES, LARGE_SHAPES[0]])
def test_any_number_of_threads_computes_the_same_bits(shape: Shape) -> None:
    case, params = Case.of(shape, torch.bfloat16), params_of("all", shape.heads)
    before = torch.get_num_threads()
    outputs = []
    try:
        for num_threads in (1, 2, 3, 4, 6):
            torch.set_num_threads(num_threads)
            outputs.append(case.run(params, attention_cpu).nan_to_num(7.0))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the cache is on the GPU")
def test_nan_on_the_cpu_stays_in_its_sequence() -> None:
    case, params = Case.of(SHAPES[0], torch.bfloat16), params_of("plain", SHAPES[0].heads)
    before = case.run(params, attention_cpu)
    case.cached[0][case.group.page_table[0, 0], 0] = torch.nan
    output = case.run(params, attention_cpu)
    assert output[case.group.row_index[0, 0]].isnan().all()
    others = case.group.row_index[1:, 0]
    assert torch.equal(output[others], before[others])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_are_summed_in_float32(dtype: torch.dtype) -> None:
    check(Case.of(SHAPES[1], dtype), params_of("all", SHAPES[1].heads))


@pytest.mark.parametrize("name", ["plain", "window", "all"])
def test_many_parts_of_a_context_add_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some parts of the shorter sequences are empty.
    monkeypatch.setattr(attention_cuda, "MIN_PART", 16)
    monkeypatch.setattr(attention_cuda, "_num_sms", lambda device: 64)
    check(Case.of(SHAPES[0], torch.float32), params_of(name, SHAPES[0].heads))


def test_rows_of_no_sequence_are_not_touched() -> None:
    case = Case.of(SHAPES[0], torch.float32)
    others = sorted(set(range(8)) - set(case.group.row_index[:, 0].tolist()))
    assert case.run(params_of("plain", SHAPES[0].heads))[others].isnan().all()


def test_the_nan_of_one_sequence_stays_its_own() -> None:
    case, params = Case.of(SHAPES[0], torch.float32), params_of("plain", SHAPES[0].heads)
    before = case.run(params)
    case.cached[0][case.group.page_table[0, 0], 0] = torch.nan
    output = case.run(params)
    assert output[case.group.row_index[0, 0]].isnan().all()
    others = case.group.row_index[1:, 0]
    assert torch.equal(output[others], before[others])


def test_the_kernels_compile_for_hopper_where_there_is_no_gpu(tmp_path: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    clean["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.helpers.compile_attention_cuda"],
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _, _ in lines] == ["_attend_part", "_attend_part", "_add_parts"]
    assert all(int(size) > 0 for _, size, _ in lines)
    # Products run on tensor cores.
    assert int(lines[0][2]) > 0


def test_heads_that_are_too_large_are_left_to_torch() -> None:
    def served(dim: int, dtype: torch.dtype) -> bool:
        heads = torch.empty(1, 2, 1, dim, dtype=dtype)
        return attention_cuda.serves(heads, heads, heads)

    assert served(256, torch.bfloat16)
    assert not served(512, torch.bfloat16)
    assert not served(64, torch.float64)


def test_a_cpu_attends_without_triton() -> None:
    assert paged._single_token_kernel("cpu") is attention_cpu


def test_a_model_decodes_through_the_kernels_as_it_does_without_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged, "_single_token_kernel", lambda kind: attention_cuda)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(DEVICE).requires_grad_(False)
    ids = torch.randint(0, 50, (2, 45), device=DEVICE)
    want = [model(input_ids=own[None], use_cache=False).logits[0] for own in ids]
    cache = PagedAttention(model, 4)
    model(input_ids=ids[:1], use_cache=False)
    cache.allocate(40)
    pages = [list(range(3, 15)), list(range(30, 15, -1))]
    for starts, count in (((0, 0), 9), ((9, 40), 1)):  # 31 tokens of the second sequence in between
        if starts[1]:
            step(model, cache, ids[1:, 9:40], [Chunk(9, 31, pages[1])])
        chunks = [Chunk(start, count, own) for start, own in zip(starts, pages, strict=True)]
        rows = torch.cat([own[start : start + count] for own, start in zip(ids, starts, strict=True)])
        logits = step(model, cache, rows[None], chunks)
        parts = [own[start : start + count] for own, start in zip(want, starts, strict=True)]
        torch.testing.assert_close(logits, torch.cat(parts), rtol=1e-4, atol=1e-4)


def step(model: Any, cache: PagedAttention, ids: Tensor, chunks: list[Chunk]) -> Tensor:
    positions = [chunk.start + i for chunk in chunks for i in range(chunk.num_tokens)]
    with cache.step(AttentionMetadata.of(chunks, 4, DEVICE)):
        own = torch.tensor([positions], device=DEVICE)
        logits: Tensor = model(input_ids=ids, position_ids=own, use_cache=False).logits
        return logits[0]


def test_single_tokens_of_any_length_are_one_launch_where_there_is_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = [Chunk(0, 1, [1]), Chunk(99, 1, list(range(2, 27)))]
    assert len(AttentionMetadata.of(chunks, 4, DEVICE).groups) == 1
    monkeypatch.setattr(paged, "_single_token_kernel", lambda kind: None)
    assert len(AttentionMetadata.of(chunks, 4, DEVICE).groups) == 2
