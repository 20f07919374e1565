"""Messages between the supervisor and an HTTP process, over a pair of connected sockets."""

from __future__ import annotations

from msgspec import Raw, Struct

from server.metrics.snapshot import Snapshot
from server.protocol.shared_calls import AnyCall

# Largest message in either direction; the metrics of all processes are the longest.
MAX_MESSAGE_BYTES = 16 << 20


class EngineStarted(Struct, frozen=True, tag=True):
    """To an HTTP process: connect to this engine, which may still load its base."""

    address: str


class EngineLost(Struct, frozen=True, tag=True):
    """To an HTTP process: the engine has died; another one is started."""


class Ping(Struct, frozen=True, tag=True):
    """To an HTTP process: answer with a Pong; without one, its event loop hangs."""


class MetricsWanted(Struct, frozen=True, tag=True):
    """To an HTTP process: answer with a MetricsOfProcess."""

    call_id: int


class SharedAnswer(Struct, frozen=True, tag=True):
    """To an HTTP process: the answer to its SharedQuestion."""

    call_id: int
    result: Raw = Raw(b"\xc0")  # MessagePack of the type that the call names
    error: str | None = None  # of a QueueFull that the call raised


SupervisorMessage = EngineStarted | EngineLost | Ping | MetricsWanted | SharedAnswer


class Serving(Struct, frozen=True, tag=True):
    """To the supervisor: the ports answer, and an engine is ready."""


class CannotServe(Struct, frozen=True, tag=True):
    """To the supervisor: this process cannot serve the base, nor can another one."""

    reason: str


class Pong(Struct, frozen=True, tag=True):
    """To the supervisor: the answer to a Ping."""


class MetricsOfProcess(Struct, frozen=True, tag=True):
    """To the supervisor: the metrics of this process alone."""

    call_id: int
    snapshot: Snapshot


class SharedQuestion(Struct, frozen=True, tag=True):
    """To the supervisor: a call to the shared state."""

    call_id: int
    call: AnyCall


HttpProcessMessage = Serving | CannotServe | Pong | MetricsOfProcess | SharedQuestion
