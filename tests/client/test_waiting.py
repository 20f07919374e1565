"""How long a command waits for its server, on a clock that only its pauses move."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from client.http import NoAnswer, NoServer, ServerRefused
from client.waiting import ServerWait


def unavailable(retry_after_s: int | None = None) -> ServerRefused:
    return ServerRefused("the base is still loading", 503, "overloaded", retry_after_s)


@dataclass(slots=True)
class Waiter:
    """A wait that always fails in the same way, the pauses it took, the lines it told, and what it notes."""

    wait_s: int | None = None
    now: float = 1000.0
    pauses: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def new(self) -> ServerWait:
        return ServerWait("http://host", self.wait_s, clock=lambda: self.now, tell=self.lines.append)

    def fail(self, wait: ServerWait, error: NoAnswer | ServerRefused) -> None:
        self.pauses.append(wait.next_pause_s(error))
        self.now += self.pauses[-1]

    def fail_to_the_end(self, wait: ServerWait, error: NoAnswer | ServerRefused) -> None:
        with pytest.raises(type(error)) as raised:
            self._fail_often(wait, error)
        assert raised.value is error
        self.notes = getattr(error, "__notes__", [])

    def _fail_often(self, wait: ServerWait, error: NoAnswer | ServerRefused) -> None:
        for _ in range(1000):
            self.fail(wait, error)


def test_a_server_that_answers_503_is_waited_for_two_minutes_with_pauses_that_double() -> None:
    waiter = Waiter()
    waiter.fail_to_the_end(waiter.new(), unavailable())
    assert waiter.pauses == [1, 1, 2, 4, 8, 16, 30, 30, 28]


@pytest.mark.parametrize("asked_s", [0, 1, 5, 50, 120])
def test_the_seconds_that_a_server_asks_for_are_the_least_pause_and_not_the_whole_wait(asked_s: int) -> None:
    waiter = Waiter()
    waiter.fail_to_the_end(waiter.new(), unavailable(asked_s))
    assert min(waiter.pauses) >= asked_s
    assert 120 - asked_s < sum(waiter.pauses) <= 120 or sum(waiter.pauses) == 120


def test_a_server_that_asks_for_more_than_is_left_is_not_waited_for() -> None:
    waiter = Waiter()
    waiter.fail_to_the_end(waiter.new(), unavailable(121))
    assert waiter.pauses == []
    assert waiter.lines == []
    assert waiter.notes == ["gave up after 0 s, when the server asked for 121 s more: `wait_s` waits longer"]


def test_a_wait_is_told_when_it_begins_and_then_only_now_and_then() -> None:
    waiter = Waiter()
    waiter.fail_to_the_end(waiter.new(), unavailable(1))
    assert waiter.lines[0] == "waiting up to 120 s for http://host: the base is still loading"
    assert waiter.lines[1].startswith("waiting up to 104 s for ")
    assert len(waiter.lines) == 5
    assert waiter.notes == ["gave up after 120 s: `wait_s` waits longer"]


def test_a_port_that_has_never_answered_is_not_waited_for() -> None:
    waiter = Waiter()
    with pytest.raises(NoServer, match="no server answers, or `wait_s` if it is starting"):
        waiter.fail(waiter.new(), NoServer("no server answers"))
    assert waiter.lines == []


def test_a_port_that_has_answered_is_waited_for() -> None:
    for error in (None, unavailable()):
        waiter = Waiter()
        wait = waiter.new()
        if error is None:
            wait.answered()
        else:
            waiter.fail(wait, error)
        waiter.fail_to_the_end(wait, NoServer("no server answers"))
        assert sum(waiter.pauses) == 120


def test_with_seconds_to_wait_a_port_need_not_have_answered() -> None:
    waiter = Waiter(wait_s=7)
    waiter.fail_to_the_end(waiter.new(), NoServer("no server answers"))
    assert waiter.pauses == [1, 1, 2, 3]


def test_with_no_seconds_to_wait_the_first_failure_is_the_last() -> None:
    for error in (NoServer("no server answers"), unavailable(0)):
        waiter = Waiter(wait_s=0)
        waiter.fail_to_the_end(waiter.new(), error)
        assert (waiter.pauses, waiter.lines) == ([], [])


def test_a_wait_after_another_has_all_its_time() -> None:
    waiter = Waiter()
    wait = waiter.new()
    waiter.fail_to_the_end(wait, unavailable())
    wait.restart()
    waiter.pauses.clear()
    waiter.fail_to_the_end(wait, NoServer("no server answers"))
    assert sum(waiter.pauses) == 120


@pytest.mark.parametrize(
    "error",
    [NoAnswer("broke off"), ServerRefused("limited", 429, "rate_limited", 1), ServerRefused("x", 500)],
)
def test_another_failure_is_not_waited_for(error: NoAnswer | ServerRefused) -> None:
    waiter = Waiter()
    waiter.fail_to_the_end(waiter.new(), error)
    assert waiter.pauses == []
