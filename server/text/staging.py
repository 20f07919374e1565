"""Puts a version's tokenizer files where workers can load them. Event loop only; parses no file.

Files are read on a thread, from chunks of the stored object that match their digests.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deltastore.format.manifest import GENERATION_FILE
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.variant_files import read_files
from server.text.files import (
    TEMPLATE_FILE,
    check_sizes,
    content_key,
    read_tokenizer_files,
    tokenizer_files,
    without_template,
    write_tokenizer,
)
from server.volume.calls import RegistryCalls


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


class Staging:
    """Staged versions that are in use. Callers of one tenant that use a version at the same time share a copy.

    Raises:
        OSError: the base's tokenizer files cannot be read.
    """

    def __init__(self, base_dir: Path, registry: Registry, calls: RegistryCalls) -> None:
        self.base_dir = base_dir
        self._registry = registry
        self._calls = calls
        self._base_files = read_tokenizer_files(base_dir)
        # By tenant and label: errors name the version, and each tenant waits for its own share of the threads.
        self._tasks: dict[tuple[str, str], asyncio.Task[StagedVersion]] = {}
        self._num_users: dict[tuple[str, str], int] = {}

    @asynccontextmanager
    async def staged(self, record: VersionRecord, tenant: str) -> AsyncIterator[StagedVersion]:
        """Keep a version's files in a directory inside the `async with` block, for a tenant's request.

        Raises:
            VariantNotFound: the object is gone.
            VariantQuarantined: the object is corrupt; it was quarantined.
            ArtifactError: a file is too large.
            RegistryUnavailable: the registry cannot be read.
        """
        key = (tenant, record.label)
        if key not in self._tasks:
            reading = self._calls.run_long(partial(self._stage, record), tenant)
            self._tasks[key] = asyncio.create_task(reading)
            self._num_users[key] = 0
        task = self._tasks[key]
        self._num_users[key] += 1
        try:
            yield await asyncio.shield(task)
        finally:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._tasks[key], self._num_users[key]
                # A thread cannot be cancelled, so the files may only now be written.
                task.add_done_callback(_remove)

    def _stage(self, record: VersionRecord) -> StagedVersion:
        found = read_files(self._registry, record)
        check_sizes(found.files, record.label)
        own = tokenizer_files(found.files)
        generation = found.files.get(GENERATION_FILE)
        template = own.get(TEMPLATE_FILE)
        if without_template(own) in ({}, without_template(self._base_files)):
            return StagedVersion(None, None, template, not own, generation, found.shapes)
        directory = tempfile.TemporaryDirectory(prefix="peraxis-tokenizer-", ignore_cleanup_errors=True)
        write_tokenizer(own, self.base_dir, Path(directory.name))
        return StagedVersion(directory, content_key(own), None, False, generation, found.shapes)


def _remove(task: asyncio.Task[StagedVersion]) -> None:
    if not task.cancelled() and task.exception() is None and (directory := task.result().directory):
        directory.cleanup()
