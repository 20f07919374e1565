"""Provoke the server's guards and print the error of each as JSON.

`tests/server/test_optimized.py` runs this program with `python -O`, which removes every assert.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import torch

from deltastore.errors import PeraxisError
from deltastore.loader import Loader, ObjectSource
from deltastore.registry import Registry
from server.api.service import Backend, Service
from server.app import create_app
from server.deltas.resident import ResidentDelta, Slot
from server.engine.engine import Engine
from server.engine.request import Request
from server.engine.scheduling.kv_cache_manager import KVCacheManager
from server.engine.scheduling.scheduler import Scheduler
from server.engine.sequence import Sequence
from server.metrics.local import LocalMetrics
from server.sampling_params import SamplingParams
from server.settings import Settings
from server.text.tokenizer import Tokenizers
from tests.server.helpers.residency import running_residency


class DeadEngine:
    """An engine whose thread has ended. It is also its own tokenizers."""

    def alive(self) -> bool:
        return False

    def drain(self) -> None:
        pass

    def close(self, timeout_s: float = 0.0) -> None:
        pass


def ready_while_loading(directory: Path) -> None:
    """Ask `/ready` of a server whose base never loads; raise RuntimeError with the status and the code."""

    def load(*args: Any) -> Backend:
        stop_loading: threading.Event = args[3]
        stop_loading.wait()
        raise RuntimeError("stopped while loading")

    async def ask() -> httpx.Response:
        app = create_app(_settings(directory), load)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            return await client.get("/ready")

    reply = asyncio.run(ask())
    raise RuntimeError(f"{reply.status_code} {reply.json()['error']['code']}")


def backend_before_it_is_loaded(directory: Path) -> None:
    _ = _service(directory).backend


def ready_before_the_backend_is_loaded(directory: Path) -> None:
    _service(directory).check_ready()


def ready_while_draining(directory: Path) -> None:
    service = _service(directory)
    service.drain()
    service.check_ready()


def ready_with_a_dead_engine(directory: Path) -> None:
    engine = DeadEngine()
    backend = Backend(cast(Engine, engine), cast(Tokenizers, engine))

    async def load() -> None:
        service = _service(directory, lambda *_: backend)
        service.start()
        await cast("asyncio.Task[None]", service.loading)
        service.check_ready()

    asyncio.run(load())


def delta_of_an_overwritten_slot(directory: Path) -> None:
    slot = Slot(0, torch.zeros(64, dtype=torch.uint8))
    delta = ResidentDelta("d" * 64, False, "", {}, {}, slot, slot.generation)
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
    backend_before_it_is_loaded,
    ready_before_the_backend_is_loaded,
    ready_while_draining,
    ready_with_a_dead_engine,
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
    return Settings(base=directory, registry=directory / "registry", shutdown_timeout=5)


def _service(directory: Path, build: Callable[..., Backend] | None = None) -> Service:
    def never(*_: Any) -> Backend:
        raise RuntimeError("this service loads nothing")

    settings = _settings(directory)
    return Service(settings, Registry(settings.registry), LocalMetrics(), build or never)


def _sequence() -> Sequence:
    request = Request(
        id="request",
        tenant="default",
        name=None,
        record=None,
        prompt_ids=(1, 2, 3, 4),
        sampling_params=SamplingParams(),
    )
    return Sequence(request, 0)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    print(json.dumps({guard.__name__: error_of(guard, root / guard.__name__) for guard in GUARDS}))
