"""A replica of the engine deployment: one engine on a thread, behind the messages that it has in every server.

Passes messages as bytes between Ray Serve's calls and the engine's socket. The engine knows nothing of Ray.

Serve counts the ongoing requests of a deployment: those that run, and those that wait in an engine or for a replica.
An engine runs `max_num_seqs` sequences at a time. With that number as Serve's target per replica, the requests above it
are those that wait, and as many replicas are added as would run them all. A replica is taken away once the others could
run all requests without a queue. This needs no policy of our own, and an operator may override it in Serve's file.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from msgspec import Struct
from ray import serve
from ray.serve.config import AutoscalingConfig

from deltastore.errors import PeraxisError
from server.engine.main import serve_engine
from server.errors import EngineFailed
from server.log import configure_logging
from server.metrics.instruments import PREFIX, Snapshot
from server.metrics.metrics import EngineMetrics
from server.protocol.engine_client import EngineClient
from server.protocol.messages import (
    CallDone,
    DoneEvent,
    ErrorEvent,
    Event,
    ForgetVariants,
    LoadCall,
    Mask,
    Outputs,
    Pause,
    PinChanged,
    ResidencyAnswer,
    ResidencyQuery,
    Resident,
    StopSequence,
    Submit,
    Welcome,
    decode_client_message,
    encode,
)
from server.scale.routing import ReplicaReport, Route, stats_from_report
from server.settings import Settings

# A new replica loads a base first, and one that goes takes its resident variants with it: wait longer than a burst.
UPSCALE_DELAY_S = 10.0
DOWNSCALE_DELAY_S = 600.0


def autoscaling_config(settings: Settings, min_replicas: int, max_replicas: int) -> AutoscalingConfig:
    """Return Serve's configuration that adds replicas while requests wait.

    Raises:
        ValueError: `max_replicas` is less than `min_replicas` or 1.
    """
    return AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        target_ongoing_requests=settings.max_num_seqs,
        upscale_delay_s=UPSCALE_DELAY_S,
        downscale_delay_s=DOWNSCALE_DELAY_S,
    )


log = logging.getLogger(__name__)

ADDRESS = "inproc://engine"
# How long the engine may take to answer its last requests.
STOP_S = 10.0


class ReplicaState(Struct, frozen=True):
    """The part of a replica's state that every ingress keeps."""

    replica: str  # full id
    fingerprint: str  # of the base
    pinned: tuple[bytes, ...]  # a PinChanged message for each pin


class ReplicaMetrics(Struct, frozen=True):
    """The metrics of a replica, and the deltas in its memory."""

    replica: str
    snapshot: Snapshot
    residents: tuple[Resident, ...]


class EngineReplica:
    """One engine. Serve makes and calls it on one event loop, and sends requests after its first healthy check."""

    def __init__(self, settings: Settings) -> None:
        configure_logging("engine", settings)
        self._name = serve.get_replica_context().replica_id.to_full_id_str()
        self._settings = settings
        self._metrics = EngineMetrics(process=True)
        self._stopping = threading.Event()
        self._open: Counter[str] = Counter()  # open requests by version
        self._num_slots = 0  # until the engine has told it
        self._client = EngineClient("replica")
        arguments = (settings, ADDRESS, self._metrics, self._stopping)
        self._thread = threading.Thread(target=serve_engine, args=arguments, name="engine", daemon=True)
        self._thread.start()
        self._client.connect(ADDRESS)

    async def generate(self, submit: bytes, route: Route) -> AsyncIterator[bytes]:
        """Yield the replica's id, then Outputs messages with all events since the one before.

        Args:
            submit: a Submit message.
            route: for the router.
        """
        yield self._name.encode()
        message = decode_client_message(submit)
        assert isinstance(message, Submit)
        request, events, arrived = message.request, list[Event](), asyncio.Event()

        def on_event(event: Event) -> None:
            events.append(event)
            arrived.set()

        version = request.version
        if version is not None:
            self._open[version] += 1
        try:
            try:
                self._client.submit(request, on_event, message.first_mask)
            except PeraxisError as error:
                on_event(ErrorEvent(error))
            is_open = True
            while is_open:
                await arrived.wait()
                arrived.clear()
                yield encode(Outputs(tuple((request.id, event) for event in events)))
                is_open = not isinstance(events[-1], DoneEvent | ErrorEvent)
                events.clear()
        finally:
            self._client.cancel(request.id)
            if version is not None:
                self._open -= Counter({version: 1})

    async def tell(self, messages: list[bytes], route: Route | None = None) -> bool:
        """Act on StopSequence, Pause, Mask and ForgetVariants messages, in their order.

        Returns:
            False, and nothing is done, if the call must reach another replica: the deployment has a router that knows
            no routes.
        """
        if route is not None and route.pinned_replica not in (None, self._name):
            return False
        for message in map(decode_client_message, messages):
            match message:
                case StopSequence(request_id, index):
                    self._client.stop_sequence(request_id, index)
                case Pause(request_id, is_paused):
                    self._client.set_paused(request_id, is_paused)
                case Mask(request_id, index, position, bits):
                    self._client.send_mask(request_id, index, position, bits)
                case ForgetVariants(labels):
                    self._client.forget_variants(frozenset(labels))
        return True

    async def call(self, message: bytes, route: Route | None = None) -> bytes:
        """Answer a LoadCall or ResidencyQuery message with a CallDone or ResidencyAnswer message."""
        match decode_client_message(message):
            case LoadCall(call_id, action, record, max_pinned):
                error: PeraxisError | None = None
                try:
                    await self._client.load(action, record, max_pinned)
                except PeraxisError as raised:
                    error = raised
                return encode(CallDone(call_id, error))
            case ResidencyQuery(call_id, versions):
                # For an ingress, which asks for its tenants in turn, one question at a time.
                return encode(ResidencyAnswer(call_id, await self._client.residency_of(versions, "")))
            case other:
                raise EngineFailed(f"a replica was asked {type(other).__name__}, which is no call")

    async def facts(self) -> bytes:
        """Return the engine's facts as a Welcome message."""
        return encode(Welcome(self._client.facts))

    async def state(self) -> ReplicaState:
        """Return what every ingress keeps."""
        pinned = tuple(encode(PinChanged(record, is_pinned=True)) for record in self._client.pinned)
        return ReplicaState(self._name, self._client.facts.base.fingerprint, pinned)

    async def metrics(self) -> ReplicaMetrics:
        """Return the metrics and the deltas in memory, the least recently used first."""
        residents = await self._client.residents()
        return ReplicaMetrics(self._name, self._metrics.snapshot(), residents)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return a ReplicaReport for the routers, which Serve collects."""
        residents = await self._client.residents()
        on_device = {each.label for each in residents if each.state.level == "device"}
        in_host = {each.label for each in residents if each.state.level == "host"}
        wanted = self._open.keys() - on_device
        report = ReplicaReport(
            replica=self._name,
            capacity=self._settings.max_num_seqs,
            num_slots=self._slots(),
            num_open=self._client.num_open,
            num_loads=len(wanted),
            resident=frozenset(on_device | wanted),
            in_host_cache=frozenset(in_host),
        )
        return stats_from_report(report)

    def _slots(self) -> int:
        if not self._num_slots:
            families = self._metrics.snapshot().families
            (slots,) = (family for family in families if family.name == PREFIX + "slots")
            self._num_slots = int(slots.series[0].value)
        return self._num_slots

    async def check_health(self) -> None:
        """Wait until the base is loaded; then raise EngineFailed if the engine has ended or a step hangs.

        Serve replaces a replica that is not healthy.

        Raises:
            PeraxisError: the base cannot be loaded.
        """
        await asyncio.shield(self._client.welcomed)
        if not self._thread.is_alive():
            raise EngineFailed("the engine has ended: see its log")
        silent_s = time.monotonic() - self._client.last_beat_at
        if silent_s > self._settings.step_timeout:
            raise EngineFailed(f"no step has ended for {silent_s:.0f} s: see --step-timeout")

    async def __del__(self) -> None:
        """Stop the engine, which answers the requests that are left with an error."""
        self._stopping.set()
        await asyncio.to_thread(self._thread.join, STOP_S)
