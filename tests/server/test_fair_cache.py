"""The cache that tenants share, and the owner of the most."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from server.fairness import FairCache, Holdings


def test_the_least_recently_used_value_goes_first() -> None:
    values: FairCache[str, int] = FairCache(2)
    values.put("a", 1, "one")
    values.put("b", 2, "one")
    assert values.get("a") == 1
    values.put("c", 3, "one")
    assert [values.get(key) for key in "abc"] == [1, None, 3]


def test_a_tenant_with_many_values_takes_none_from_others() -> None:
    values: FairCache[str, int] = FairCache(4)
    values.put("honest", 0, "honest")
    for number in range(100):
        values.put(f"hostile-{number}", number, "hostile")
    assert values.get("honest") == 0
    assert values.get("hostile-99") == 99
    assert values.get("hostile-96") is None


def test_the_tenant_with_the_largest_values_loses_one_whatever_their_number() -> None:
    values: FairCache[str, int] = FairCache(100)
    for number in range(8):
        values.put(f"small-{number}", number, "small", 5)
    values.put("large", 0, "large", 60)
    values.put("larger", 1, "large", 50)
    assert [values.get(f"small-{number}") for number in range(8)] == list(range(8))
    assert (values.get("large"), values.get("larger")) == (None, 1)
    assert (values.size, len(values)) == (90, 9)


def test_a_new_value_stays_also_if_it_is_larger_than_all_that_others_have() -> None:
    values: FairCache[str, int] = FairCache(10)
    for number, owner in enumerate("abc"):
        values.put(owner, number, owner, 3)
    values.put("d", 3, "d", 5)
    assert [values.get(key) for key in "abcd"] == [None, None, 2, 3]
    values.put("e", 4, "e", 50)
    assert [values.get(key) for key in "cde"] == [None, None, 4]
    values.put("f", 5, "f", 5)
    assert (values.get("e"), values.get("f"), values.size) == (None, 5, 5)


def test_a_value_that_is_put_again_has_its_new_size_and_owner() -> None:
    values: FairCache[str, int] = FairCache(10)
    values.put("a", 1, "one", 3)
    values.put("a", 2, "two", 4)
    assert (values.get("a"), values.size, len(values)) == (2, 4, 1)


def test_of_tenants_with_one_value_each_the_one_that_used_its_own_least_recently_loses_it() -> None:
    values: FairCache[str, int] = FairCache(3)
    for number, owner in enumerate("abc"):
        values.put(owner, number, owner)
    assert values.get("a") == 0
    values.put("d", 3, "d")
    assert [values.get(key) for key in "abcd"] == [0, None, 2, 3]


def test_a_dropped_value_is_gone_and_may_be_dropped_again() -> None:
    values: FairCache[str, int] = FairCache(4)
    values.put("a", 1, "one")
    values.drop("a")
    values.drop("a")
    assert values.get("a") is None


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 200))
def test_the_largest_holder_and_its_lead_are_those_of_all_amounts(seed: int, num_owners: int) -> None:
    draw = random.Random(seed)
    holdings, held = Holdings(), dict[str, int]()
    for _ in range(400):
        owner = str(draw.randrange(num_owners))
        amount = draw.choice([0, draw.randrange(5), draw.randrange(100)])
        holdings.hold(owner, amount)
        # In order of use.
        held.pop(owner, None)
        if amount:
            held[owner] = amount
        if not held or draw.random() < 0.5:
            continue
        largest, lead = holdings.largest()
        assert largest == max(held, key=held.__getitem__)
        others = [amount for other, amount in held.items() if other != largest]
        # Those that shrank may be taken for as large as they were.
        assert 1 <= lead <= max(1, held[largest] - max(others, default=0))


class Model:
    """The same as `FairCache`, by looking at everything each time."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        # In order of use, as the owners.
        self.kept: dict[int, tuple[str, int]] = {}
        self.owners: list[str] = []

    def use(self, owner: str) -> None:
        self.owners = [other for other in self.owners if other != owner] + [owner]

    def get(self, key: int) -> bool:
        if key not in self.kept:
            return False
        self.kept[key] = self.kept.pop(key)
        self.use(self.kept[key][0])
        return True

    def drop(self, key: int) -> None:
        owner, _ = self.kept.pop(key, ("", 0))
        self.use(owner)

    def put(self, key: int, owner: str, size: int) -> None:
        self.drop(key)
        self.kept[key] = owner, size
        self.use(owner)
        while self.size > self.max_size and len(self.kept) > 1:
            sizes = {
                other: sum(size for name, size in self.kept.values() if name == other)
                for other in self.owners
            }
            if len([name for name, _ in self.kept.values() if name == owner]) == 1:
                # It has the new one alone.
                del sizes[owner]
            largest = max(sizes, key=sizes.__getitem__)
            self.drop(next(key for key, (name, _) in self.kept.items() if name == largest))
        self.use(owner)

    @property
    def size(self) -> int:
        return sum(size for _, size in self.kept.values())


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32))
def test_the_same_values_are_kept_as_when_all_are_looked_at_each_time(seed: int) -> None:
    draw = random.Random(seed)
    values, model = FairCache[int, int](50), Model(50)
    for _ in range(300):
        key, action = draw.randrange(40), draw.random()
        if action < 0.3:
            assert (values.get(key) == key) == model.get(key)
        elif action < 0.4:
            values.drop(key)
            model.drop(key)
        else:
            owner, size = draw.choice("abcd"), draw.randrange(1, 20)
            values.put(key, key, owner, size)
            model.put(key, owner, size)
        assert (len(values), values.size) == (len(model.kept), model.size)
    assert [values.get(key) for key in model.kept] == list(model.kept)
