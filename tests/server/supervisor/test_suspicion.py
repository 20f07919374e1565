"""The requests at which engines die are found, and no other request fails with them. No process runs here."""

from __future__ import annotations

import random

import pytest

from server.engine.request_state import ARRIVAL_S, MAX_TOGETHER, RequestState, Trial
from server.protocol.request import Request, SamplingParams, token_ids_of
from server.protocol.step_page import Record, Step, StepRequest, Suspect
from server.supervisor.supervisor import MAX_ENDED_BY_VERSION, MAX_UNEXPLAINED, TENANT_WINDOW_S, Suspicion

NUM_ROWS = 16
NONE = (frozenset[str](), frozenset[str]())


def request_of(id_: str) -> Request:
    return Request(id_, id_.partition("-")[0], None, None, token_ids_of([1]), 300, SamplingParams())


def entry(id_: str, num_computed: int = 1, version: str | None = None) -> StepRequest:
    return StepRequest(id_, id_.partition("-")[0], version, {0: num_computed})


class Life:
    """One engine after the other, whose steps add a token to each of their requests.

    Args:
        num_tokens: that each request is to have, by its id.
        poison: the number of tokens that a request does not come to, because its engine dies.
    """

    def __init__(self, num_tokens: dict[str, int], poison: dict[str, int]) -> None:
        self.suspicion = Suspicion()
        self.culprits: list[str] = []
        self.deaths: list[Step] = []
        self._left, self._poison = num_tokens, poison
        self._done = dict.fromkeys(num_tokens, 0)

    def run(self) -> None:
        """Run engines until every request has ended."""
        while (step := self._run_engine()) is not None:
            self.deaths.append(step)
            culprits, given_up = self.suspicion.engine_died(Record(step), float(len(self.deaths)))
            assert not given_up
            self.culprits += culprits
            self._left = {id_: number for id_, number in self._left.items() if id_ not in culprits}

    def _run_engine(self) -> Step | None:
        """Run an engine until it dies, and return its last step; None if all requests have ended."""
        trial = Trial(self.suspicion.suspects.values(), 0.0)
        states = [RequestState(request_of(id_), lambda event: None, "device", 0.0) for id_ in self._left]
        started = [state for state in states if not trial.hold(state)]
        for state in started:
            state.start_sequence()
        while self._left:
            pausing, starting = trial.turn(0.0, self._left)
            started = [state for state in started if state not in pausing] + starting
            for state in starting:
                if not state.outputs:
                    state.start_sequence()
            batch = [state for state in started if state.request.id in self._left][:NUM_ROWS]
            assert batch
            step = Step(
                tuple(entry(s.request.id, self._done[s.request.id] + 1) for s in batch), trial.suspects
            )
            if any(each.num_computed[0] == self._poison.get(each.request_id) for each in step.requests):
                return step
            for state in batch:
                self._advance(state)
        return None

    def _advance(self, state: RequestState) -> None:
        id_ = state.request.id
        self._done[id_] += 1
        state.outputs[0].sequence.num_computed_tokens = self._done[id_]
        if self._done[id_] == self._left[id_]:
            del self._left[id_]


@pytest.mark.parametrize("seed", range(200))
def test_of_many_requests_those_at_fault_fail_and_no_other(seed: int) -> None:
    draw = random.Random(seed)
    ids = [f"tenant{number % 5}-{number}" for number in range(draw.randrange(1, 60))]
    poison = {id_: draw.randrange(1, 6) for id_ in draw.sample(ids, min(len(ids), draw.randrange(4)))}
    life = Life({id_: draw.randrange(6, 12) for id_ in ids}, poison)
    life.run()
    assert sorted(life.culprits) == sorted(poison)
    # With the others, in a group, and alone; a group with one at fault need not be the last one that it is in.
    assert len(life.deaths) <= 3 * len(poison)


def test_a_request_that_is_alone_by_chance_is_not_at_fault() -> None:
    suspicion = Suspicion()
    assert suspicion.engine_died(Record(Step((entry("a-1"),))), 0.0) == NONE
    assert suspicion.engine_died(Record(Step((entry("a-1"),), ("a-1",))), 1.0) == (
        frozenset({"a-1"}),
        frozenset(),
    )


def test_a_death_between_two_steps_leaves_the_suspects_as_they_are() -> None:
    suspicion = Suspicion()
    suspicion.engine_died(Record(Step((entry("a-1"), entry("b-1")))), 0.0)
    assert suspicion.engine_died(Record(), 1.0) == NONE
    assert list(suspicion.suspects) == ["a-1", "b-1"]


def test_a_version_whose_requests_end_engines_is_quarantined() -> None:
    suspicion = Suspicion()
    for number in range(MAX_ENDED_BY_VERSION):
        assert not suspicion.quarantined
        id_ = f"a-{number}"
        suspicion.engine_died(Record(Step((entry(id_, version="a/x@1"),), (id_,))), 0.0)
    assert suspicion.quarantined == {"a/x@1"}


def test_suspects_of_a_tenant_that_has_ended_engines_lately_are_tried_alone() -> None:
    suspicion = Suspicion()
    for number in range(2):
        suspicion.engine_died(Record(Step((entry(f"a-{number}"),), (f"a-{number}",))), 0.0)
    crowd = Record(Step((entry("a-8"), entry("b-8"))))
    suspicion.engine_died(crowd, TENANT_WINDOW_S)
    assert {id_: suspect.alone for id_, suspect in suspicion.suspects.items()} == {"a-8": True, "b-8": False}
    suspicion.engine_died(crowd, TENANT_WINDOW_S + 1)
    assert not any(suspect.alone for suspect in suspicion.suspects.values())


def test_suspects_are_tried_in_groups_and_others_wait() -> None:
    suspects = [Suspect(entry(f"a-{number}")) for number in range(MAX_TOGETHER + 1)]
    trial = Trial(suspects, 0.0)
    states = {
        id_: RequestState(request_of(id_), lambda event: None, "device", 0.0)
        for id_ in ("b-1", *(suspect.request.request_id for suspect in suspects))
    }
    assert all(map(trial.hold, states.values()))
    pausing, first = trial.turn(0.0, states)
    assert not pausing
    assert [state.request.id for state in first] == [f"a-{number}" for number in range(MAX_TOGETHER)]
    for state in first:
        state.start_sequence()
        assert trial.turn(0.0, states) == ([], [])
        state.outputs[0].sequence.num_computed_tokens = 1
    assert trial.turn(0.0, states) == (first, [states[f"a-{MAX_TOGETHER}"]])
    # Its client leaves.
    del states[f"a-{MAX_TOGETHER}"]
    assert trial.turn(0.0, states) == ([], [states["b-1"], *first])
    assert not trial.hold(states["b-1"])


def test_a_trial_is_not_held_up_by_requests_that_are_not_read() -> None:
    trial = Trial([Suspect(entry("a-1"))], 0.0)
    ids = ("a-1", "b-1", "b-2")
    states = {id_: RequestState(request_of(id_), lambda event: None, "device", 0.0) for id_ in ids}
    assert all(map(trial.hold, states.values()))
    tried, paused, other = states.values()
    tried.is_paused = paused.is_paused = True
    assert trial.turn(0.0, states) == ([], [tried])
    tried.start_sequence()
    tried.outputs[0].sequence.num_computed_tokens = 1
    assert trial.turn(0.0, states) == ([tried], [other])


def test_suspects_that_do_not_come_again_hold_nothing_for_long() -> None:
    trial = Trial([Suspect(entry("a-1"))], 0.0)
    state = RequestState(request_of("b-1"), lambda event: None, "device", 0.0)
    assert trial.hold(state)
    assert trial.turn(ARRIVAL_S / 2, {"b-1"}) == ([], [])
    assert trial.turn(ARRIVAL_S, {"b-1"}) == ([], [state])


def test_requests_with_which_engines_die_for_no_reason_that_is_found_are_given_up() -> None:
    suspicion, crowd = Suspicion(), Record(Step((entry("a-1"), entry("b-1"))))
    for _ in range(MAX_UNEXPLAINED):
        assert suspicion.engine_died(crowd, 0.0) == NONE
    suspicion.engine_died(Record(num_finished=1), 0.0)
    for _ in range(MAX_UNEXPLAINED):
        assert suspicion.engine_died(crowd, 0.0) == NONE
    assert suspicion.engine_died(crowd, 0.0) == (frozenset(), frozenset({"a-1", "b-1"}))
    assert not suspicion.suspects
