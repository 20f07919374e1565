"""Packed token bitmasks: their size, and the tokens that they allow."""

from __future__ import annotations

import pytest
from llguidance.numpy import allocate_token_bitmask

from server.engine.request_state import allows_any, check_first_mask, check_mask, mask_bytes
from server.errors import EngineFailed
from server.protocol.request import Request, SamplingParams, token_ids_of
from tests.server.engine.helpers.masks import pack

SIZES = [1, 7, 8, 31, 32, 33, 259, 128_256]


@pytest.mark.parametrize("num_embeddings", SIZES)
def test_a_mask_has_the_size_of_llguidance_s(num_embeddings: int) -> None:
    assert mask_bytes(num_embeddings) == allocate_token_bitmask(1, num_embeddings).nbytes


@pytest.mark.parametrize("num_embeddings", SIZES)
@pytest.mark.parametrize("change", [-1, 1, 4])
def test_a_mask_of_another_size_is_refused(num_embeddings: int, change: int) -> None:
    with pytest.raises(EngineFailed, match=f"one for {num_embeddings} tokens has"):
        check_mask(bytes(mask_bytes(num_embeddings) + change), num_embeddings)


@pytest.mark.parametrize("num_embeddings", SIZES)
def test_one_allowed_token_is_found_wherever_it_stands(num_embeddings: int) -> None:
    for token in {0, num_embeddings // 2, num_embeddings - 1}:
        assert allows_any(pack({token}, num_embeddings), num_embeddings)
    assert not allows_any(pack(set(), num_embeddings), num_embeddings)


def test_bits_behind_the_last_token_allow_nothing() -> None:
    assert not allows_any(pack({259, 260, 287}, 288), 259)
    assert not allows_any(pack({256, 287}, 288), 256)


@pytest.mark.parametrize(
    ("is_constrained", "first_mask", "message"),
    [(True, None, "came without"), (False, bytes(4), "came with a"), (True, bytes(8), "has 8 bytes")],
)
def test_the_first_mask_belongs_to_constrained_requests(
    is_constrained: bool, first_mask: bytes | None, message: str
) -> None:
    request = Request(
        "a", "default", None, None, token_ids_of([1]), 20, SamplingParams(is_constrained=is_constrained)
    )
    with pytest.raises(EngineFailed, match=message):
        check_first_mask(request, first_mask)
