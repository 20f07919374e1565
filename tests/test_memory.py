"""How memory is shared out between the key-value cache and slots."""

from __future__ import annotations

import pytest

from server.engine.memory import Shares, Wanted, share_out
from server.errors import NotServable

PAGE, SLOT = 1000, 30_000


def shares(free: int, kv: int | None = None, slots: int | None = None, max_tokens: int = 10**9) -> Shares:
    return share_out(free, PAGE, 16, SLOT, Wanted(kv, slots, max_tokens))


def test_half_is_the_cache_s_and_half_is_slots_where_nothing_is_asked_for() -> None:
    assert shares(600_000) == Shares(num_pages=300, num_slots=10)


def test_the_cache_takes_no_more_than_can_be_used_and_slots_get_the_rest() -> None:
    assert shares(600_000, max_tokens=16 * 99) == Shares(num_pages=100, num_slots=16)


def test_what_is_asked_for_is_given_and_the_other_takes_what_is_left() -> None:
    assert shares(600_000, kv=90_000) == Shares(90, 17)
    assert shares(600_000, slots=3) == Shares(510, 3)
    assert shares(600_000, kv=90_000, slots=3) == Shares(90, 3)


def test_many_slots_are_taken_only_when_asked_for() -> None:
    assert shares(10**9).num_slots == 64
    assert shares(10**9, slots=500).num_slots == 500


@pytest.mark.parametrize(
    ("free", "kv", "slots"),
    [(60_000, None, 2), (60_000, 59_000, None), (600_000, 400_000, 8), (1500, None, None)],
)
def test_what_does_not_fit_is_refused_with_the_ways_out(free: int, kv: int | None, slots: int | None) -> None:
    with pytest.raises(NotServable, match="lower --max-gpu-deltas, --kv-cache-gb or"):
        shares(free, kv, slots)


def test_a_cache_of_less_than_two_pages_is_to_be_raised() -> None:
    with pytest.raises(NotServable, match="raise it"):
        shares(600_000, kv=1500)
