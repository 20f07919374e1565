"""Which grammars of which tenants are refused, and for how long."""

from __future__ import annotations

import pytest

from server.errors import InvalidRequest
from server.grammar.grammar import matching_schema
from server.grammar.lanes import MAX_GRAMMARS, REMEMBERED_S, Rule, Standing
from server.grammar.matching import Vocabulary
from server.workers.pool import MAX_PAUSE_S

VOCABULARY = Vocabulary("base", 300, (257,))


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def standing(clock: Clock) -> Standing:
    return Standing(clock)


def rule(name: str, tenant: str = "hostile") -> Rule:
    return Rule(tenant, VOCABULARY, matching_schema({"const": name}))


def refusal(standing: Standing, of: Rule) -> str | None:
    """Return the reason for which a grammar is refused; None if it is not."""
    try:
        standing.check(of)
    except InvalidRequest as error:
        return f"{error.param}: {error}"
    return None


def test_a_grammar_that_failed_is_refused_with_the_same_reason_and_others_are_not(standing: Standing) -> None:
    standing.failed(rule("slow"), "too complex: simplify it", has_killed=False)
    # Another of its sequences still ran.
    standing.worked(rule("slow"))
    assert refusal(standing, rule("slow")) == "response_format: too complex: simplify it"
    assert refusal(standing, rule("other")) is None


def test_a_tenant_s_failure_says_nothing_about_the_same_grammar_of_another(standing: Standing) -> None:
    standing.failed(rule("any"), "killed", has_killed=True)
    assert refusal(standing, rule("any", "honest")) is None


def test_a_failure_is_forgotten_after_a_while_and_when_there_are_many(
    standing: Standing, clock: Clock
) -> None:
    standing.failed(rule("slow"), "too complex", has_killed=False)
    clock.now_s += REMEMBERED_S
    assert refusal(standing, rule("slow")) is None
    standing.failed(rule("slow"), "too complex", has_killed=False)
    for number in range(MAX_GRAMMARS):
        standing.worked(rule(str(number)))
    assert refusal(standing, rule("slow")) is None


def test_a_tenant_s_many_grammars_make_no_other_s_new_again(standing: Standing) -> None:
    standing.worked(rule("good", "honest"))
    for number in range(MAX_GRAMMARS):
        standing.worked(rule(str(number)))
    assert standing.has_worked(rule("good", "honest"))
    assert not standing.has_worked(rule("0"))


def test_a_pause_after_a_kill_doubles_and_spares_grammars_that_have_worked(
    standing: Standing, clock: Clock
) -> None:
    standing.worked(rule("good"))
    pauses = []
    for number in range(8):
        standing.failed(rule(f"bad {number}"), "killed", has_killed=True)
        began = clock.now_s
        while (refused := refusal(standing, rule("new"))) is not None:
            assert "try again in" in refused
            assert refusal(standing, rule("good")) is None
            clock.now_s += 0.5
        pauses.append(clock.now_s - began)
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE_S, MAX_PAUSE_S]


def test_a_tenant_without_failures_for_a_while_begins_with_a_short_pause_again(
    standing: Standing, clock: Clock
) -> None:
    for number in range(5):
        standing.failed(rule(str(number)), "killed", has_killed=True)
    clock.now_s += 2 * MAX_PAUSE_S
    standing.failed(rule("last"), "killed", has_killed=True)
    clock.now_s += 1.0
    assert refusal(standing, rule("new")) is None
