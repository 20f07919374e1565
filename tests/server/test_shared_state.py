"""The shared state: what a process that has ended held, and answers that are equal after a way over a link."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from server.metrics.aggregator import Aggregator
from server.metrics.instruments import Snapshot
from server.metrics.metrics import EngineMetrics
from server.protocol.messages import Resident
from server.shared_state import (
    AdapterChange,
    AdmitRequests,
    AdmitUpload,
    AnyCall,
    ChangeAdapters,
    CountTokens,
    GetMetrics,
    GetStats,
    GetUsage,
    GrowUpload,
    LoadedAdapter,
    Release,
    SharedState,
    VariantsDeleted,
    answer_type,
)
from server.tenants.tenant import TenantLimits

# In an order in which each has an answer to give.
CALLS: list[AnyCall] = [
    AdmitRequests(1, "acme"), CountTokens("acme", 7), AdmitRequests(2, "acme", 9), AdmitUpload(3, "acme", 10),
    GrowUpload(3, 5), GetUsage("acme"), Release(1),
    ChangeAdapters(AdapterChange("acme", LoadedAdapter("acme", "math", "/math", 1.0))), GetMetrics(), GetStats(),
    VariantsDeleted(("acme/math",)),
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


def test_every_call_and_its_answer_are_equal_after_a_way_over_a_link() -> None:
    async def main() -> None:
        shared = shared_state()
        for call in CALLS:
            sent: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=AnyCall)
            assert sent == call
            answer = await shared.answer("http-1", sent)
            raw = msgspec.msgpack.encode(answer)
            assert msgspec.msgpack.decode(raw, type=answer_type(type(call))) == answer

    asyncio.run(main())
    assert {type(call) for call in CALLS} == set(get_args(AnyCall))


def test_a_process_that_ends_frees_what_it_held_and_its_totals_stay() -> None:
    def value(snapshot: Snapshot, name: str) -> float:
        (family,) = (family for family in snapshot.families if family.name == name)
        return sum(series.value for series in family.series)

    async def main() -> None:
        source = OneSource()
        shared = shared_state(source)
        source.metrics.generation_tokens_total.inc(5)
        source.metrics.num_requests_running.set(2)
        for call in (AdmitRequests(1, "acme", 3), AdmitUpload(2, "acme", 10)):
            await shared.answer("http-1", call)
        before = await shared.answer("http-1", GetMetrics())
        shared.lost("http-1")
        usage = await shared.answer("http-2", GetUsage("acme"))
        assert (usage.num_running, usage.num_uploads, usage.num_requests) == (0, 0, 3)
        after = await shared.answer("http-2", GetMetrics())
        assert [value(each, "peraxis_generation_tokens") for each in (before, after)] == [5, 5]
        assert [value(each, "peraxis_num_requests_running") for each in (before, after)] == [2, 0]

    asyncio.run(main())
