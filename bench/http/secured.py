"""Measure a server with API keys, limits and JSON logs beside one with none of them.

The same streams of one base go through `POST /generate` of both servers in turns. The limits of the tenant are set, and
so high that none refuses a request. Both servers log one line per request; without keys it is text.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.http.subjects import (
    OPEN,
    PROMPT_TOKENS,
    SECURED,
    Subject,
    measure,
    server_for,
    streamed_requests,
    through_http,
)
from bench.serving import prompts, write_base
from bench.synthetic import LlamaShapes
from deltastore.registry import Registry
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.limits import LimitsDirectory
from server.tenants.tenant import TenantLimits

TENANT = "acme"
# Every limit, each more than a run can use.
LIMITS = TenantLimits(
    requests_per_minute=10**6,
    tokens_per_minute=10**9,
    max_running=10**4,
    max_uploads=8,
    max_stored_bytes=1 << 40,
    max_pinned=8,
)
SECURED_FLAGS = ("--auth", "keys", "--log-format", "json")


def measure_secured(
    directory: Path, shapes: LlamaShapes, num_streams: int, num_new: int, repeats: int
) -> list[Subject]:
    """Measure both servers in turns."""
    base, registry = write_base(directory / "base", shapes), Registry(directory / "registry")
    key = _make_tenant(registry.root)
    asked = prompts(num_streams, PROMPT_TOKENS, shapes.vocabulary)
    requests = streamed_requests(asked, 0, num_new)
    with (
        server_for(base, registry, num_streams, 0) as without,
        server_for(base, registry, num_streams, 0, flags=SECURED_FLAGS) as secured,
    ):
        with_key = [replace(one, key=key) for one in requests]
        subjects = [
            Subject(OPEN, num_streams, 0, partial(through_http, without, requests)),
            Subject(SECURED, num_streams, 0, partial(through_http, secured, with_key)),
        ]
        measure(subjects, repeats)
    return subjects


def _make_tenant(registry: Path) -> str:
    """Set the tenant's limits and make a key of it; return what its owner sends."""
    LimitsDirectory(registry, TenantLimits()).write(TENANT, LIMITS)
    return KeyStore(registry).create(Auditor(AuditLog(registry)), TENANT, ["inference"]).text
