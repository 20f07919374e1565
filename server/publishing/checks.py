"""Checks of uploaded artifacts, in worker processes that may be killed.

A worker has torch; the process that owns the pool needs none. Run as a program, this module checks the files of one
variant, which is how `peraxis compress` and `import` ask beforehand what an upload would be asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from deltastore.errors import ArtifactError, ArtifactTooLarge, PeraxisError
from deltastore.registry.records import ArtifactFacts
from deltastore.threads import NICENESS
from server.errors import Draining, QueueFull, WorkerDied, WorkerKilled, WorkerTimeout, unread_tensor
from server.workers.pool import LOAD_LIMITS, LOAD_S, WorkerPool
from server.workers.worker_main import Limits, allow

if TYPE_CHECKING:
    from deltastore.base import Base

log = logging.getLogger(__name__)

# One tenant has at most half of them.
NUM_WORKERS = 2
# Of a check of the tensors. A header takes up to 500 MB when it is parsed.
MEMORY_BYTES = 2 << 30
# The time of such a check, beside its reading of the file at a slow disk's speed.
CHECK_S = 30.0
READ_BYTES_PER_S = 50e6
# Bytes of a variant's tokenizer and configuration files, which are read into memory.
MAX_FILES_BYTES = 256 << 20
# Of a base whose embedding is not known by its name.
MAX_ROWS = 1 << 31
WHERE = "the upload"
# Exit code of this module's program.
REFUSED = 3
# Imported by a worker before its first check. The first makes transformers do without torch, which follows.
MODULES = (
    "server.text.without_torch", "server.text.worker_tasks",
    "deltastore.format.artifact", "deltastore.format.manifest", "deltastore.format.validate",
)  # fmt: skip

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ArtifactChecks:
    """The workers that check uploads. Event loop only.

    Args:
        base_dir: directory of the base's checkpoint, whose tokenizer files complete a variant's.
    """

    def __init__(self, base_dir: Path) -> None:
        self._base_dir = base_dir
        self._pool = WorkerPool(NUM_WORKERS, Limits(MEMORY_BYTES, CHECK_S), MODULES, NICENESS)
        self._preparing: asyncio.Task[None] | None = None

    def prepare(self) -> None:
        """Start a worker ahead of a check, unless there is one: importing torch takes seconds."""
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.create_task(self._start_worker())

    async def check(
        self,
        tenant: str,
        path: Path,
        num_bytes: int,
        base: Base,
        slot_bytes: int,
        unread: tuple[str, ...] = (),
        longest_context: int | None = None,
    ) -> ArtifactFacts:
        """Check that a server with this base can serve an artifact. Cancelling the call ends the check.

        Args:
            tenant: the owner of the upload; tenants' checks are run in turn.
            path: the artifact, which nothing writes to any more.
            num_bytes: its size.
            base: the base of the server.
            slot_bytes: size of a slot on the device.
            unread: the base's tensors that no layer would read from a delta.
            longest_context: tokens for which the engine was started, and a longer variant is refused; None: it takes
                any, as far as its KV cache holds them.

        Raises:
            ArtifactError: the artifact is malformed or changes what no layer reads, or its check did not end as it
                should.
            BaseMismatch: it was made from another base.
            ArtifactTooLarge: no slot can hold it, or its files are too large.
            QueueFull: too many uploads of the tenant wait for their checks, or its worker did not start or was killed.
            Draining: the server is shutting down.
        """
        if self._preparing is not None:
            await asyncio.wait({self._preparing})
        limits = Limits(MEMORY_BYTES, cpu_s=CHECK_S + num_bytes / READ_BYTES_PER_S)
        facts = await self._run(
            tenant, limits.cpu_s, limits, check_tensors, path, base, slot_bytes, unread, longest_context
        )
        # Within the limits of the loads that requests need.
        await self._run(tenant, LOAD_S, LOAD_LIMITS, check_files, path, self._base_dir, base)
        return facts

    async def close(self) -> None:
        """End the workers; checks under way raise Draining."""
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait({self._preparing})
        await self._pool.close()

    async def _start_worker(self) -> None:
        # The check that needs the worker starts one again and raises the error.
        with contextlib.suppress(WorkerDied, Draining):
            await self._pool.warm(1)

    async def _run(
        self, tenant: str, deadline_s: float, limits: Limits, function: Callable[[*Ts], T], *args: *Ts
    ) -> T:
        try:
            return await self._pool.run(tenant, deadline_s, function, *args, limits=limits)
        except WorkerTimeout as error:
            raise ArtifactError(f"{WHERE} takes too long to check: {error}") from error
        except WorkerKilled as error:
            raise QueueFull(f"{WHERE} cannot be checked now: {error}: send it again") from error
        except WorkerDied as error:
            raise ArtifactError(f"{WHERE} cannot be checked: {error}") from error
        except RuntimeError as error:
            log.warning("the check of an upload of tenant %s failed", tenant, exc_info=error)
            raise ArtifactError(f"{WHERE} cannot be read: its check failed") from error


def check_tensors(
    path: Path,
    base: Base,
    slot_bytes: int,
    unread: tuple[str, ...] = (),
    longest_context: int | None = None,
) -> ArtifactFacts:
    """Check all but an artifact's files, in a worker. Cheap checks run first: they bound what the others read.

    Raises:
        ArtifactError, BaseMismatch, ArtifactTooLarge: as `ArtifactChecks.check` does.
    """
    # Deferred: they import torch.
    from deltastore.format.artifact import Artifact
    from deltastore.format.validate import (
        check_artifact,
        check_base,
        check_no_stacks,
        check_size,
        max_positions,
    )

    with Artifact.open(path, WHERE) as artifact:
        check_no_stacks(artifact.manifest, WHERE)
        check_size(artifact, slot_bytes, WHERE)
        check_base(artifact, base, WHERE)
        if changed := sorted(artifact.manifest.tensors.keys() & set(unread)):
            raise unread_tensor(changed).about(WHERE)
        check_artifact(artifact, WHERE)
        manifest = artifact.manifest
        positions = max_positions(manifest, base, WHERE)
        if longest_context is not None and positions is not None and positions > longest_context:
            raise ArtifactTooLarge(
                f"{WHERE}: its context has {positions} tokens, and this server was started for {longest_context}: "
                f"start it with --max-model-len {positions}, or compress a fine-tune with a shorter context"
            )
        if artifact.header.data_bytes - manifest.device_bytes > MAX_FILES_BYTES:
            raise ArtifactTooLarge(
                f"{WHERE} carries files of more than {MAX_FILES_BYTES} bytes: leave some out"
            )
        return ArtifactFacts(
            data_start=artifact.header.data_start,
            device_bytes=manifest.device_bytes,
            base_fingerprint=manifest.base_fingerprint,
            method=manifest.method,
            fidelity=manifest.fidelity,
            max_positions=positions,
        )


def check_files(path: Path, base_dir: Path, base: Base) -> None:
    """Use the tokenizer, the chat template and the generation config of an artifact, in a worker.

    Raises:
        ArtifactError: one of them is too large or cannot be used.
    """
    # Deferred: they import torch and transformers.
    from deltastore.format.artifact import Artifact
    from server.text.worker_tasks import check_text_files

    with Artifact.open(path, WHERE) as artifact:
        files = {name: artifact.file(name) for name in artifact.manifest.files}
        shapes = {**base.shapes, **{name: spec.shape for name, spec in artifact.manifest.tensors.items()}}
    rows = shapes[base.embedding][0] if base.embedding is not None else MAX_ROWS
    check_text_files(files, base_dir, rows, WHERE)


def main(files_dir: Path, base_dir: Path, num_embeddings: int, where: str) -> int:
    """Use the files of a variant within the limits of a worker; print the first defect.

    Args:
        files_dir: holds its tokenizer, chat templates and generation config, and nothing else.
        base_dir: the base's checkpoint.
        num_embeddings: rows of the variant's embedding.
        where: its name in the message.

    Returns:
        The exit code: 0, or `REFUSED` for a defect. With any other the process died.
    """
    import server.text.without_torch  # noqa: F401
    from server.text.worker_tasks import check_text_files

    paths = [path for path in files_dir.rglob("*") if path.is_file()]
    files = {str(path.relative_to(files_dir)): path.read_bytes() for path in paths}
    allow(LOAD_LIMITS)
    signal.alarm(int(LOAD_S))
    try:
        check_text_files(files, base_dir, num_embeddings, where)
    except PeraxisError as error:
        print(error)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
