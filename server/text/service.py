"""The text service of an HTTP process: gives each request the tokenizer, chat template and defaults of its variant.

Event loop only. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from deltastore.errors import ArtifactError, NotServable
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.text.generation_config import base_generation, read_generation
from server.text.loaded_tokenizer import LoadedTokenizer
from server.text.local_tokenizer import LocalTokenizer
from server.text.staging import StagedVersion, Staging
from server.text.variant_text import TextFacts, VariantText
from server.text.variant_work import WORK_LIMITS, VariantWork
from server.text.worker_tasks import WORKER_MODULES, probe, with_tokenizer
from server.volume.calls import RegistryCalls
from server.workers.pool import WorkerPool

# Bound on the chat templates and other facts of variants that are kept.
CACHE_BYTES = 64 << 20
# Estimated size of one variant's facts without its template and token ids.
FACTS_BYTES = 16 << 10
TOKEN_ID_BYTES = 64
MAX_WORKS = 4096


class TextService:
    """Texts of the base and of variants. Facts of a variant are read once, and kept by digest within a bound of bytes.

    Args:
        base_dir: the base's checkpoint, whose files are trusted.
        calls: reads files of variants.
        pool: a pool of `text_pool`.
        embedding: the name of the base's input embedding.
        num_embeddings: its rows.
        several_tenants: one tenant has at most a part of what all share.

    Raises:
        NotServable: the base's tokenizer cannot be loaded, or its generation config cannot be obeyed.
    """

    def __init__(
        self,
        base_dir: Path,
        registry: Registry,
        calls: RegistryCalls,
        pool: WorkerPool,
        embedding: str | None,
        num_embeddings: int,
        several_tenants: bool = False,
    ) -> None:
        self._pool = pool
        self._embedding = embedding
        try:
            loaded = LoadedTokenizer.load(base_dir, str(base_dir))
            generation = base_generation(base_dir, num_embeddings)
        except ArtifactError as error:
            raise NotServable(str(error)) from error
        self._base = LocalTokenizer(loaded, several_tenants)
        self._base_facts = TextFacts(num_embeddings, generation, None, loaded.chat_template)
        self._staging = Staging(base_dir, registry, calls, several_tenants)
        self._facts: OrderedDict[str, TextFacts] = OrderedDict()
        self._reading = SingleFlight()
        self._works: OrderedDict[tuple[str, str], VariantWork] = OrderedDict()

    async def of(self, record: VersionRecord | None, tenant: str) -> VariantText:
        """Return the text of a version, or of the base; reads the version's object if its facts are not cached.

        Args:
            tenant: the tenant of the request, whose work it is.

        Raises:
            VariantNotFound: the object is gone.
            VariantQuarantined: the object is corrupt; it was quarantined.
            ArtifactError: the object is intact and its files cannot be used.
            InvalidRequest: its files need too much time or memory.
        """
        if record is None:
            work = self._work(tenant, None, "the base")
            return VariantText(self._base_facts, self._base, work, self._staging, None)
        work = self._work(tenant, record.digest, record.label)
        facts = self._facts.get(record.digest)
        if facts is None:
            # Read once per tenant and version: errors name the version, and the time is the tenant's.
            key = (tenant, record.label)
            facts = await self._reading.run(key, lambda: self._read(record, work))
            self._keep(record.digest, facts)
        else:
            self._facts.move_to_end(record.digest)
        return VariantText(facts, self._base, work, self._staging, record)

    def close(self) -> None:
        """Drop prompts that wait to be tokenized. The pool is closed by its owner."""
        self._base.close()

    def _work(self, tenant: str, digest: str | None, label: str) -> VariantWork:
        key = (tenant, label)
        if key not in self._works:
            self._works[key] = VariantWork(self._pool, (tenant, digest), label)
            if len(self._works) > MAX_WORKS:
                self._works.popitem(last=False)
        self._works.move_to_end(key)
        return self._works[key]

    async def _read(self, record: VersionRecord, work: VariantWork) -> TextFacts:
        async with self._staging.staged(record, work.share) as staged:
            shape = staged.shapes.get(self._embedding or "")
            num_embeddings = self._base_facts.num_embeddings if shape is None else shape[0]
            generation = self._base_facts.generation
            if staged.generation is not None:
                generation = await work.run(read_generation, staged.generation, record.label, num_embeddings)
            if staged.key is not None:
                await work.load(with_tokenizer, staged.key, staged.path, record.label, probe, ())
            return TextFacts(num_embeddings, generation, staged.key, self._template(staged, record.label))

    def _template(self, staged: StagedVersion, where: str) -> str | None:
        if staged.is_base_template:
            return self._base_facts.template
        try:
            return None if staged.template is None else staged.template.decode()
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{where}: its chat template is not UTF-8: upload it repaired") from error

    def _keep(self, digest: str, facts: TextFacts) -> None:
        self._facts[digest] = facts
        while len(self._facts) > 1 and sum(map(_num_bytes, self._facts.values())) > CACHE_BYTES:
            self._facts.popitem(last=False)


def text_pool(num_workers: int, several_tenants: bool = False) -> WorkerPool:
    """Return a pool of workers for a `TextService`; its owner closes it."""
    return WorkerPool(num_workers, WORK_LIMITS, WORKER_MODULES, several_tenants=several_tenants)


class SingleFlight:
    """Facts that are read now, by tenant and version, each once for all that wait for them.

    A task is cancelled when all callers that wait for it were cancelled.
    """

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[TextFacts]] = {}
        self._num_waiting: dict[tuple[str, str], int] = {}

    async def run(
        self, key: tuple[str, str], start: Callable[[], Coroutine[Any, Any, TextFacts]]
    ) -> TextFacts:
        """Return the result of the task of `key`; start it if none is under way. Its exception reaches every caller."""
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(start())
            self._num_waiting[key] = 0
        task = self._tasks[key]
        self._num_waiting[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._leave(key, task)

    def _leave(self, key: tuple[str, str], task: asyncio.Task[TextFacts]) -> None:
        if self._tasks.get(key) is not task:
            return
        self._num_waiting[key] -= 1
        if task.done() or not self._num_waiting[key]:
            task.cancel()
            del self._tasks[key], self._num_waiting[key]


def _num_bytes(facts: TextFacts) -> int:
    # A character has at most four bytes in memory.
    return FACTS_BYTES + TOKEN_ID_BYTES * facts.generation.num_ids + 4 * len(facts.template or "")
