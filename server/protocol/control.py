"""Messages between the supervisor and an HTTP process, over a pair of connected sockets."""

from __future__ import annotations

from msgspec import Struct

from server.metrics.snapshot import Snapshot
from server.protocol.adapters import AdapterChange, LoadedAdapter
from server.protocol.limits import LimitAnswer, LimitCall
from server.protocol.source_job import SourceJob
from server.protocol.stats import ServerStats

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


class MetricsOfServer(Struct, frozen=True, tag=True):
    """To an HTTP process: the answer to its MetricsOfServerWanted."""

    call_id: int
    snapshot: Snapshot  # of all processes together


class Adapters(Struct, frozen=True, tag=True):
    """To an HTTP process: the answer to its AdaptersWanted."""

    call_id: int
    adapters: tuple[LoadedAdapter, ...]


class StatsAnswer(Struct, frozen=True, tag=True):
    """To an HTTP process: the answer to its StatsWanted."""

    call_id: int
    stats: ServerStats


class SourceJobAnswer(Struct, frozen=True, tag=True):
    """To an HTTP process: the answer to its PutSourceJob or SourceJobWanted; None if it was refused or not found."""

    call_id: int
    job: SourceJob | None


SupervisorMessage = (
    EngineStarted
    | EngineLost
    | Ping
    | MetricsWanted
    | MetricsOfServer
    | Adapters
    | StatsAnswer
    | LimitAnswer
    | SourceJobAnswer
)


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


class MetricsOfServerWanted(Struct, frozen=True, tag=True):
    """To the supervisor: answer with the metrics of all processes."""

    call_id: int


class VariantsDeleted(Struct, frozen=True, tag=True):
    """To the supervisor: variants that metrics show do not exist any more."""

    labels: tuple[str, ...]


class AdaptersWanted(Struct, frozen=True, tag=True):
    """To the supervisor: change the server's record of loaded adapters, and answer with it."""

    call_id: int
    change: AdapterChange


class StatsWanted(Struct, frozen=True, tag=True):
    """To the supervisor: answer with the statistics of the whole server."""

    call_id: int


class PutSourceJob(Struct, frozen=True, tag=True):
    """To the supervisor: keep the state of a job that this process runs."""

    call_id: int
    job: SourceJob


class SourceJobWanted(Struct, frozen=True, tag=True):
    """To the supervisor: answer with the last state of a job."""

    call_id: int
    tenant: str
    name: str
    job_id: str


HttpProcessMessage = (
    Serving
    | CannotServe
    | Pong
    | MetricsOfProcess
    | MetricsOfServerWanted
    | VariantsDeleted
    | AdaptersWanted
    | StatsWanted
    | LimitCall
    | PutSourceJob
    | SourceJobWanted
)
