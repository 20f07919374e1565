"""The shared state: what a process that has ended held, and answers that are equal after a way over a link."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Sequence
from typing import Any, cast

import pytest
from msgspec import Raw, msgpack

from server.errors import LinkBroken, QueueFull
from server.metrics.aggregator import Aggregator
from server.metrics.instruments import Snapshot
from server.metrics.metrics import EngineMetrics
from server.protocol.control import RemoteState, StateAnswer, StateCall, perform
from server.protocol.messages import Resident
from server.shared_state import AdapterChange, LoadedAdapter, SharedState
from server.tenants.tenant import TenantLimits

# In an order in which each has an answer to give.
CALLS: list[tuple[str, *tuple[Any, ...]]] = [
    ("admit_requests", "http-1", 1, "acme", 1), ("count_tokens", "acme", 7), ("admit_requests", "http-1", 2, "acme", 9),
    ("admit_upload", "http-1", 3, "acme", 10), ("grow_upload", "http-1", 3, 5), ("usage", "acme"),
    ("release", "http-1", 1), ("usage", "acme"),
    ("change_adapters", AdapterChange("acme", LoadedAdapter("acme", "math", "/math", 1.0))), ("metrics",),
    ("forget_variants", ("acme/math",)),
]  # fmt: skip


class OneSource:
    """A server with the metrics of one process."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics()

    async def collect(self, aggregator: Aggregator) -> None:
        aggregator.received("http-1", self.metrics.snapshot())

    async def residents(self) -> Sequence[Resident]:
        return ()

    async def forget_variants(self, labels: tuple[str, ...]) -> None:
        self.metrics.forget_variants(labels)


def shared_state(source: OneSource | None = None) -> SharedState:
    shared = SharedState(source or OneSource(), lambda tenant: TenantLimits(max_running=8))
    shared.aggregator.started("http-1")
    return shared


def remote_of(shared: SharedState) -> SharedState:
    """Return a shared state as another process has it, whose messages pass through bytes."""
    tasks: set[asyncio.Task[None]] = set()

    async def answer(call: StateCall) -> None:
        sent = msgpack.decode(msgpack.encode(call), type=StateCall)
        answer = await perform(shared, sent)
        remote.take(msgpack.decode(msgpack.encode(answer), type=StateAnswer))

    def send(call: StateCall) -> None:
        task = asyncio.create_task(answer(call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    remote = RemoteState(send)
    return cast(SharedState, remote)


def without_times(answer: Any) -> str:
    """Return an answer as text, without the times at which each state began to count."""
    return re.sub(r"created=[0-9.]+", "", repr(answer))


def test_every_call_does_and_answers_the_same_from_another_process() -> None:
    async def main() -> None:
        source = OneSource()
        own, other = shared_state(source), shared_state(source)
        remote = remote_of(other)
        for method, *arguments in CALLS:
            answers = []
            for state in (own, remote):
                answer = getattr(state, method)(*arguments)
                answers.append(await answer if inspect.isawaitable(answer) else answer)
            assert without_times(answers[0]) == without_times(answers[1]), method
        assert (await remote.stats()).requests == (await own.stats()).requests

    asyncio.run(main())
    inner = {"lost", "stats"}
    methods = {
        name for name, value in vars(SharedState).items() if inspect.isfunction(value) and name[0] != "_"
    }
    assert {method for method, *_ in CALLS} == methods - inner


def test_a_call_that_cannot_be_answered_raises_what_it_raised() -> None:
    async def main() -> None:
        remote = remote_of(shared_state())
        with pytest.raises(QueueFull, match="the upload is not counted any more"):
            await remote.grow_upload("http-1", 99, 5)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("_sources", ()), ("__init__", (1, 2)), ("absent", ()), ("aggregator", ()), ("usage", ()), ("usage", (1,)),
        ("usage", ("acme", "more")), ("release", ("http-1", "x")),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_made_breaks_the_link(method: str, arguments: tuple[Any, ...]) -> None:
    call = StateCall(1, method, Raw(msgpack.encode(arguments)))
    with pytest.raises(LinkBroken, match=method):
        asyncio.run(perform(shared_state(), call))


def test_a_process_that_ends_frees_what_it_held_and_its_totals_stay() -> None:
    def value(snapshot: Snapshot, name: str) -> float:
        (family,) = (family for family in snapshot.families if family.name == name)
        return sum(series.value for series in family.series)

    async def main() -> None:
        source = OneSource()
        shared = shared_state(source)
        source.metrics.generation_tokens_total.inc(5)
        source.metrics.num_requests_running.set(2)
        await shared.admit_requests("http-1", 1, "acme", 3)
        await shared.admit_upload("http-1", 2, "acme", 10)
        before = await shared.metrics()
        shared.lost("http-1")
        usage = await shared.usage("acme")
        assert (usage.num_running, usage.num_uploads, usage.num_requests) == (0, 0, 3)
        after = await shared.metrics()
        assert [value(each, "peraxis_generation_tokens") for each in (before, after)] == [5, 5]
        assert [value(each, "peraxis_num_requests_running") for each in (before, after)] == [2, 0]

    asyncio.run(main())
