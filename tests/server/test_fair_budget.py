"""Amounts that tenants share: shares, refusals, and what is given back."""

from __future__ import annotations

import pytest

from server.errors import QueueFull
from server.fairness import FairBudget


def fill(budget: FairBudget, tenant: str) -> int:
    """Take one by one until refused; return what the tenant holds."""
    while budget.has(tenant, 1):
        budget.take(tenant, 1)
    return budget.held(tenant)


def test_a_tenant_alone_gets_half_and_the_next_one_finds_some_free() -> None:
    budget = FairBudget(90, "bytes")
    assert fill(budget, "a") == 45
    assert fill(budget, "b") == 22
    with pytest.raises(QueueFull, match="too many bytes"):
        budget.take("a", 1)


def test_tenants_that_take_in_turn_get_equal_shares() -> None:
    budget = FairBudget(90, "bytes")
    while budget.has("a", 1) and budget.has("b", 1):
        budget.take("a", 1)
        budget.take("b", 1)
    assert budget.held("a") == budget.held("b") == 30


def test_a_refused_amount_is_not_taken_and_a_held_one_comes_back() -> None:
    budget = FairBudget(10, "bytes")
    with pytest.raises(QueueFull), budget.holding("a", 6):
        pass
    with budget.holding("a", 5):
        assert budget.free == 5
    assert (budget.free, budget.held("a")) == (10, 0)


def test_nothing_can_be_taken_whatever_others_hold() -> None:
    budget = FairBudget(256, "bytes")
    budget.take("one", 128)
    budget.take("other", 1)
    budget.take("one", 0)
    with pytest.raises(QueueFull):
        budget.take("one", 1)
