"""The state of a whole server at one moment, as `GET /stats` shows it. Rates are averages over `interval_s` seconds."""

from __future__ import annotations

from msgspec import Struct


class VariantStats(Struct, frozen=True, kw_only=True):
    """A version that wants its delta, which is in device or host memory; versions of one digest share its bytes.

    `level` is ``device`` or ``host``; `num_requests` are admitted and not answered in full. `pinned` and
    `num_requests` are the version's own, and the rates those of all versions of its variant.
    """

    tenant: str
    name: str
    version: int
    digest: str
    device_bytes: int
    level: str
    pinned: bool
    num_requests: int
    requests_per_s: float | None
    tokens_per_s: float | None  # prompt and generated


class RequestStats(Struct, frozen=True, kw_only=True):
    """Requests of all variants and of the base; those that wait for a load are also counted in `waiting`."""

    running: int
    waiting: int
    waiting_for_load: int
    finished_per_s: float | None
    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None


class EngineStats(Struct, frozen=True, kw_only=True):
    """The engine and its memory."""

    steps_per_s: float | None
    preemptions: int  # since the server's start
    kv_cache_usage: float  # share of the pages, 0 to 1
    device_memory_bytes: dict[str, int]  # by use: base, slots, kv, other
    slots: int
    slots_in_use: int
    slots_pinned: int
    host_cache_bytes: int
    host_cache_limit_bytes: int


class UploadStats(Struct, frozen=True, kw_only=True):
    """Uploads since the server's start, by outcome, and their bytes."""

    created: int
    duplicate: int
    rejected: int
    failed: int
    num_bytes: int
    bytes_per_s: float | None


class ServerStats(Struct, frozen=True, kw_only=True):
    """A server at one moment.

    Attributes:
        at: in seconds since 1970.
        interval_s: of the averages; None, as all rates then are, unless there was a snapshot in the minute before.
    """

    at: float
    interval_s: float | None
    requests: RequestStats
    engine: EngineStats
    uploads: UploadStats
    variants: tuple[VariantStats, ...]  # the most recently used last
