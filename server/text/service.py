"""Text of variants in an HTTP process: their staged files, tokenizers, chat templates and defaults. Event loop only.

Staged files are written on a thread, from chunks of the stored object that match their digests.

The base's tokenizer runs in this process. A variant's own tokenizer, and every chat template, run in worker processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, TypeVarTuple

from deltastore.errors import ArtifactError, NotServable
from deltastore.format.files import GENERATION_FILE, is_tokenizer_file
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.verified_object import Sink, read_files
from server.fairness import FairCache, FairLimiter, Share, tenant_of
from server.protocol.rules import BiasTable
from server.registry_calls import RegistryCalls
from server.tenants.loop_ledger import timed_on_thread
from server.text.answer_form import RenderedChat, render_prompt
from server.text.chat_template import DEFAULT, Conversation, choose
from server.text.detokenizer import NewText, NewTokens
from server.text.generation_config import Generation, base_generation, read_generation
from server.text.tokenizer import NO_BASE_TEMPLATE, NO_TEMPLATE, LoadedTokenizer, TokenText
from server.text.worker_tasks import (
    MODEL_CONFIG_FILE,
    TEMPLATE_FILE,
    WORKER_MODULES,
    NotLoaded,
    check_size,
    content_key,
    digests_of,
    is_template,
    probe,
    read_tokenizer_files,
    with_tokenizer,
    without_templates,
    write_file,
)
from server.workers.pool import WORK_LIMITS, VariantWork, WorkerPool

# Versions at a time, each with at most 182 MiB in files: they fit into a temporary directory of 1 GB, beside those of
# two uploads that are checked.
NUM_STAGED = 3
MAX_WAITING_READS = 64


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version's files, as far as they differ from the base's.

    Args:
        directory: the tokenizer files and the base's model config; None if only the template may differ.
        key: the name of the tokenizer files' content; None if the base's tokenizer serves.
        templates: files of the chat templates of a version that the base's tokenizer serves.
        has_base_templates: the chat templates are the base's, whatever `templates` says.
        generation: the generation config; None if it is the base's.
        shapes: shapes of tensors that differ from the base's.
    """

    directory: tempfile.TemporaryDirectory[str] | None
    key: str | None
    templates: Mapping[str, bytes]
    has_base_templates: bool
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
        self._base_digests = digests_of(without_templates(read_tokenizer_files(base_dir)))
        self._limiter = FairLimiter(
            NUM_STAGED, 1, MAX_WAITING_READS, NUM_STAGED - 1 if several_tenants else None
        )
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
                if is_template(name) or not is_tokenizer_file(name):
                    return None
                return _written(path / name, digests)

            found = read_files(self._registry, record, take)
            templates = {name: content for name, content in found.files.items() if is_template(name)}
            generation = found.files.get(GENERATION_FILE)
            if digests in ({}, self._base_digests):
                directory.cleanup()
                has_base_templates = not templates and not digests
                return StagedVersion(None, None, templates, has_base_templates, generation, found.shapes)
            for name, content in templates.items():
                write_file(path, name, content)
            digests |= digests_of(templates)
            shutil.copy(self.base_dir / MODEL_CONFIG_FILE, path)
            return StagedVersion(directory, content_key(digests), {}, False, generation, found.shapes)
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


# A shorter text takes less time than a thread does to start on it.
SHORT_CHARS = 2000
NUM_THREADS = 2
MAX_WAITING_CALLS = 256

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LocalTokenizer:
    """Asynchronous calls of a loaded tokenizer whose files are trusted. Event loop only.

    Args:
        several_tenants: one tenant has at most all threads but one, whatever the number of its variants.
    """

    def __init__(self, loaded: LoadedTokenizer, several_tenants: bool = False) -> None:
        self.loaded = loaded
        self._limiter = FairLimiter(
            NUM_THREADS, 1, MAX_WAITING_CALLS, NUM_THREADS - 1 if several_tenants else None
        )
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    async def run(
        self, share: Share, num_chars: int, function: Callable[[LoadedTokenizer, *Ts], T], *args: *Ts
    ) -> T:
        """Call a function of the tokenizer; raises what it does, and QueueFull.

        Args:
            share: the owner of the work.
            num_chars: of the text that it is about.
        """
        if num_chars <= SHORT_CHARS:
            return function(self.loaded, *args)
        started = asyncio.Event()
        work = asyncio.create_task(self._run_on_thread(started, share, partial(function, self.loaded, *args)))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # A thread cannot be cancelled, and keeps its permit until it is done.
            if not started.is_set():
                work.cancel()
            # Read, so that asyncio does not log an error whose client has left.
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def _run_on_thread(self, started: asyncio.Event, share: Share, call: Callable[[], T]) -> T:
        async with self._limiter.permit(share):
            started.set()
            return await asyncio.get_running_loop().run_in_executor(self._threads, timed_on_thread(call))

    def close(self) -> None:
        """Drop texts that wait for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)


CHARS_PER_TOKEN = 4
# Names the content of the base's tokenizer.
BASE_KEY = "base"


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Facts of a variant's text that do not depend on the tenant.

    Args:
        num_embeddings: rows of the embedding; token ids are below it.
        key: the name of its own tokenizer's content; None if the base's tokenizer serves.
        templates: the chat templates by name, if the base's tokenizer serves.
    """

    num_embeddings: int
    generation: Generation
    key: str | None
    templates: Mapping[str, str]


class VariantText:
    """Encodes and decodes with a variant's tokenizer, chat template and generation defaults.

    All methods raise InvalidRequest if the variant's files need too much time or memory, QueueFull if too much work of
    the tenant on this variant waits, and VariantNotFound or VariantQuarantined if its files are needed and gone.
    """

    def __init__(
        self,
        facts: TextFacts,
        base: LocalTokenizer,
        work: VariantWork,
        staging: Staging,
        record: VersionRecord | None,
    ) -> None:
        self.num_embeddings = facts.num_embeddings
        self.generation = facts.generation
        self._facts = facts
        self._base = base
        self._work = work
        self._staging = staging
        self._record = record

    async def encode(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            add_special_tokens: those that the tokenizer adds to a text are among them.

        Raises:
            InvalidRequest: the prompt has more than `max_tokens` tokens. A much longer one is not tokenized.
        """
        return await self._run(
            len(text), LoadedTokenizer.encode, text, max_tokens, add_special_tokens, "prompt"
        )

    async def render_chat(self, conversation: Conversation, max_tokens: int) -> RenderedChat:
        """Return the token ids of a conversation rendered by the chat template, and the form of its answer.

        Raises:
            InvalidRequest: there is no chat template, it refuses the messages, or they have too many tokens.
        """
        if self._facts.key is not None:
            return await self._in_worker(LoadedTokenizer.render_chat, conversation, max_tokens)
        none = NO_BASE_TEMPLATE if self._record is None else NO_TEMPLATE
        template = choose(self._facts.templates, conversation, none)
        base = self._base.loaded
        response_template = base.response_template
        prompt = await self._work.run(
            render_prompt, template, conversation, base.template_variables, response_template
        )
        text, adds_special = prompt.text, conversation.add_special_tokens
        ids = await self._run(len(text), LoadedTokenizer.encode, text, max_tokens, adds_special, "messages")
        return RenderedChat(ids, prompt.form.with_special(base.special_tokens))

    async def banned(self, words: tuple[str, ...]) -> BiasTable:
        """Return the table of words that must not come; raises as `LoadedTokenizer.banned`."""
        # Each is tokenized behind a space and behind other text, too.
        return await self._run(3 * sum(map(len, words)), LoadedTokenizer.banned, words)

    async def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return await self._run(_num_chars(ids), LoadedTokenizer.decode, ids, skip_special_tokens)

    async def decode_prompt(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of a prompt without an incomplete character at its end, which its answer shows."""
        return await self._run(_num_chars(ids), LoadedTokenizer.decode_prompt, ids, skip_special_tokens)

    async def token_texts(self, ids: list[int], begins: bool = False) -> list[TokenText]:
        """Return the own text of each token, as log-probabilities show it.

        Args:
            begins: as the text begins with it; otherwise as it stands behind other text.
        """
        return await self._run(_num_chars(ids), LoadedTokenizer.token_texts, ids, begins)

    async def decode_streams(self, new: list[NewTokens]) -> list[NewText]:
        """Decode the new tokens of many sequences in one call; the results are in the order of `new`."""
        # The end of a prompt is decoded once, before the first tokens of its sequence.
        num_chars = sum(
            _num_chars(tokens.ids) + (_num_chars(tokens.window.ids) if tokens.window.num_shown is None else 0)
            for tokens in new
        )
        return await self._run(num_chars, LoadedTokenizer.decode_streams, new)

    async def token_strings(self, ids: list[int]) -> list[str]:
        """Return each token as the vocabulary has it."""
        return await self._run(_num_chars(ids), LoadedTokenizer.token_strings, ids)

    async def _run(self, num_chars: int, function: Callable[[LoadedTokenizer, *Ts], T], *args: *Ts) -> T:
        """Call a function of the variant's tokenizer, which may be the base's."""
        if self._facts.key is None:
            return await self._base.run(self._work.share, num_chars, function, *args)
        return await self._in_worker(function, *args)

    @property
    def share(self) -> Share:
        """The tenant and the digest, whose work has a queue of its own."""
        return self._work.share

    @property
    def label(self) -> str:
        """The variant's name in error messages."""
        return self._work.label

    @property
    def tokenizer_key(self) -> str:
        """The name of the content of the tokenizer that serves this variant."""
        return self._facts.key or BASE_KEY

    async def run_in(
        self,
        work: VariantWork | None,
        warm: Callable[[LoadedTokenizer], T],
        cold: Callable[[LoadedTokenizer], T],
    ) -> T:
        """Call ``warm(tokenizer)`` in a worker, or ``cold(tokenizer)`` with more time if `warm` raises NotLoaded.

        The base's tokenizer, too, is loaded in the worker. Raises as the functions and `VariantWork` do.

        Args:
            work: the share of a pool; None is that of the variant's other text.
        """
        work = work or self._work
        key, label, owner = self.tokenizer_key, self._work.label, tenant_of(self._work.share)
        try:
            return await work.run(with_tokenizer, key, None, owner, label, warm, ())
        except NotLoaded:
            if self._facts.key is None or self._record is None:
                return await work.load(with_tokenizer, key, self._staging.base_dir, owner, label, cold, ())
            async with self._staging.staged(self._record, self._work.share) as staged:
                return await work.load(with_tokenizer, key, staged.path, owner, label, cold, ())

    async def _in_worker(self, function: Callable[[LoadedTokenizer, *Ts], T], *args: *Ts) -> T:
        """Call a function of the variant's own tokenizer; send its files to a worker that lacks them."""
        key, record = self._facts.key, self._record
        assert key is not None
        assert record is not None
        owner, label = tenant_of(self._work.share), self._work.label
        try:
            return await self._work.run(with_tokenizer, key, None, owner, label, function, args)
        except NotLoaded:
            async with self._staging.staged(record, self._work.share) as staged:
                return await self._work.load(with_tokenizer, key, staged.path, owner, label, function, args)


def _num_chars(ids: Sized) -> int:
    """Return about how many characters tokens have."""
    return CHARS_PER_TOKEN * len(ids)


# Bound on the chat templates and other facts of variants that are kept.
CACHE_BYTES = 64 << 20
# Estimated size of one variant's facts without its template and token ids.
FACTS_BYTES = 16 << 10
MAX_WORKS = 4096


class TextService:
    """Texts of the base and of variants. Facts of a variant are read once, and kept by digest within a bound of bytes.

    They count for the tenant that had them read, which loses its own if it holds more than others.

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
        self._base_facts = TextFacts(num_embeddings, generation, None, loaded.chat_templates)
        self._staging = Staging(base_dir, registry, calls, several_tenants)
        self._facts: FairCache[str, TextFacts] = FairCache(CACHE_BYTES)
        self._reading = SingleFlight()
        self._works: FairCache[tuple[str, str], VariantWork] = FairCache(MAX_WORKS)

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
            self._facts.put(record.digest, facts, tenant, _num_bytes(facts))
        return VariantText(facts, self._base, work, self._staging, record)

    def close(self) -> None:
        """Drop prompts that wait to be tokenized. The pool is closed by its owner."""
        self._base.close()

    def _work(self, tenant: str, digest: str | None, label: str) -> VariantWork:
        key = (tenant, label)
        work = self._works.get(key)
        if work is None:
            work = VariantWork(self._pool, (tenant, digest), label)
            self._works.put(key, work, tenant)
        return work

    async def _read(self, record: VersionRecord, work: VariantWork) -> TextFacts:
        async with self._staging.staged(record, work.share) as staged:
            shape = staged.shapes.get(self._embedding or "")
            num_embeddings = self._base_facts.num_embeddings if shape is None else shape[0]
            generation = self._base_facts.generation
            if staged.generation is not None:
                generation = await work.run(read_generation, staged.generation, record.label, num_embeddings)
            if staged.key is not None:
                owner = tenant_of(work.share)
                await work.load(with_tokenizer, staged.key, staged.path, owner, record.label, probe, ())
            return TextFacts(num_embeddings, generation, staged.key, self._templates(staged, record.label))

    def _templates(self, staged: StagedVersion, where: str) -> Mapping[str, str]:
        if staged.has_base_templates:
            return self._base_facts.templates
        try:
            return {
                DEFAULT if name == TEMPLATE_FILE else PurePosixPath(name).stem: content.decode()
                for name, content in staged.templates.items()
            }
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{where}: its chat template is not UTF-8: upload it repaired") from error


def text_pool(
    num_workers: int, modules: tuple[str, ...] = WORKER_MODULES, several_tenants: bool = False
) -> WorkerPool:
    """Return a pool of workers for a `TextService`; its owner closes it."""
    return WorkerPool(num_workers, WORK_LIMITS, modules, several_tenants=several_tenants)


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
    num_chars = sum(map(len, facts.templates.values()))
    return FACTS_BYTES + facts.generation.num_bytes + 4 * num_chars
