"""Work on threads outlives a cancelled request: its last write is done before its upload ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from deltastore.registry.uploads import Upload
from server.api.publishing import WriteBehind
from server.registry_calls import BackgroundThreads
from tests.server.helpers.http_app import make_service, settings_of

WAIT_S = 240.0


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


def test_background_work_ends_before_its_cancelled_request() -> None:
    begun, may_end, ended = (threading.Event() for _ in range(3))

    def work() -> None:
        begun.set()
        may_end.wait(WAIT_S)
        ended.set()

    threads = BackgroundThreads(1, "test")
    asyncio.run(cancelled(lambda: threads.run(work), begun, may_end, ended))


def test_the_last_chunk_is_written_before_a_cancelled_upload_ends(tmp_path: Path) -> None:
    begun, may_end, ended = (threading.Event() for _ in range(3))

    class SlowUpload:
        def write(self, chunk: bytes) -> None:
            begun.set()
            may_end.wait(WAIT_S)
            ended.set()

    async def upload() -> None:
        service = make_service(settings_of(tmp_path, tmp_path / "registry"))
        try:
            async with WriteBehind(service, cast(Upload, SlowUpload())) as writer:
                await writer.write(b"the last chunk")
        finally:
            await service.close()

    asyncio.run(cancelled(upload, begun, may_end, ended))
