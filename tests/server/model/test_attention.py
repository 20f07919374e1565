"""Paged attention equals attention over whole sequences, written out in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from server.kernels.reference import AttentionParams
from server.model.attention import AttentionMetadata, Chunk, LayerShape, PagedAttention

HEADS, KV_HEADS, DIM, PAGE_TOKENS = 6, 2, 12, 4
# Tokens of each sequence in the cache, and new tokens.
LENGTHS = [(0, 5), (9, 1), (3, 1), (17, 6), (0, 1), (30, 1)]
VARIANTS = [
    AttentionParams(None, None, None, None),
    AttentionParams(0.3, 5, None, None),
    AttentionParams(None, None, 2.0, None),
    AttentionParams(0.2, 7, 1.5, torch.linspace(-1, 1, HEADS)),
    AttentionParams(None, None, None, torch.linspace(-2, 2, HEADS)),
]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Queries, keys and values of one whole sequence, each [tokens, heads, dim]."""

    query: Tensor
    key: Tensor
    value: Tensor


def paged(num_pages: int, dtype: torch.dtype = torch.float32) -> PagedAttention:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    attention = PagedAttention(LlamaForCausalLM(config).to(dtype), PAGE_TOKENS)  # type: ignore[arg-type]
    attention.shapes[0] = LayerShape(KV_HEADS, DIM, DIM, HEADS)
    attention.allocate(num_pages)
    return attention


def drawn(length: int, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(length, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return Tokens(query, key, value)


def oracle(tokens: Tokens, position: int, params: AttentionParams) -> Tensor:  # [heads, dim] float64
    """Compute one token's attention from its own sequence."""
    first = 0 if params.window is None else max(0, position - params.window + 1)
    rows = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        keys = tokens.key[first : position + 1, kv_head].double()
        scores = keys @ tokens.query[position, head].double()
        scores *= DIM**-0.5 if params.scaling is None else params.scaling
        if params.softcap is not None:
            scores = params.softcap * (scores / params.softcap).tanh()
        weights = scores.exp()
        total = weights.sum() + (0 if params.sinks is None else params.sinks[head].double().exp())
        rows.append(weights / total @ tokens.value[first : position + 1, kv_head].double())
    return torch.stack(rows)


def run(attention: PagedAttention, parts: list[tuple[Tokens, Chunk]], params: AttentionParams) -> Tensor:
    """Run one step. Return the new tokens' outputs, [tokens, heads, dim]."""

    def new(name: str) -> Tensor:
        rows = [getattr(t, name)[c.start : c.start + c.num_tokens] for t, c in parts]
        return torch.cat(rows).transpose(0, 1)[None]

    metadata = AttentionMetadata.of([chunk for _, chunk in parts], PAGE_TOKENS, torch.device("cpu"))
    with attention.step(metadata):
        return attention.attend(0, new("query"), new("key"), new("value"), params)[0]


def scattered_pages(attention: PagedAttention, generator: torch.Generator) -> list[list[int]]:
    """Draw pages for each of LENGTHS, out of order."""
    needs = [-(-(start + count) // PAGE_TOKENS) for start, count in LENGTHS]
    free = (torch.randperm(sum(needs), generator=generator) + 1).tolist()
    return [[free.pop() for _ in range(need)] for need in needs]


@pytest.mark.parametrize("params", VARIANTS)
def test_each_sequence_attends_to_its_own_past_alone(params: AttentionParams) -> None:
    generator = torch.Generator().manual_seed(0)
    attention = paged(60)
    pages = scattered_pages(attention, generator)
    tokens = [drawn(start + count, seed) for seed, (start, count) in enumerate(LENGTHS)]
    for one, own, (start, _) in zip(tokens, pages, LENGTHS, strict=True):
        if start:
            run(attention, [(one, Chunk(0, start, own))], params)
    parts = [
        (one, Chunk(start, count, own))
        for one, own, (start, count) in zip(tokens, pages, LENGTHS, strict=True)
    ]
    output = run(attention, parts, params)
    expected = [
        oracle(one, position, params)
        for one, (start, count) in zip(tokens, LENGTHS, strict=True)
        for position in range(start, start + count)
    ]
    torch.testing.assert_close(output.double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_single_tokens_over_gathered_pages_are_the_same(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, pages = drawn(9, 3), [4, 2, 7]
    tokens = Tokens(whole.query.to(dtype), whole.key.to(dtype), whole.value.to(dtype))
    parts = [(tokens, Chunk(8, 1, pages))]

    def last(attention: PagedAttention) -> Tensor:
        run(attention, [(tokens, Chunk(0, 8, pages))], VARIANTS[3])
        return run(attention, parts, VARIANTS[3])

    by_kernel = last(paged(12, dtype))
    monkeypatch.setattr("server.model.attention._single_token_kernel", lambda kind: None)
    torch.testing.assert_close(last(paged(12, dtype)), by_kernel, rtol=tolerance, atol=tolerance)


def test_a_prompt_in_chunks_gives_what_it_gives_at_once() -> None:
    tokens, pages = drawn(23, 5), [3, 1, 7, 2, 9, 4]
    params = VARIANTS[1]
    whole = run(paged(12), [(tokens, Chunk(0, 23, pages))], params)
    attention = paged(12)
    parts = [run(attention, [(tokens, Chunk(a, n, pages))], params) for a, n in ((0, 7), (7, 1), (8, 15))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-6)


def test_a_page_of_another_sequence_is_cleared_so_that_no_nan_shows_through() -> None:
    attention, tokens = paged(4), drawn(6, 1)
    poison = Tokens(*(torch.full_like(part, torch.nan) for part in (tokens.query, tokens.key, tokens.value)))
    run(attention, [(poison, Chunk(0, 6, [1, 2]))], VARIANTS[0])
    attention.clear([1, 2])
    output = run(attention, [(tokens, Chunk(0, 6, [2, 1]))], VARIANTS[0])
    assert output.isfinite().all()


def test_the_nan_of_one_sequence_stays_its_own() -> None:
    attention, tokens = paged(6), drawn(5, 1)
    poison = Tokens(*(torch.full_like(part, torch.nan) for part in (tokens.query, tokens.key, tokens.value)))
    want = run(paged(6), [(tokens, Chunk(0, 5, [3, 4]))], VARIANTS[0])
    both = run(attention, [(poison, Chunk(0, 5, [1, 2])), (tokens, Chunk(0, 5, [3, 4]))], VARIANTS[0])
    assert torch.equal(both[5:], want)
    step = run(attention, [(poison, Chunk(4, 1, [1, 2])), (tokens, Chunk(4, 1, [3, 4]))], VARIANTS[0])
    assert step[1].isfinite().all()
