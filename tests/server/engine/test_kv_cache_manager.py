"""Pages of sequences, and the prefixes that are found again, by delta and tenant."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine import kv_cache_manager
from server.engine.kv_cache_manager import PADDING_PAGE, KVCacheManager
from server.engine.sequence import Sequence
from server.protocol import request
from server.protocol.request import PageHashes, Request, SamplingParams, page_hash, token_ids_of
from tests.server.helpers.simulation import version

SIZE = 4


def sequence(
    tokens: list[int],
    digest: str | None = None,
    tenant: str = "default",
    *,
    prompt_logprobs: int | None = None,
) -> Sequence:
    record = None if digest is None else version(digest)
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    return Sequence(Request("r", tenant, digest, record, token_ids_of(tokens), 1 << 20, params), 0)


def begin(cache: KVCacheManager, seq: Sequence) -> Sequence:
    cache.attach_prefix(seq)
    return seq


def compute(cache: KVCacheManager, seq: Sequence) -> None:
    """Compute all tokens, as one step would."""
    assert cache.allocate(seq, seq.num_tokens - seq.num_computed_tokens)
    seq.num_computed_tokens = seq.num_tokens
    cache.cache_full_pages(seq)


def seen(cache: KVCacheManager, tokens: list[int], digest: str | None = None, tenant: str = "default") -> int:
    """Return how many cached tokens a new sequence is given."""
    newcomer = begin(cache, sequence(tokens, digest, tenant))
    found = newcomer.num_computed_tokens
    cache.release(newcomer)
    return found


def test_a_prefix_is_found_again_in_whole_pages_and_its_last_token_is_left_to_compute() -> None:
    cache = KVCacheManager(10, SIZE)
    first = begin(cache, sequence(list(range(10))))
    compute(cache, first)
    assert seen(cache, list(range(10))) == 8
    assert seen(cache, list(range(8))) == 4
    assert seen(cache, [0, 1, 2, 3, 9, 9]) == 4
    assert seen(cache, [9, 1, 2, 3, 4, 5]) == 0


def test_a_prefix_outlives_the_sequence_that_made_it() -> None:
    cache = KVCacheManager(10, SIZE)
    first = begin(cache, sequence(list(range(9))))
    compute(cache, first)
    cache.release(first)
    assert cache.num_available == cache.num_pages
    assert seen(cache, list(range(9))) == 8


def test_a_prefix_is_found_only_by_the_same_delta_and_tenant() -> None:
    cache = KVCacheManager(10, SIZE)
    compute(cache, begin(cache, sequence(list(range(9)), "ab", "c")))
    assert seen(cache, list(range(9)), "ab", "c") == 8
    for digest, tenant in ((None, "c"), ("", "c"), ("ab", "d"), ("a", "bc"), ("abc", ""), ("ac", "c")):
        assert seen(cache, list(range(9)), digest, tenant) == 0


def test_a_sequence_with_prompt_logprobs_is_given_no_cached_prefix() -> None:
    cache = KVCacheManager(10, SIZE)
    compute(cache, begin(cache, sequence(list(range(9)))))
    newcomer = begin(cache, sequence(list(range(9)), prompt_logprobs=0))
    assert newcomer.num_computed_tokens == 0


def test_allocating_more_pages_than_are_available_changes_nothing() -> None:
    cache = KVCacheManager(4, SIZE)
    seq = begin(cache, sequence(list(range(20))))
    assert not cache.allocate(seq, 13)
    assert seq.page_table.pages == []
    assert cache.num_available == 3
    assert cache.allocate(seq, 12)
    assert cache.usage == 1


def test_discarded_pages_are_never_found_again() -> None:
    cache = KVCacheManager(10, SIZE)
    bad = begin(cache, sequence(list(range(9))))
    compute(cache, bad)
    cache.discard(bad)
    assert seen(cache, list(range(9))) == 0
    assert cache.num_available == cache.num_pages


def test_the_least_recently_used_prefix_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    cache = KVCacheManager(6, SIZE)
    for start in (0, 100):
        seq = begin(cache, sequence(list(range(start, start + 9))))
        compute(cache, seq)
        cache.release(seq)
    # Used again, so the other one is evicted first.
    assert seen(cache, list(range(9))) == 8
    seq = begin(cache, sequence([7] * 8))
    compute(cache, seq)
    assert seen(cache, list(range(100, 109))) == 4
    assert seen(cache, list(range(9))) == 8


def stream(cache: KVCacheManager, tenant: str, num_prompts: int) -> None:
    """Have a tenant compute prompts of three pages that differ, one after the other."""
    for number in range(num_prompts):
        seq = begin(cache, sequence([1000 + number] * 12, tenant=tenant))
        compute(cache, seq)
        cache.release(seq)


def test_a_tenant_s_prefix_stays_while_another_streams_many_times_the_cache_through() -> None:
    cache = KVCacheManager(13, SIZE)
    seq = begin(cache, sequence(list(range(13)), tenant="a"))
    compute(cache, seq)
    cache.release(seq)
    stream(cache, "b", 100)
    assert seen(cache, list(range(13)), tenant="a") == 12


def test_a_tenant_alone_has_the_whole_cache_and_gives_way_to_others_until_they_have_as_much() -> None:
    cache = KVCacheManager(13, SIZE)
    stream(cache, "a", 4)
    assert cache.num_available == cache.num_pages
    assert [seen(cache, [1000 + number] * 13, tenant="a") for number in range(4)] == [12] * 4
    stream(cache, "b", 2)
    assert [seen(cache, [1000 + number] * 13, tenant="a") for number in range(4)] == [0, 0, 12, 12]
    # While a prompt is computed, its pages do not count, and both lose as many for it.
    stream(cache, "b", 100)
    assert [seen(cache, [1000 + number] * 13, tenant="a") for number in range(4)] == [0, 0, 8, 12]


def test_each_allocated_page_is_reported_once_to_be_zeroed() -> None:
    cache = KVCacheManager(3, SIZE)
    first = begin(cache, sequence([1] * 5))
    compute(cache, first)
    assert sorted(cache.take_pages_to_zero()) == sorted(first.page_table.pages)
    assert cache.take_pages_to_zero() == []
    cache.release(first)
    second = begin(cache, sequence([2] * 5))
    compute(cache, second)
    assert sorted(cache.take_pages_to_zero()) == sorted(second.page_table.pages)


def test_queries_and_hits_are_counted_in_tokens() -> None:
    cache = KVCacheManager(10, SIZE)
    compute(cache, begin(cache, sequence(list(range(9)))))
    waiting = begin(cache, sequence(list(range(9))))
    # As if there were too few pages for the rest.
    cache.release(waiting)
    compute(cache, begin(cache, waiting))
    assert cache.take_prefix_counts() == (18, 8)
    assert cache.take_prefix_counts() == (0, 0)


def with_hashes(tokens: list[int], page_tokens: int, tenant: str = "default") -> Sequence:
    ids = token_ids_of(tokens)
    hashes = PageHashes.of(ids, page_tokens)
    return Sequence(Request("r", tenant, None, None, ids, 1 << 20, page_hashes=hashes), 0)


@pytest.mark.parametrize("page_tokens", [SIZE, SIZE + 1])
@pytest.mark.parametrize("first_has_hashes", [False, True])
def test_hashes_of_a_request_name_the_pages_that_the_engine_would_and_those_of_other_pages_are_not_used(
    page_tokens: int, first_has_hashes: bool
) -> None:
    cache, tokens = KVCacheManager(20, SIZE), list(range(14))
    pair = [with_hashes(tokens, page_tokens), sequence(tokens)]
    first, second = pair if first_has_hashes else pair[::-1]
    for seq in (first, second):
        seq.generated_ids = [7, 8, 9, 10, 11]
    compute(cache, begin(cache, first))
    cache.attach_prefix(second)
    # The fourth page begins in the prompt and ends in what was generated.
    assert second.num_computed_tokens == 16
    assert second.page_table.pages == first.page_table.pages[:4]


def test_hashes_of_a_request_find_no_page_of_another_tenant() -> None:
    cache, tokens = KVCacheManager(20, SIZE), list(range(9))
    compute(cache, begin(cache, with_hashes(tokens, SIZE, "a")))
    assert begin(cache, with_hashes(tokens, SIZE, "a")).num_computed_tokens == 8
    assert begin(cache, with_hashes(tokens, SIZE, "b")).num_computed_tokens == 0


def test_no_page_is_hashed_twice_for_a_sequence_nor_one_whose_hash_came_with_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[bytes | memoryview] = []

    def counting(before: bytes, tokens: bytes | memoryview) -> bytes:
        hashed.append(tokens)
        return page_hash(before, tokens)

    cache = KVCacheManager(20, SIZE)
    seq, given_all = sequence(list(range(14))), with_hashes(list(range(100, 114)), SIZE)
    monkeypatch.setattr(kv_cache_manager, "page_hash", counting)
    monkeypatch.setattr(request, "page_hash", counting)
    compute(cache, begin(cache, given_all))
    assert len(hashed) == 0
    compute(cache, begin(cache, seq))
    assert len(hashed) == 3
    for _ in range(3):
        # As if it waited for pages.
        cache.release(seq)
        cache.attach_prefix(seq)
        assert seq.num_computed_tokens == 12
    assert len(hashed) == 3
    seq.generated_ids += [1, 2]
    compute(cache, seq)
    assert len(hashed) == 4


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 12))
def test_pages_are_neither_lost_nor_given_away_twice(seed: int, num_pages: int) -> None:
    draw = random.Random(seed)
    cache, live = KVCacheManager(num_pages, SIZE), list[Sequence]()
    for _ in range(60):
        action = draw.random()
        if action < 0.5:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 14))]
            seq = begin(cache, sequence(tokens, tenant=draw.choice("ab")))
            if cache.allocate(seq, len(tokens) - seq.num_computed_tokens):
                seq.num_computed_tokens = len(tokens)
                cache.cache_full_pages(seq)
                live.append(seq)
            else:
                cache.release(seq)
        elif live:
            seq = live.pop(draw.randrange(len(live)))
            (cache.discard if action > 0.9 else cache.release)(seq)
        held = {page for seq in live for page in seq.page_table.pages}
        assert PADDING_PAGE not in held
        assert len(held) + cache.num_available == cache.num_pages
        private = [page for h in live for page in h.page_table.pages[h.page_table.num_hashed :]]
        # A page that is not full has one user.
        assert len(private) == len(set(private))


def test_a_cache_without_pages_and_a_second_prefix_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 pages, got 1"):
        KVCacheManager(1, SIZE)
    cache = KVCacheManager(10, SIZE)
    seq = begin(cache, sequence(list(range(9))))
    compute(cache, seq)
    with pytest.raises(RuntimeError, match="r/0 has pages already"):
        cache.attach_prefix(seq)
