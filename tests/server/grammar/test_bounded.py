"""The cache that tenants share."""

from __future__ import annotations

from server.fairness import Bounded


def test_the_least_recently_used_value_goes_first() -> None:
    values: Bounded[str, int] = Bounded(2)
    values.put("a", 1, "one")
    values.put("b", 2, "one")
    assert values.get("a") == 1
    values.put("c", 3, "one")
    assert [values.get(key) for key in "abc"] == [1, None, 3]


def test_a_tenant_with_many_values_takes_none_from_others() -> None:
    values: Bounded[str, int] = Bounded(4)
    values.put("honest", 0, "honest")
    for number in range(100):
        values.put(f"hostile-{number}", number, "hostile")
    assert values.get("honest") == 0
    assert values.get("hostile-99") == 99
    assert values.get("hostile-96") is None


def test_a_dropped_value_is_gone_and_may_be_dropped_again() -> None:
    values: Bounded[str, int] = Bounded(4)
    values.put("a", 1, "one")
    values.drop("a")
    values.drop("a")
    assert values.get("a") is None
