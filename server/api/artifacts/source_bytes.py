"""The bytes of a source's artifact, as chunks: from an open file, or from a hub through a worker. Publishes nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

from server.api.artifacts.publishing import WRITE_BYTES
from server.api.service import Service
from server.errors import SourceUnavailable, WorkerDied, WorkerTimeout
from server.sources import hub
from server.sources.hub import HubFile
from server.sources.reference import HubReference
from server.workers.limits import Limits
from server.workers.pool import WorkerPool

log = logging.getLogger(__name__)

# To find a file on a hub: three replies of its API.
FIND_S = 60.0
# To download a file, beside its bytes at the speed of a slow hub.
DOWNLOAD_S = 120.0
HUB_BYTES_PER_S = 1e6
# Reading from a socket, decrypting and writing to a pipe.
CPU_BYTES_PER_S = 50e6
MEMORY_BYTES = 512 << 20

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def file_chunks(service: Service, descriptor: int) -> AsyncGenerator[bytes, None]:
    """Yield an open file in chunks. Reads on background threads."""
    offset = 0
    while chunk := await service.run_in_background(os.pread, descriptor, WRITE_BYTES, offset):
        offset += len(chunk)
        yield chunk


async def find_on_hub(workers: WorkerPool, tenant: str, reference: HubReference, hub_url: str) -> HubFile:
    """Find a file on a hub; raises as `hub.find_file` does."""
    limits = Limits(MEMORY_BYTES, FIND_S)
    return await _run(workers, tenant, FIND_S, limits, hub.find_file, reference, hub_url)


async def hub_chunks(
    workers: WorkerPool, tenant: str, file: HubFile, hub_url: str, max_bytes: int
) -> AsyncGenerator[bytes, None]:
    """Yield a hub's file in chunks while a worker downloads it. Closing the generator kills the worker.

    Raises:
        SourceUnavailable: the hub failed, or took too long for `max_bytes`.
    """
    loop = asyncio.get_running_loop()
    deadline_s = DOWNLOAD_S + max_bytes / HUB_BYTES_PER_S
    limits = Limits(MEMORY_BYTES, DOWNLOAD_S + max_bytes / CPU_BYTES_PER_S)
    with tempfile.TemporaryDirectory(prefix="peraxis-source-", ignore_cleanup_errors=True) as directory:
        pipe = os.path.join(directory, "pipe")
        os.mkfifo(pipe, 0o600)
        read_end = os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
        # This end stays open until the worker is done, so that the reader does not see the end of the pipe before.
        write_end = os.open(pipe, os.O_WRONLY | os.O_CLOEXEC)
        reader = asyncio.StreamReader(limit=WRITE_BYTES)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), read_end)
        fetching = asyncio.create_task(
            _run(workers, tenant, deadline_s, limits, hub.download, file, hub_url, pipe)
        )
        fetching.add_done_callback(lambda _: os.close(write_end))
        try:
            while chunk := await reader.read(WRITE_BYTES):
                yield chunk
            await fetching
        finally:
            transport.close()
            fetching.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({fetching})


async def _run(
    workers: WorkerPool,
    tenant: str,
    deadline_s: float,
    limits: Limits,
    function: Callable[[*Ts], T],
    *args: *Ts,
) -> T:
    try:
        return await workers.run(tenant, deadline_s, function, *args, limits=limits)
    except WorkerTimeout as error:
        raise SourceUnavailable(
            f"the hub did not send the file within {deadline_s:g} s: try again later"
        ) from error
    except WorkerDied as error:
        raise SourceUnavailable(f"the hub's answer could not be read: {error}") from error
    except RuntimeError as error:
        log.warning("a download for tenant %s failed", tenant, exc_info=error)
        raise SourceUnavailable("the hub cannot be reached: try again later") from error
