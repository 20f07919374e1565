"""Provoke the server's guards and print the error of each as JSON.

`tests/server/test_optimized.py` runs this program with `python -O`, which removes every assert.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import torch

from deltastore.errors import PeraxisError
from deltastore.loader import Loader
from deltastore.verified_object import ObjectSource
from server.api.service import Service
from server.deltas.resident import ResidentDelta, Slot
from server.engine.kv_cache_manager import KVCacheManager
from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence
from server.protocol.request import Request, SamplingParams, token_ids_of
from server.settings import Settings
from tests.server.helpers.http_app import make_service, running_app
from tests.server.helpers.residency import running_residency


def ready_while_loading(directory: Path) -> None:
    """Ask `/ready` of a server without an engine; raise RuntimeError with the status and the code."""

    async def ask() -> httpx.Response:
        async with running_app(_settings(directory)) as app:
            return await app.client.get("/ready")

    reply = asyncio.run(ask())
    raise RuntimeError(f"{reply.status_code} {reply.json()['error']['code']}")


def facts_before_an_engine_is_ready(directory: Path) -> None:
    _with_service(directory, lambda service: service.engine.facts)


def text_before_the_service_has_started(directory: Path) -> None:
    _with_service(directory, lambda service: service.text)


def ready_while_draining(directory: Path) -> None:
    def drain(service: Service) -> None:
        service.draining = True
        service.check_ready()

    _with_service(directory, drain)


def delta_of_an_overwritten_slot(directory: Path) -> None:
    slot = Slot(0, torch.zeros(64, dtype=torch.uint8))
    delta = ResidentDelta("d" * 64, slot, slot.generation, frozenset(), 0)
    delta.check_alive()
    slot.generation += 1
    delta.check_alive()


def load_into_a_slot_that_is_too_small(directory: Path) -> None:
    with contextlib.closing(Loader(torch.device("cpu"), num_threads=1)) as loader:
        memory = torch.zeros(64, dtype=torch.uint8)
        loader.load(ObjectSource(directory / "absent", "d" * 64, 200, 64, 100, ("0" * 64,)), memory, memory)


def kv_cache_of_one_page(directory: Path) -> None:
    KVCacheManager(num_pages=1, page_tokens=16)


def prefix_attached_to_a_sequence_with_pages(directory: Path) -> None:
    kv_cache, sequence = KVCacheManager(num_pages=8, page_tokens=16), _sequence()
    kv_cache.attach_prefix(sequence)
    kv_cache.allocate(sequence, 4)
    kv_cache.attach_prefix(sequence)


def sequence_scheduled_twice(directory: Path) -> None:
    with running_residency(directory) as resident:
        scheduler = Scheduler(KVCacheManager(8, 16), resident.residency, max_num_seqs=4, max_batch_tokens=64)
        sequence = _sequence()
        scheduler.add(sequence, now=0.0)
        scheduler.add(sequence, now=0.0)


def step_without_tokens_for_prompts(directory: Path) -> None:
    with running_residency(directory) as resident:
        Scheduler(KVCacheManager(8, 16), resident.residency, max_num_seqs=64, max_batch_tokens=64)


def assert_statement(directory: Path) -> None:
    assert not directory, "asserts are on"


GUARDS: tuple[Callable[[Path], None], ...] = (
    ready_while_loading,
    facts_before_an_engine_is_ready,
    text_before_the_service_has_started,
    ready_while_draining,
    delta_of_an_overwritten_slot,
    load_into_a_slot_that_is_too_small,
    kv_cache_of_one_page,
    prefix_attached_to_a_sequence_with_pages,
    sequence_scheduled_twice,
    step_without_tokens_for_prompts,
    assert_statement,
)


def error_of(guard: Callable[[Path], None], directory: Path) -> str | None:
    """Return the class and the message of a guard's error, or None if it raised nothing."""
    directory.mkdir()
    try:
        guard(directory)
    except (PeraxisError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _settings(directory: Path) -> Settings:
    return Settings(base=directory, registry=str(directory / "registry"), shutdown_timeout=5)


def _with_service(directory: Path, use: Callable[[Service], object]) -> None:
    async def run() -> None:
        service = make_service(_settings(directory))
        try:
            use(service)
        finally:
            await service.close()

    asyncio.run(run())


def _sequence() -> Sequence:
    request = Request(
        id="request",
        tenant="default",
        name=None,
        record=None,
        prompt_ids=token_ids_of((1, 2, 3, 4)),
        num_embeddings=8,
        sampling_params=SamplingParams(),
    )
    return Sequence(request, 0)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    print(json.dumps({guard.__name__: error_of(guard, root / guard.__name__) for guard in GUARDS}))
