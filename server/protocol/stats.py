"""The state of a whole server at one moment, as `GET /stats` shows it. Totals are since the server's start."""

from __future__ import annotations

from msgspec import Struct


class VariantStats(Struct, frozen=True, kw_only=True):
    """A version whose delta is in device or host memory.

    `level` is ``device`` or ``host``; `num_requests` are admitted and not answered in full. `pinned` and
    `num_requests` are the version's own, and the totals those of all versions of its variant.
    """

    tenant: str
    name: str
    version: int
    digest: str
    device_bytes: int
    level: str
    pinned: bool
    num_requests: int
    finished: int  # requests
    tokens: int  # prompt and generated


class RequestStats(Struct, frozen=True, kw_only=True):
    """Requests of all variants and of the base; those that wait for a load are also counted in `waiting`."""

    running: int
    waiting: int
    waiting_for_load: int
    finished: int
    prompt_tokens: int
    generation_tokens: int


class EngineStats(Struct, frozen=True, kw_only=True):
    """The engine and its memory."""

    steps: int
    preemptions: int
    kv_cache_usage: float  # share of the pages, 0 to 1
    device_memory_bytes: dict[str, int]  # by use: base, slots, kv, other
    slots: int
    slots_in_use: int
    slots_pinned: int
    host_cache_bytes: int
    host_cache_limit_bytes: int


class UploadStats(Struct, frozen=True, kw_only=True):
    """Uploads by outcome, and their bytes."""

    created: int
    duplicate: int
    rejected: int
    failed: int
    num_bytes: int


class ServerStats(Struct, frozen=True, kw_only=True):
    """A server at one moment.

    Attributes:
        at: in seconds since 1970.
    """

    at: float
    requests: RequestStats
    engine: EngineStats
    uploads: UploadStats
    variants: tuple[VariantStats, ...]  # the most recently used last
