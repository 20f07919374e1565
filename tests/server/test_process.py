"""The server's process: its ports, its exit codes, and work that outlives a cancelled request."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from deltastore.errors import CheckpointError
from deltastore.registry.uploads import Upload
from server.api.artifacts.uploads import WriteBehind
from server.app import create_app
from server.errors import Draining, EngineFailed
from server.frontend.listen import listen, url_of
from server.process import run
from server.settings import Settings

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Undo `freeze_startup_objects` after each test."""
    assert gc.get_freeze_count() == 0
    yield
    gc.unfreeze()


class BackendStub:
    """A backend without a model. It is also its own engine and tokenizers."""

    on_lost: Callable[[], None]

    @property
    def engine(self) -> BackendStub:
        return self

    tokenizers = engine

    def alive(self) -> bool:
        return True

    def drain(self) -> None:
        pass

    def close(self, timeout_s: float = 0.0) -> None:
        pass


def serve(
    tmp_path: Path, on_ready: Callable[[BackendStub, str], None], build: Callable[[], Any] | None = None
) -> int:
    """Run a server in this process; call `on_ready` with its backend and its URL."""
    backend: Any = BackendStub()
    settings = Settings(base=tmp_path, registry=tmp_path / "registry", shutdown_timeout=5)

    def build_backend(*args: Any) -> Any:
        *_, backend.on_lost = args
        return build() if build else backend

    app = create_app(settings, build_backend)
    with listen("127.0.0.1", 0) as listening:
        url = url_of(listening)
        return run({listening: app}, app.state.service, lambda: on_ready(backend, url))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_server_with_its_code(tmp_path: Path, number: int, code: int) -> None:
    assert serve(tmp_path, lambda backend, url: os.kill(os.getpid(), number)) == code


def test_a_lost_device_ends_the_server_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="the device is lost"):
        serve(tmp_path, lambda backend, url: backend.on_lost())


def test_a_base_that_cannot_be_loaded_ends_the_server_with_its_error(tmp_path: Path) -> None:
    def build() -> BackendStub:
        raise CheckpointError("no such base")

    with pytest.raises(CheckpointError, match="no such base"):
        serve(tmp_path, lambda backend, url: None, build)


def test_startup_objects_are_exempt_from_garbage_collection(tmp_path: Path) -> None:
    frozen = []

    def on_ready(backend: BackendStub, url: str) -> None:
        frozen.append(gc.get_freeze_count())
        os.kill(os.getpid(), signal.SIGTERM)

    serve(tmp_path, on_ready)
    assert frozen[0] > 10_000


async def cancelled(
    work: Callable[[], Coroutine[Any, Any, None]],
    begun: threading.Event,
    may_end: threading.Event,
    ended: threading.Event,
) -> None:
    """Cancel `work` after `begun`; check that it waits for its thread, which ends after `may_end`."""
    task = asyncio.create_task(work())
    await asyncio.to_thread(begun.wait, WAIT_S)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_background_work_ends_before_its_cancelled_request(tmp_path: Path) -> None:
    service = create_app(Settings(base=tmp_path, registry=tmp_path / "registry")).state.service
    begun, may_end, ended = (threading.Event() for _ in range(3))

    def work() -> None:
        begun.set()
        may_end.wait(WAIT_S)
        ended.set()

    asyncio.run(cancelled(lambda: service.run_in_background(work), begun, may_end, ended))


def test_a_signal_while_the_base_loads_ends_the_server(tmp_path: Path) -> None:
    def build() -> BackendStub:
        os.kill(os.getpid(), signal.SIGTERM)
        return BackendStub()

    assert serve(tmp_path, lambda backend, url: None, build) == 0


def test_a_signal_ends_the_loading_itself(tmp_path: Path) -> None:
    def build(stopping: threading.Event) -> BackendStub:
        os.kill(os.getpid(), signal.SIGTERM)
        if stopping.wait(WAIT_S):
            raise Draining("stopped while loading")
        return BackendStub()

    settings = Settings(base=tmp_path, registry=tmp_path / "registry", shutdown_timeout=3600)
    app = create_app(settings, lambda *args: cast(Any, build(args[3])))
    with listen("127.0.0.1", 0) as listening:
        assert run({listening: app}, app.state.service, lambda: None) == 0


def test_after_the_end_the_port_is_closed(tmp_path: Path) -> None:
    urls: list[str] = []

    def on_ready(backend: BackendStub, url: str) -> None:
        urls.append(url)
        os.kill(os.getpid(), signal.SIGTERM)

    serve(tmp_path, on_ready)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{urls[0]}/health")


def test_the_last_chunk_is_written_before_a_cancelled_upload_ends(tmp_path: Path) -> None:
    service = create_app(Settings(base=tmp_path, registry=tmp_path / "registry")).state.service
    begun, may_end, ended = (threading.Event() for _ in range(3))

    class SlowUpload:
        def write(self, chunk: bytes) -> None:
            begun.set()
            may_end.wait(WAIT_S)
            ended.set()

    async def upload() -> None:
        async with WriteBehind(service, cast(Upload, SlowUpload())) as writer:
            await writer.write(b"the last chunk")

    asyncio.run(cancelled(upload, begun, may_end, ended))
