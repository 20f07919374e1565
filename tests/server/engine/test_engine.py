"""The engine with tiny models: slots, loads, failures and cancellation; one request never disturbs another."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deltastore.errors import VariantNotFound, VariantQuarantined
from deltastore.registry.records import VersionRecord
from server.deltas.residency import Residency
from server.engine.model_runner import Batch
from server.engine.request_state import RequestState, WaitingRequests
from server.engine.sequence import Sequence
from server.errors import Draining, EngineFailed, InvalidRequest, LoadTimeout, QueueFull
from server.protocol.messages import DoneEvent, ErrorEvent, Event, FinishEvent, TokenEvent
from tests.server.helpers.live_server import eventually
from tests.server.helpers.served import (
    WAIT_S,
    Answer,
    Family,
    Mode,
    Pending,
    Served,
    make_family,
    on_forward,
    serving,
    slow_down,
)

PROMPT = [5, 6, 7, 8]
# Runs until it is cancelled, in steps that `slow_down` makes slow.
ENDLESS: dict[str, Any] = {"max_new_tokens": 200, "stop_token_ids": frozenset()}


@pytest.fixture(scope="module")
def deltas(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("models"), seed=3, num_variants=4)


@pytest.fixture
def served(deltas: Family, tmp_path: Path, mode: Mode) -> Iterator[Served]:
    with serving(
        deltas.base, tmp_path / "registry", mode, max_num_seqs=3, max_queue=4, load_timeout=WAIT_S
    ) as running:
        yield running


def error_of(answer: Answer) -> Exception:
    assert isinstance(answer.end, ErrorEvent)
    return answer.end.error


def test_more_active_variants_than_slots_all_answer_as_they_do_alone(served: Served, deltas: Family) -> None:
    records = [served.publish(file, f"v{number}") for number, file in enumerate(deltas.artifacts)]
    alone = [served.ask(record, PROMPT, max_new_tokens=8).token_ids for record in records]
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    together = [served.start(record, PROMPT, max_new_tokens=8) for record in records]
    assert [pending.answer().token_ids for pending in together] == alone


def test_the_first_request_is_cold_and_the_second_is_not(served: Served, deltas: Family) -> None:
    record = served.publish(deltas.artifacts[0], "v")
    first, second = served.ask(record, PROMPT).end, served.ask(record, PROMPT).end
    assert isinstance(first, DoneEvent)
    assert isinstance(second, DoneEvent)
    assert first.timings.cold
    assert first.timings.load_s > 0
    assert not second.timings.cold
    assert second.timings.load_s == 0


def test_the_least_recently_used_delta_gives_up_its_slot(served: Served, deltas: Family) -> None:
    records = [served.publish(file, f"v{number}") for number, file in enumerate(deltas.artifacts[:3])]
    for record in (records[0], records[1], records[0], records[2]):
        served.ask(record, PROMPT, max_new_tokens=1)
    assert [served.level(record) for record in records] == ["device", "host", "device"]
    assert served.metric("variant_evictions_total", level="device", reason="capacity") == 1


def test_a_pinned_delta_stays_and_one_slot_is_left_to_others(served: Served, deltas: Family) -> None:
    records = [served.publish(file, f"v{number}") for number, file in enumerate(deltas.artifacts[:3])]
    served.engine.load(records[0], "pin").result(WAIT_S)
    for record in records[1:]:
        served.ask(record, PROMPT, max_new_tokens=1)
    assert served.level(records[0]) == "device"
    with pytest.raises(InvalidRequest, match="unpin another"):
        served.engine.load(records[1], "pin").result(WAIT_S)
    served.engine.load(records[0], "unpin").result(WAIT_S)
    assert not served.engine.state_of(records[0]).is_pinned


@pytest.mark.parametrize("action", ["load", "request"])
def test_versions_of_the_same_bytes_have_slots_and_pins_of_their_own(
    served: Served, deltas: Family, action: str
) -> None:
    first, second = (served.publish(deltas.artifacts[0], name) for name in ("first", "second"))
    served.engine.load(first, "pin").result(WAIT_S)
    assert (served.level(first), served.level(second)) == ("device", "disk")
    if action == "load":
        served.engine.load(second).result(WAIT_S)
    else:
        served.ask(second, PROMPT)
    assert [served.engine.state_of(record).is_pinned for record in (first, second)] == [True, False]
    assert served.metric("slots_in_use") == 2
    served.engine.load(second, "unload").result(WAIT_S)
    assert (served.level(first), served.level(second)) == ("device", "disk")
    assert served.metric("variant_evictions_total", level="device", reason="unload") == 1


def test_requests_count_for_their_own_version_alone(served: Served, deltas: Family) -> None:
    first, second = (served.publish(deltas.artifacts[0], name) for name in ("first", "second"))
    running = served.start(first, PROMPT, n=128, max_new_tokens=150, stop_token_ids=frozenset())
    assert [served.engine.state_of(record).num_requests for record in (first, second)] == [1, 0]
    served.engine.cancel(running.request.id)


def test_unload_frees_the_slot(served: Served, deltas: Family) -> None:
    record = served.publish(deltas.artifacts[0], "v")
    served.engine.load(record).result(WAIT_S)
    assert served.level(record) == "device"
    served.engine.load(record, "unload").result(WAIT_S)
    assert served.level(record) == "disk"


def test_unload_waits_for_the_requests_that_run_on_it(served: Served, deltas: Family) -> None:
    record = served.publish(deltas.artifacts[0], "v")
    want = served.ask(record, PROMPT, max_new_tokens=60).token_ids
    running = served.start(record, PROMPT, max_new_tokens=60)
    unloaded = served.engine.load(record, "unload")
    assert running.answer().token_ids == want
    unloaded.result(WAIT_S)


def test_a_corrupt_object_fails_its_own_requests_and_is_quarantined(served: Served, deltas: Family) -> None:
    good, bad = served.publish(deltas.artifacts[0], "good"), served.publish(deltas.artifacts[1], "bad")
    want = served.ask(good, PROMPT).token_ids
    path = served.registry.object_path(bad)
    path.chmod(0o644)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    waiting = [served.start(bad, PROMPT), served.start(good, PROMPT), served.start(bad, PROMPT)]
    answers = [pending.answer() for pending in waiting]
    assert answers[1].token_ids == want
    assert isinstance(error_of(answers[0]), VariantQuarantined)
    assert isinstance(error_of(answers[2]), VariantQuarantined)
    with pytest.raises(VariantQuarantined):
        served.registry.resolve("default", bad.name)


def test_requests_and_calls_for_the_same_bytes_are_told_of_their_own_version_alone(
    served: Served, deltas: Family
) -> None:
    first, second = (served.publish(deltas.artifacts[0], name) for name in ("first", "second"))
    served.registry.object_path(first).unlink()
    waiting = [served.start(record, PROMPT) for record in (first, second)]
    calls = [served.engine.load(record) for record in (first, second)]
    errors = [error_of(pending.answer()) for pending in waiting] + [call.exception(20) for call in calls]
    assert all(isinstance(error, VariantNotFound) for error in errors)
    names = [first.label, second.label] * 2
    reason = "its object is no longer in the registry: upload it again"
    assert [str(error) for error in errors] == [f"{name}: {reason}" for name in names]


def test_an_object_that_is_gone_is_no_corruption(served: Served, deltas: Family) -> None:
    record = served.publish(deltas.artifacts[0], "v")
    served.ask(record, PROMPT)
    served.engine.load(record, "unload").result(WAIT_S)
    served.registry.object_path(record).unlink()
    assert isinstance(error_of(served.ask(record, PROMPT)), VariantNotFound)


def test_a_step_that_fails_fails_its_request_alone(
    served: Served, deltas: Family, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = served.publish(deltas.artifacts[0], "v")
    want = served.ask(record, PROMPT).token_ids

    def fails_for_the_base(batch: Batch, forward: Callable[[], Tensor]) -> Tensor:
        if any(item.delta is None for item in batch):
            raise RuntimeError("as if a kernel had failed")
        return forward()

    on_forward(monkeypatch, fails_for_the_base)
    broken, fine = served.start(None, PROMPT), served.start(record, PROMPT)
    assert "as if a kernel had failed" in str(error_of(broken.answer()))
    assert fine.answer().token_ids == want
    assert "step failed" in caplog.text


def test_a_request_that_cannot_even_begin_fails_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want = served.ask(None, PROMPT).token_ids
    start = RequestState.start_sequence
    failures = iter([True])

    def fails_once(state: RequestState) -> Sequence:
        if next(failures, False):
            raise ValueError("as if transformers refused")
        return start(state)

    monkeypatch.setattr(RequestState, "start_sequence", fails_once)
    broken, fine = served.start(None, PROMPT), served.start(None, PROMPT)
    assert "as if transformers refused" in str(error_of(broken.answer()))
    assert fine.answer().token_ids == want
    (line,) = [record for record in caplog.records if record.getMessage().endswith("failed")]
    assert line.__dict__["request_id"] == broken.request.id.rpartition("-")[0]


def test_an_engine_that_fails_answers_every_request_and_ends(
    deltas: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(residency: Residency) -> object:
        raise RuntimeError("as if the engine had a bug")

    def ask_a_breaking_engine() -> None:
        with serving(deltas.base, tmp_path / "registry") as served:
            slow_down(monkeypatch)
            pending = [served.start(None, PROMPT, **ENDLESS) for _ in range(2)]
            monkeypatch.setattr(Residency, "poll_loads", breaks)
            answers.extend(waiting.answer() for waiting in pending)

    answers: list[Answer] = []
    with pytest.raises(RuntimeError, match="as if the engine had a bug"):
        ask_a_breaking_engine()
    assert [type(error_of(answer)) for answer in answers] == [EngineFailed] * 2


def test_a_variant_that_finds_no_slot_in_time_is_told_so(
    deltas: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = WaitingRequests.late
    with serving(deltas.base, tmp_path / "registry") as served:
        slow_down(monkeypatch)
        records = [served.publish(file, f"v{number}") for number, file in enumerate(deltas.artifacts[:3])]
        for record in records[:2]:
            served.engine.load(record).result(WAIT_S)
        long = [served.start(record, PROMPT, **ENDLESS) for record in records[:2]]
        # From here on; the loads above take as long as they do.
        monkeypatch.setattr(WaitingRequests, "late", lambda waiting, now: late(waiting, now + 60))
        assert isinstance(error_of(served.ask(records[2], PROMPT)), LoadTimeout)
        for pending in long:
            served.engine.cancel(pending.request.id)
        assert eventually(lambda: served.num_cancelled() == 2)


def paused(served: Served, **sampling: Any) -> tuple[Pending, list[Event]]:
    """Start a request, pause it behind its first token and return it with its events, again where one of it ended."""
    while True:
        pending = served.start(None, PROMPT, **sampling)
        found = [pending.events.get(timeout=WAIT_S)]
        served.engine.set_paused(pending.request.id, True)
        # Answered behind the pause, so that what comes later shows whether there is one.
        served.ask(None, [9, 8], max_new_tokens=1)
        found += [pending.events.get() for _ in range(pending.events.qsize())]
        if not any(isinstance(event, FinishEvent | DoneEvent) for event in found):
            return pending, found


def test_a_request_that_is_not_read_leaves_its_rows_and_goes_on_with_the_same_tokens(served: Served) -> None:
    long = {"max_new_tokens": 150, "n": 2, "stop_token_ids": frozenset()}
    want = sorted_tokens(served.ask(None, PROMPT, **long).events)
    pending, found = paused(served, **long)
    for _ in range(3):
        served.ask(None, [9, 8], max_new_tokens=30, stop_token_ids=frozenset())
    assert pending.events.empty()
    served.engine.set_paused(pending.request.id, False)
    assert sorted_tokens([*found, *pending.answer().events]) == want


def sorted_tokens(events: list[Event]) -> list[list[int]]:
    """Return the tokens of each of two sequences."""
    tokens: list[list[int]] = [[], []]
    for event in events:
        if isinstance(event, TokenEvent):
            tokens[event.index].append(event.token_id)
    return tokens


def test_a_sequence_that_is_ended_while_its_request_pauses_starts_no_other(served: Served) -> None:
    pending, found = paused(served, max_new_tokens=150, n=3, stop_token_ids=frozenset())
    for index in range(2):
        served.engine.stop_sequence(pending.request.id, index)
    served.ask(None, [9, 8], max_new_tokens=1)
    found += [pending.events.get() for _ in range(pending.events.qsize())]
    served.ask(None, [9, 8], max_new_tokens=30, stop_token_ids=frozenset())
    assert pending.events.empty()
    served.engine.set_paused(pending.request.id, False)
    found += pending.answer().events
    ends = [event for event in found if isinstance(event, FinishEvent)]
    assert ends == [FinishEvent(0, "stop"), FinishEvent(1, "stop"), FinishEvent(2, "length")]


def test_a_full_queue_refuses_and_the_admitted_ones_are_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = slow_down(monkeypatch)
    long = {"max_new_tokens": 240, "stop_token_ids": frozenset()}
    admitted = [served.start(None, PROMPT, **long) for _ in range(7)]
    refusal = error_of(served.ask(None, PROMPT))
    is_over.set()
    assert isinstance(refusal, QueueFull)
    assert "try again" in str(refusal)
    assert all(isinstance(pending.answer().end, DoneEvent) for pending in admitted)


def test_a_tenant_whose_requests_have_all_begun_leaves_as_many_places_to_others(
    deltas: Family, tmp_path: Path
) -> None:
    """With a version for each request, each has a queue of its own in the scheduler, and all of them begin."""
    registry = tmp_path / "registry"
    with serving(deltas.base, registry, auth="keys", max_num_seqs=4, max_queue=12) as served:
        records = [served.publish(deltas.artifacts[0], f"v{number}") for number in range(16)]
        ended: list[str] = []

        def start(tenant: str, record: VersionRecord | None, **sampling: Any) -> Pending:
            endless = {"max_new_tokens": 240, "stop_token_ids": frozenset(), **sampling}
            request = replace(served.request(record, PROMPT, **endless), tenant=tenant)
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()

            def note(event: Event) -> None:
                if isinstance(event, DoneEvent | ErrorEvent):
                    ended.append(request.id)
                events.put(event)

            served.engine.submit(request, note)
            return Pending(request, events)

        begun, refused = [], []
        for record in records:
            pending = start("large", record, n=128)
            event = pending.events.get(timeout=240)
            if isinstance(event, ErrorEvent):
                refused.append(event.error)
            else:
                begun.append(pending)
        assert [type(error) for error in refused] == [QueueFull] * 8
        assert "leaves free to others" in str(refused[0])
        # Half of what is left: four that begin, and each is answered to its end.
        small = [start("small", None, max_new_tokens=4) for _ in range(4)]
        assert all(isinstance(pending.answer().end, DoneEvent) for pending in small)
        assert not {pending.request.id for pending in begun} & set(ended)
        for pending in begun:
            served.engine.cancel(pending.request.id)
        assert eventually(lambda: not served.metric("num_requests_running"))
        # Places that were given back are free.
        assert isinstance(start("large", records[0], max_new_tokens=4).answer().end, DoneEvent)


def test_as_many_tenants_as_there_are_places_have_a_request_each(
    deltas: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(deltas.base, tmp_path / "registry", auth="keys", max_num_seqs=1, max_queue=4) as served:
        is_over = slow_down(monkeypatch)
        long = served.request(None, PROMPT, max_new_tokens=100, stop_token_ids=frozenset())
        asked = [replace(long, id=f"{long.id}-{number}", tenant=f"tenant-{number}") for number in range(20)]
        pending = [Pending(request, queue.SimpleQueue()) for request in asked]
        for one in pending:
            served.engine.submit(one.request, one.events.put)
        refused = [one.answer().end for one in pending[5:]]
        is_over.set()
        ends = [*(one.answer().end for one in pending[:5]), *refused]
        assert [isinstance(end, DoneEvent) for end in ends] == [True] * 5 + [False] * 15


def test_all_sequences_of_a_request_go_before_those_of_later_requests(
    deltas: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(deltas.base, tmp_path / "registry", max_num_seqs=1, max_queue=8) as served:
        slow_down(monkeypatch)
        events: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def start() -> str:
            request = served.request(None, PROMPT, n=3, max_new_tokens=2, stop_token_ids=frozenset())

            def note(event: object) -> None:
                events.put(request.id if isinstance(event, TokenEvent) else None)

            served.engine.submit(request, note)
            return request.id

        asked = [start() for _ in range(3)]
        tokens: list[str] = []
        while len(tokens) < 3 * 3 * 2:
            if (request_id := events.get(timeout=240)) is not None:
                tokens.append(request_id)
        assert tokens == sorted(tokens, key=asked.index)


def test_a_cancelled_request_ends_and_the_next_one_runs(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = served.ask(None, PROMPT).token_ids
    slow_down(monkeypatch)
    ended = [served.start(None, PROMPT, **ENDLESS) for _ in range(2)]
    last = served.start(None, PROMPT, max_new_tokens=16)
    for pending in ended:
        served.engine.cancel(pending.request.id)
    assert eventually(lambda: served.num_cancelled() == 2)
    assert last.answer().token_ids == want


def test_a_closed_engine_tells_those_it_could_not_answer(
    deltas: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(deltas.base, tmp_path / "registry") as served:
        slow_down(monkeypatch)
        pending = [served.start(None, PROMPT, **ENDLESS) for _ in range(3)]
        served.engine.stop()
        assert all(isinstance(error_of(waiting.answer()), Draining) for waiting in pending)


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "param"),
    [
        ([], 4, "prompt"),
        ([99999], 4, "prompt"),
        ([-1], 4, "prompt"),
        ([1] * 255, 4, "max_new_tokens"),
        ([1] * 300, 4, "prompt"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    served: Served, prompt: list[int], max_new_tokens: int, param: str
) -> None:
    refusal = error_of(served.ask(None, prompt, max_new_tokens=max_new_tokens))
    assert isinstance(refusal, InvalidRequest)
    assert refusal.param == param


def test_a_request_beyond_its_tenant_s_unread_bytes_is_refused_unread_and_counted(
    deltas: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.engine.clients.MAX_UNREAD_BYTES", 4096)
    with serving(deltas.base, tmp_path / "registry") as served:
        end = served.ask(None, [5] * 600).end
        assert isinstance(end, ErrorEvent)
        assert isinstance(end.error, QueueFull)
        assert served.metric("admission_rejections_total", reason="queue_full") == 1
        assert isinstance(served.ask(None, PROMPT).end, DoneEvent)


def test_an_id_in_use_is_refused_and_its_owner_is_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch)
    first = served.start(None, PROMPT, max_new_tokens=240, stop_token_ids=frozenset())
    second = Pending(first.request, queue.SimpleQueue())
    served.engine.submit(second.request, second.events.put)
    assert "in use" in str(error_of(second.answer()))


def test_metrics_count_what_happened(served: Served, deltas: Family) -> None:
    record = served.publish(deltas.artifacts[0], "v")
    for _ in range(2):
        served.ask(record, PROMPT, max_new_tokens=3)
    assert served.metric("variant_lookups_total", result="disk") == 1
    assert served.metric("variant_lookups_total", result="device") == 1
    variant = f"default/{record.name}"
    assert served.metric("variant_tokens_total", variant=variant, kind="prompt") == 2 * len(PROMPT)
    assert served.metric("variant_tokens_total", variant=variant, kind="generation") == 6
    assert served.metric("variant_requests_total", variant=variant, finish_reason="length") == 2
    assert served.metric("variant_load_bytes_total", source="disk") == record.device_bytes
    assert served.metric("cold_start_seconds_count", source="disk") == 1
    assert served.metric("time_to_first_token_seconds_count") == 2
    assert served.metric("step_seconds_count") == 6
    assert served.metric("slots_in_use") == 1
    assert served.metric("variant_resident", variant=variant, level="device") == 1
