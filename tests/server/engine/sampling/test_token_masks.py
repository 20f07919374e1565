"""Packed masks applied to logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance.numpy import apply_token_bitmask_inplace

from server.engine.sampling.token_masks import apply_masks
from tests.server.engine.helpers.masks import pack

VOCABS = [1, 5, 8, 31, 32, 33, 259]


@settings(deadline=None)
@given(st.data(), st.sampled_from(VOCABS), st.integers(1, 4))
def test_allowed_logits_keep_their_bits_and_the_others_are_minus_infinity(
    data: st.DataObject, vocab: int, num_rows: int
) -> None:
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[:, ::3] = -0.0
    allowed = [data.draw(st.sets(st.integers(0, vocab - 1))) for _ in range(num_rows)]
    masked = apply_masks(logits.clone(), [pack(tokens, vocab) for tokens in allowed])
    for row, tokens in enumerate(allowed):
        kept = torch.tensor([token in tokens for token in range(vocab)])
        assert torch.equal(masked[row][kept].view(torch.int32), logits[row][kept].view(torch.int32))
        assert torch.all(masked[row][~kept] == -torch.inf)


def test_the_order_of_bits_is_llguidance_s() -> None:
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (3, 9), dtype=np.int32)
    logits = torch.randn(3, 259, generator=torch.Generator().manual_seed(2))
    want = logits.clone()
    apply_token_bitmask_inplace(want.numpy(), words)
    assert torch.equal(apply_masks(logits, [row.tobytes() for row in words]), want)


def test_tokens_beyond_a_shorter_mask_are_not_allowed() -> None:
    masked = apply_masks(torch.zeros(2, 70), [pack(range(33), 33), pack(range(70), 70)])
    assert masked[0].isfinite().nonzero()[:, 0].tolist() == list(range(33))
    assert masked[1].isfinite().all()


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
