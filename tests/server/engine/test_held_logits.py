"""Logits that wait for masks, and packed masks applied to logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance.numpy import apply_token_bitmask_inplace

from server.engine.request_state import HeldLogits, RequestState, SequenceOutput, apply_masks, masked
from server.protocol.request import Request, SamplingParams, token_ids_of
from tests.server.engine.helpers.masks import pack

WIDTH = 40
VOCABS = [1, 5, 8, 31, 32, 33, 259]


def output(num_embeddings: int = WIDTH) -> SequenceOutput:
    """Make a constrained sequence whose mask has not come."""
    request = Request(
        "r", "t", None, None, token_ids_of([1]), num_embeddings, SamplingParams(is_constrained=True)
    )
    state = RequestState(request, lambda event: None, "device", 0.0)
    return state.outputs[state.start_sequence().index]


def allow(one: SequenceOutput, *tokens: int, num_embeddings: int = WIDTH) -> None:
    one.set_mask(0, pack(tokens, num_embeddings))


def test_rows_of_steps_with_and_without_a_variant_of_more_tokens_are_sampled_together() -> None:
    held, narrow, wide = HeldLogits(1.0), output(), output(WIDTH + 30)
    held.hold(narrow, torch.ones(WIDTH), 0.0)
    assert not held.take_ready()
    held.hold(wide, torch.full((WIDTH + 30,), 2.0), 0.0)
    allow(narrow, 3)
    allow(wide, WIDTH + 29, num_embeddings=WIDTH + 30)
    ready = held.take_ready()
    best = {
        one.output: (int(row.argmax()), float(row.max()))
        for one, row in zip(ready, masked(ready), strict=True)
    }
    assert best == {narrow: (3, 1.0), wide: (WIDTH + 29, 2.0)}


def test_a_row_that_waits_is_not_changed_by_its_step_s_memory() -> None:
    held, late, step = HeldLogits(1.0), output(), torch.zeros(2, WIDTH)
    held.hold(late, step[1], 0.0)
    assert held.take_views() == [late]
    held.keep_copy(late)
    step.fill_(torch.nan)
    allow(late, 5)
    assert masked(held.take_ready())[0, 5] == 0.0
    assert not held.take_views()


def test_a_sequence_is_late_until_its_mask_comes_even_if_its_logits_are_dropped() -> None:
    held, one, other = HeldLogits(1.0), output(), output()
    held.hold(one, torch.zeros(WIDTH), 0.0)
    held.hold(other, torch.zeros(WIDTH), 0.5)
    held.drop(one)
    assert held.late(1.2) == [one]
    assert held.late(2.0) == [one, other]
    allow(one, 1)
    assert held.late(2.0) == [other]
    held.forget(other)
    assert held.late(2.0) == []


@settings(deadline=None)
@given(st.data(), st.sampled_from(VOCABS), st.integers(1, 4))
def test_allowed_logits_keep_their_bits_and_the_others_are_minus_infinity(
    data: st.DataObject, vocab: int, num_rows: int
) -> None:
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[:, ::3] = -0.0
    allowed = [data.draw(st.sets(st.integers(0, vocab - 1))) for _ in range(num_rows)]
    found = apply_masks(logits.clone(), [pack(tokens, vocab) for tokens in allowed])
    for row, tokens in enumerate(allowed):
        kept = torch.tensor([token in tokens for token in range(vocab)])
        assert torch.equal(found[row][kept].view(torch.int32), logits[row][kept].view(torch.int32))
        assert torch.all(found[row][~kept] == -torch.inf)


def test_the_order_of_bits_is_llguidance_s() -> None:
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (3, 9), dtype=np.int32)
    logits = torch.randn(3, 259, generator=torch.Generator().manual_seed(2))
    want = logits.clone()
    apply_token_bitmask_inplace(want.numpy(), words)
    assert torch.equal(apply_masks(logits, [row.tobytes() for row in words]), want)


def test_tokens_beyond_a_shorter_mask_are_not_allowed() -> None:
    found = apply_masks(torch.zeros(2, 70), [pack(range(33), 33), pack(range(70), 70)])
    assert found[0].isfinite().nonzero()[:, 0].tolist() == list(range(33))
    assert found[1].isfinite().all()


def test_nan_stays_where_it_is_so_that_a_damaged_row_is_found() -> None:
    logits = torch.full((1, 40), torch.nan)
    assert apply_masks(logits, [pack({3}, 40)]).isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_gives_the_same() -> None:
    logits = torch.randn(3, 259, generator=torch.Generator().manual_seed(4))
    masks = [pack(range(start, 259, 7), 259) for start in range(3)]
    on_device = apply_masks(logits.cuda(), masks).cpu()
    assert torch.equal(on_device, apply_masks(logits, masks))
