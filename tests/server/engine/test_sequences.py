"""The `n` sequences of a request: their tokens, and how they share the rows of the batch with others."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from server.engine.model_runner import Batch
from server.protocol.messages import DoneEvent, FinishEvent, TokenEvent
from tests.helpers.tiny_models import make_pair
from tests.server.helpers.served import (
    Answer,
    Mode,
    Served,
    on_forward,
    serving,
)
from tests.vllm.helpers.environment import SIZES

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair("llama", tmp_path_factory.mktemp("models"), 3, changes=(), **SIZES).base


@pytest.fixture
def served(base: Path, tmp_path: Path, mode: Mode) -> Iterator[Served]:
    with serving(base, tmp_path / "registry", mode, max_num_seqs=3, max_queue=4) as running:
        yield running


def test_sequences_of_one_request_follow_their_own_seeds(served: Served) -> None:
    both = served.ask(None, PROMPT, temperature=1.0, seed=4, n=2, max_new_tokens=6)
    second = served.ask(None, PROMPT, temperature=1.0, seed=5, max_new_tokens=6)
    sequences = [
        [e.token_id for e in both.events if isinstance(e, TokenEvent) and e.index == i] for i in (0, 1)
    ]
    assert len(sequences[0]) == len(sequences[1]) == 6
    assert sequences[1] == second.token_ids


def tokens_by_sequence(answer: Answer, n: int) -> list[list[int]]:
    return [
        [event.token_id for event in answer.events if isinstance(event, TokenEvent) and event.index == index]
        for index in range(n)
    ]


def test_more_sequences_than_rows_answer_as_each_does_alone_and_others_run_between_them(
    served: Served,
) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 6, "stop_token_ids": frozenset[int]()}
    alone = [served.ask(None, PROMPT, seed=4 + index, **sampling).token_ids for index in range(20)]
    many = served.start(None, PROMPT, seed=4, n=20, **sampling)
    other = served.ask(None, PROMPT, seed=5, **sampling)
    assert other.token_ids == alone[1]
    answer = many.answer()
    assert tokens_by_sequence(answer, 20) == alone
    ends = [event.index for event in answer.events if isinstance(event, FinishEvent)]
    assert sorted(ends) == list(range(20))
    assert isinstance(answer.end, DoneEvent)


def test_sequences_that_wait_for_a_row_can_be_stopped_and_the_next_ones_run(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps, stopped = itertools.count(1), threading.Event()

    def waits(batch: Batch, forward: Callable[[], Tensor]) -> Tensor:
        if next(num_steps) == 2:
            assert stopped.wait(60)
        return forward()

    on_forward(monkeypatch, waits)
    pending = served.start(None, PROMPT, n=8, max_new_tokens=10, stop_token_ids=frozenset())
    first = pending.events.get(timeout=240)
    # Three run in the second step, the fourth waits, and the last has not been made.
    for index in (3, 7):
        served.engine.stop_sequence(pending.request.id, index)
    served.engine.run(stopped.set)
    answer = Answer([first, *pending.answer().events])
    lengths = [len(tokens) for tokens in tokens_by_sequence(answer, 8)]
    assert lengths == [10, 10, 10, 0, 10, 10, 10, 0]
    reasons = {event.index: event.reason for event in answer.events if isinstance(event, FinishEvent)}
    assert [reasons[index] for index in range(8)] == [
        "stop" if index in (3, 7) else "length" for index in range(8)
    ]
    assert isinstance(answer.end, DoneEvent)
