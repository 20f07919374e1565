"""Choices between replicas whose states are given."""

from __future__ import annotations

from server.scale.routing import Costs, ReplicaReport, VariantRouter

COSTS = Costs()


def report(
    replica: str,
    *,
    resident: set[str] | None = None,
    cached: set[str] | None = None,
    num_open: int = 0,
    num_slots: int = 4,
) -> ReplicaReport:
    return ReplicaReport(
        replica,
        capacity=16,
        num_slots=num_slots,
        num_open=num_open,
        num_loads=0,
        resident=frozenset(resident or ()),
        in_host_cache=frozenset(cached or ()),
    )


def router(*reports: ReplicaReport) -> VariantRouter:
    made = VariantRouter(COSTS)
    for one in reports:
        made.observe(one)
    return made


def test_a_request_goes_where_its_variant_is_resident() -> None:
    for variant in map(str, range(50)):
        assert router(report("a"), report("b", resident={variant}, num_open=1)).ranked(variant)[0] == "b"


def test_a_hot_variant_goes_elsewhere_once_its_replica_is_busy_for_longer_than_a_load() -> None:
    chosen = router(report("a"), report("b", resident={"v"}))
    places = []
    for _ in range(16):
        place = chosen.ranked("v")[0]
        chosen.sent(place, "v")
        places.append(place)
    assert places[0] == "b"
    assert set(places) == {"a", "b"}


def test_a_cold_variant_goes_where_a_slot_is_free() -> None:
    full = {"1", "2", "3", "4"}
    for variant in map(str, range(100, 150)):
        assert router(report("a", resident=full), report("b")).ranked(variant)[0] == "b"


def test_a_host_cache_outweighs_a_free_slot() -> None:
    full = {"1", "2", "3", "4"}
    for variant in map(str, range(100, 150)):
        chosen = router(report("a"), report("b", resident=full, cached={variant}))
        assert chosen.ranked(variant)[0] == "b"


def test_a_variant_in_a_host_cache_is_preferred_to_one_on_disk() -> None:
    for variant in map(str, range(50)):
        assert router(report("a"), report("b", cached={variant})).ranked(variant)[0] == "b"


def test_a_burst_for_one_cold_variant_loads_it_on_one_replica() -> None:
    chosen = router(*(report(name) for name in "abcd"))
    first = chosen.ranked("v")[0]
    chosen.sent(first, "v")
    assert chosen.ranked("v")[0] == first


def test_a_variant_that_is_on_its_way_draws_others_until_the_next_report() -> None:
    chosen = router(*(report(name) for name in "abcd"))
    last = chosen.ranked("v")[-1]
    chosen.expect(last, "v")
    assert chosen.ranked("v")[0] == last
    chosen.observe(report(last))
    assert chosen.ranked("v")[-1] == last


def test_two_routers_choose_the_same_replica_for_a_cold_variant_and_spread_many() -> None:
    names = [f"replica-{number}" for number in range(8)]
    one, other = (router(*(report(name) for name in names)) for _ in range(2))
    variants = [f"{number:064x}" for number in range(400)]
    homes = [one.ranked(variant)[0] for variant in variants]
    assert homes == [other.ranked(variant)[0] for variant in variants]
    assert all(homes.count(name) in range(25, 80) for name in names)


def test_loads_that_wait_make_a_replica_worse_for_another_cold_variant() -> None:
    for variant in map(str, range(50)):
        chosen = router(report("a"), report("b"))
        home, other = chosen.ranked(variant)
        for cold in ("x", "y"):
            chosen.sent(home, cold)
        assert chosen.ranked(variant)[0] == other


def test_the_base_goes_to_the_replica_with_the_fewest_open_requests() -> None:
    assert router(report("a", num_open=3), report("b", num_open=2)).ranked(None) == ["b", "a"]


def test_a_report_counts_the_requests_of_other_routers_beside_own_ones() -> None:
    chosen = router(report("a"), report("b", num_open=1))
    for _ in range(3):
        chosen.sent("a", None)
    # The report of `a` has this router's three requests and two of others.
    chosen.observe(report("a", num_open=5))
    for _ in range(3):
        chosen.ended("a")
    assert chosen.ranked(None) == ["b", "a"]
    chosen.observe(report("a", num_open=0))
    assert chosen.ranked(None) == ["a", "b"]


def test_a_replica_that_is_gone_is_not_chosen_and_its_requests_may_end() -> None:
    chosen = router(report("a"), report("b", num_open=9))
    chosen.sent("a", "v")
    chosen.keep_only({"b"})
    chosen.ended("a")
    assert chosen.ranked("v") == ["b"]
