"""Puts a version's tokenizer files where workers can load them. Event loop only; parses no file.

Files are written on a thread, from chunks of the stored object that match their digests.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deltastore.format.manifest import GENERATION_FILE, TOKENIZER_FILES
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.variant_files import Sink, read_files
from server.fair_limiter import FairLimiter, Share, tenant_of
from server.text.files import (
    MODEL_CONFIG_FILE,
    TEMPLATE_FILE,
    check_size,
    content_key,
    digests_of,
    read_tokenizer_files,
    without_template,
)
from server.volume.calls import RegistryCalls

# Versions at a time, each with at most 174 MiB in files: they fit into a temporary directory of 1 GB, beside those of
# two uploads that are checked.
NUM_STAGED = 3
MAX_WAITING = 64


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version's files, as far as they differ from the base's.

    Args:
        directory: the tokenizer files and the base's model config; None if only the template may differ.
        key: the name of the tokenizer files' content; None if the base's tokenizer serves.
        template: the chat template of a version that the base's tokenizer serves; None if it has none.
        is_base_template: the chat template is the base's, whatever `template` says.
        generation: the generation config; None if it is the base's.
        shapes: shapes of tensors that differ from the base's.
    """

    directory: tempfile.TemporaryDirectory[str] | None
    key: str | None
    template: bytes | None
    is_base_template: bool
    generation: bytes | None
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def path(self) -> Path | None:
        return None if self.directory is None else Path(self.directory.name)


@dataclass(slots=True)
class _Use:
    """The use of one version by one tenant's requests."""

    staged: asyncio.Future[StagedVersion]
    ended: asyncio.Event
    task: asyncio.Task[None] | None = None
    num_users: int = 0


class Staging:
    """Staged versions that are in use. A tenant's requests that use a version at the same time share one copy.

    At most `NUM_STAGED` versions are staged at a time, for tenants in turn, so that their bytes are bounded, too.

    Args:
        several_tenants: one tenant has at most all but one of them.

    Raises:
        OSError: the base's tokenizer files cannot be read.
    """

    def __init__(
        self, base_dir: Path, registry: Registry, calls: RegistryCalls, several_tenants: bool = False
    ) -> None:
        self.base_dir = base_dir
        self._registry = registry
        self._calls = calls
        self._base_digests = digests_of(without_template(read_tokenizer_files(base_dir)))
        self._limiter = FairLimiter(NUM_STAGED, 1, MAX_WAITING, NUM_STAGED - 1 if several_tenants else None)
        # By tenant and label, not by digest: errors name the version, and the tenant waits for its turn.
        self._uses: dict[tuple[str, str], _Use] = {}

    @asynccontextmanager
    async def staged(self, record: VersionRecord, share: Share) -> AsyncIterator[StagedVersion]:
        """Keep a version's files in a directory inside the `async with` block.

        Args:
            share: the tenant whose request uses it, and the digest.

        Raises:
            VariantNotFound: the object is gone.
            VariantQuarantined: the object is corrupt; it was quarantined.
            ArtifactError: a file is too large.
            RegistryUnavailable: the registry cannot be read.
            QueueFull: too many versions of the same bytes wait to be staged.
        """
        key = tenant_of(share), record.label
        if key not in self._uses:
            use = self._uses[key] = _Use(asyncio.get_running_loop().create_future(), asyncio.Event())
            use.task = asyncio.create_task(self._hold(record, share, use))
            use.task.add_done_callback(partial(_failed, use.staged))
        use = self._uses[key]
        use.num_users += 1
        try:
            yield await asyncio.shield(use.staged)
        finally:
            use.num_users -= 1
            if not use.num_users:
                del self._uses[key]
                use.ended.set()

    async def _hold(self, record: VersionRecord, share: Share, use: _Use) -> None:
        """Stage a version when its turn has come, and remove it when its use has ended."""
        async with self._limiter.permit(share):
            if use.ended.is_set():
                return
            # A thread cannot be cancelled, so that the turn lasts until it has written all files.
            staged = await self._calls.run_long(partial(self._stage, record), tenant_of(share))
            use.staged.set_result(staged)
            await use.ended.wait()
            if staged.directory is not None:
                staged.directory.cleanup()

    def _stage(self, record: VersionRecord) -> StagedVersion:
        directory = tempfile.TemporaryDirectory(prefix="peraxis-tokenizer-", ignore_cleanup_errors=True)
        try:
            path, digests = Path(directory.name), dict[str, str]()

            def take(name: str, num_bytes: int) -> AbstractContextManager[Sink] | None:
                check_size(name, num_bytes, record.label)
                if name == TEMPLATE_FILE or name not in TOKENIZER_FILES:
                    return None
                return _written(path / name, digests)

            found = read_files(self._registry, record, take)
            template, generation = found.files.get(TEMPLATE_FILE), found.files.get(GENERATION_FILE)
            if digests in ({}, self._base_digests):
                directory.cleanup()
                is_base_template = template is None and not digests
                return StagedVersion(None, None, template, is_base_template, generation, found.shapes)
            if template is not None:
                (path / TEMPLATE_FILE).write_bytes(template)
                digests |= digests_of({TEMPLATE_FILE: template})
            shutil.copy(self.base_dir / MODEL_CONFIG_FILE, path)
            return StagedVersion(directory, content_key(digests), None, False, generation, found.shapes)
        except BaseException:
            directory.cleanup()
            raise


def _failed(staged: asyncio.Future[StagedVersion], ended: asyncio.Task[None]) -> None:
    """Have the requests that wait for a version raise the error of its staging."""
    if not ended.cancelled() and (error := ended.exception()) is not None and not staged.done():
        staged.set_exception(error)
        # Read, so that asyncio does not log an error that no request waits for any more.
        staged.exception()


@contextmanager
def _written(path: Path, digests: dict[str, str]) -> Iterator[Sink]:
    """Write a file in pieces, and keep its SHA-256 under its name."""
    hashing = hashlib.sha256()
    with path.open("wb") as file:

        class Writer:
            def write(self, piece: bytes, /) -> None:
                hashing.update(piece)
                file.write(piece)

        yield Writer()
    digests[path.name] = hashing.hexdigest()
