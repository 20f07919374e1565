"""Pages: who holds them, and which prefixes are found again, by whom."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.scheduling.kv_cache import PADDING_PAGE, KVCache, PageTable

SIZE = 4


@dataclass(eq=False)
class Held:
    """The least that the cache needs of a sequence."""

    tokens: list[int]
    digest: str | None = None
    tenant: str = "default"
    reuses_prefix: bool = True
    num_computed_tokens: int = 0
    held: PageTable = field(default_factory=PageTable)


def begin(cache: KVCache, holder: Held) -> Held:
    cache.attach(holder)
    return holder


def compute(cache: KVCache, holder: Held) -> None:
    """All of its tokens, as one step would."""
    assert cache.grow(holder, len(holder.tokens) - holder.num_computed_tokens)
    holder.num_computed_tokens = len(holder.tokens)
    cache.commit(holder)


def seen(cache: KVCache, tokens: list[int], digest: str | None = None, tenant: str = "default") -> int:
    """How many tokens of a prefix a newcomer is given."""
    newcomer = begin(cache, Held(tokens, digest, tenant))
    found = newcomer.num_computed_tokens
    cache.release(newcomer)
    return found


def test_a_prefix_is_found_again_in_whole_pages_and_its_last_token_is_left_to_compute() -> None:
    cache = KVCache(10, SIZE)
    first = begin(cache, Held(list(range(10))))
    compute(cache, first)
    assert seen(cache, list(range(10))) == 8
    assert seen(cache, list(range(8))) == 4
    assert seen(cache, [0, 1, 2, 3, 9, 9]) == 4
    assert seen(cache, [9, 1, 2, 3, 4, 5]) == 0


def test_a_prefix_outlives_the_sequence_that_made_it() -> None:
    cache = KVCache(10, SIZE)
    first = begin(cache, Held(list(range(9))))
    compute(cache, first)
    cache.release(first)
    assert cache.num_available == cache.num_pages
    assert seen(cache, list(range(9))) == 8


def test_a_prefix_is_another_ones_for_every_other_delta_and_tenant() -> None:
    cache = KVCache(10, SIZE)
    compute(cache, begin(cache, Held(list(range(9)), "ab", "c")))
    assert seen(cache, list(range(9)), "ab", "c") == 8
    for digest, tenant in ((None, "c"), ("", "c"), ("ab", "d"), ("a", "bc"), ("abc", ""), ("ac", "c")):
        assert seen(cache, list(range(9)), digest, tenant) == 0


def test_who_wants_every_token_computed_is_given_none() -> None:
    cache = KVCache(10, SIZE)
    compute(cache, begin(cache, Held(list(range(9)))))
    newcomer = begin(cache, Held(list(range(9)), reuses_prefix=False))
    assert newcomer.num_computed_tokens == 0


def test_growing_beyond_what_is_there_changes_nothing() -> None:
    cache = KVCache(4, SIZE)
    holder = begin(cache, Held(list(range(20))))
    assert not cache.grow(holder, 13)
    assert holder.held.pages == []
    assert cache.num_available == 3
    assert cache.grow(holder, 12)
    assert cache.usage == 1


def test_bad_numbers_are_never_found_again() -> None:
    cache = KVCache(10, SIZE)
    bad = begin(cache, Held(list(range(9))))
    compute(cache, bad)
    cache.discard(bad)
    assert seen(cache, list(range(9))) == 0
    assert cache.num_available == cache.num_pages


def test_the_least_recently_used_prefix_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    cache = KVCache(6, SIZE)
    for start in (0, 100):
        holder = begin(cache, Held(list(range(start, start + 9))))
        compute(cache, holder)
        cache.release(holder)
    assert seen(cache, list(range(9))) == 8  # used again, so the other is the older one now
    holder = begin(cache, Held([7] * 8))
    compute(cache, holder)
    assert seen(cache, list(range(100, 109))) == 4
    assert seen(cache, list(range(9))) == 8


def test_every_page_is_reported_once_each_time_it_changes_hands() -> None:
    cache = KVCache(3, SIZE)
    first = begin(cache, Held([1] * 5))
    compute(cache, first)
    assert sorted(cache.take_fresh()) == sorted(first.held.pages)
    assert cache.take_fresh() == []
    cache.release(first)
    second = begin(cache, Held([2] * 5))
    compute(cache, second)
    assert sorted(cache.take_fresh()) == sorted(second.held.pages)


def test_queries_and_hits_are_counted_in_tokens() -> None:
    cache = KVCache(10, SIZE)
    compute(cache, begin(cache, Held(list(range(9)))))
    waiting = begin(cache, Held(list(range(9))))
    cache.release(waiting)  # there was no room for it
    compute(cache, begin(cache, waiting))
    assert cache.take_counts() == (18, 8)
    assert cache.take_counts() == (0, 0)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 12))
def test_pages_are_neither_lost_nor_given_away_twice(seed: int, num_pages: int) -> None:
    draw = random.Random(seed)
    cache, holders = KVCache(num_pages, SIZE), list[Held]()
    for _ in range(60):
        action = draw.random()
        if action < 0.5:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 14))]
            holder = begin(cache, Held(tokens, tenant=draw.choice("ab")))
            if cache.grow(holder, len(tokens) - holder.num_computed_tokens):
                holder.num_computed_tokens = len(tokens)
                cache.commit(holder)
                holders.append(holder)
            else:
                cache.release(holder)
        elif holders:
            holder = holders.pop(draw.randrange(len(holders)))
            (cache.discard if action > 0.9 else cache.release)(holder)
        held = {page for holder in holders for page in holder.held.pages}
        assert PADDING_PAGE not in held
        assert len(held) + cache.num_available == cache.num_pages
        private = [page for h in holders for page in h.held.pages[len(h.held.keys) :]]
        assert len(private) == len(set(private))  # a page that is not full has one holder
