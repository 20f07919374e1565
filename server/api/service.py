"""The state that routes share: settings, registry, metrics, the engine, and the workers for tenants' input.

Owns the life of one HTTP process: starting, draining, closed. Defines no route.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

from fastapi import Depends, Request

from deltastore.base import Base
from deltastore.errors import BaseMismatch, PeraxisError, shown
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord, is_name
from deltastore.threads import IDLE_NICENESS
from server.api.downloads import Downloads
from server.api.json_io import ParsingTurns
from server.errors import Draining, Forbidden, InvalidRequest, QueueFull
from server.fairness import FairBudget
from server.grammar.matching import WORKER_MODULES
from server.grammar.service import GrammarService
from server.metrics.exposition import RegistryScrapes
from server.metrics.metrics import FrontendMetrics
from server.protocol.engine_client import EngineLink
from server.protocol.messages import LoadAction
from server.publishing.checks import ArtifactChecks
from server.registry_calls import BackgroundThreads, RegistryCalls, probe
from server.resolutions import Resolutions
from server.settings import Settings
from server.shared_state import SharedState
from server.tenants.admission import Admissions
from server.tenants.changes import AuditLog, Auditor, VariantChanges
from server.tenants.keys import KeyStore
from server.tenants.limits import LimitsDirectory
from server.tenants.loop_ledger import LoopLedger
from server.tenants.stored import StoredCounts
from server.tenants.tenant import Caller, Tenant
from server.text.service import TextService, text_pool

if TYPE_CHECKING:
    from server.tracing import RequestSpans

log = logging.getLogger(__name__)

POLL_S = 0.02
# Bound on bytes of replies that clients have not read, beyond what each connection may leave unread for a second.
MAX_UNSENT_BYTES = 256 << 20
UPLOAD_THREADS = 8
# Bytes of uploads that are not published yet, over those of the largest one; a tenant alone may have half.
MAX_UNFINISHED = 4
# Calls to load, unload, pin and unpin without an outcome; a tenant alone may have half. They are twice as many as wait
# in the engine, so that a tenant all of whose loads wait for slots can unpin.
MAX_LOAD_CALLS = 512
# Processes for tenants' tokenizers and templates: one per core within these bounds. One variant has at most half.
MIN_TEXT_WORKERS, MAX_TEXT_WORKERS = 2, 4

P = ParamSpec("P")
R = TypeVar("R")


class Service:
    """State of one HTTP process. Use it on the event loop only.

    Args:
        engine: connected by the owner; requests are refused until the engine is ready.
        shared: the state that all HTTP processes of the server share, or the way to it.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        metrics: FrontendMetrics,
        engine: EngineLink,
        shared: SharedState,
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.volume = RegistryCalls(settings.registry, partial(probe, registry))
        self.resolutions = Resolutions(registry, self.volume, self._is_in_memory)
        self.registry_scrapes = RegistryScrapes(registry, self.volume)
        self.keys = KeyStore(settings.registry, calls=self.volume)
        self.audit_log = AuditLog(settings.registry, must_exist=True)
        self.metrics = metrics
        self.loop_ledger = LoopLedger(metrics.tenant_seconds_total)
        self.engine = engine
        self.spans: RequestSpans | None = None
        if settings.otlp_endpoint is not None:
            # Deferred: OpenTelemetry is an extra, and takes time to import.
            from server.tracing import open_spans

            self.spans = open_spans(settings.otlp_endpoint, f"{engine.identity.decode()}-{os.getpid()}")
        self.admissions = Admissions(shared if settings.auth == "keys" else None, engine.identity.decode())
        self.stored = StoredCounts(registry, self.volume)
        self.started_at = time.time()  # seconds since 1970
        self.num_in_flight = 0  # HTTP requests
        self.unsent = FairBudget(MAX_UNSENT_BYTES, "bytes of replies that are not read")
        self.unfinished = FairBudget(
            MAX_UNFINISHED * settings.max_upload_bytes, "bytes of unfinished uploads"
        )
        self._load_calls = FairBudget(MAX_LOAD_CALLS, "calls to load, unload, pin and unpin variants")
        self.num_uploads: Counter[str] = Counter()  # under way, by tenant
        self.artifact_checks = ArtifactChecks(settings.base)
        self.draining = False
        self.parsing = ParsingTurns(self.loop_ledger)
        self.downloads = Downloads(self.unsent)
        self.shared = shared
        self._background = BackgroundThreads(UPLOAD_THREADS, "upload", IDLE_NICENESS)
        num_text_workers = min(max(os.cpu_count() or 1, MIN_TEXT_WORKERS), MAX_TEXT_WORKERS)
        # They try new grammars too, and so share the template of the workers that match them.
        self._text_workers = text_pool(num_text_workers, WORKER_MODULES, settings.auth == "keys")
        self.grammars = GrammarService(engine, self._text_workers)
        self._text: TextService | None = None
        self._kept: set[asyncio.Task[Any]] = set()
        self._warming: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, base: Base) -> None:
        """Load the tokenizer of the engine's base, and begin to start the workers for those of tenants.

        The service is ready before the workers are: a task that comes earlier starts one itself.

        Raises:
            NotServable: the base's tokenizer cannot be loaded.
        """
        self._watching = asyncio.create_task(self.volume.watch())
        pool, embedding = self._text_workers, base.embedding
        num_embeddings = base.shapes[embedding or ""][0]
        self._text = await asyncio.to_thread(
            TextService,
            *(self.settings.base, self.registry, self.volume, pool, embedding, num_embeddings),
            several_tenants=self.settings.auth == "keys",
        )
        self._warming = asyncio.create_task(self._warm())
        await self._remove_abandoned_uploads()

    @property
    def text(self) -> TextService:
        """The tokenizers; raises QueueFull until they are loaded."""
        if self._text is None:
            raise QueueFull("the server is starting: try again when /ready answers 200")
        return self._text

    @cached_property
    def limits(self) -> LimitsDirectory:
        """The limits as files, read at the first use; the rate limiter goes by those that its own process has read."""
        return LimitsDirectory(self.settings.registry, self.settings.default_limits, self.volume)

    async def run_in_background(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a long computation on a low-priority thread. A cancelled caller still waits until it has ended."""
        return await self._background.run(function, *args, **kwargs)

    def in_background(self, manager: AbstractContextManager[R]) -> AbstractAsyncContextManager[R]:
        """Enter and leave a context manager on low-priority threads."""
        return self._background.entered(manager)

    def keep(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Go on with work that no request may wait for, until the service closes."""
        task = asyncio.create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)
        return task

    def check_admitting(self) -> None:
        """Raise Draining once shutdown has begun."""
        if self.draining:
            raise Draining("the server is shutting down: send the request to another replica")

    def check_ready(self) -> None:
        """Raise Draining, QueueFull or EngineRestarted unless requests for tokens are admitted."""
        self.check_admitting()
        self.engine.check_ready()
        _ = self.text

    def is_ready(self) -> bool:
        """Return whether requests for tokens are admitted."""
        try:
            self.check_ready()
        except PeraxisError:
            return False
        return True

    def check_base(self, record: VersionRecord) -> None:
        """Raise BaseMismatch if a version was made from another base than this server runs."""
        base = self.engine.facts.base
        if not base.is_named(record.base_fingerprint):
            raise BaseMismatch(
                f"version {record.version} of {record.name!r} was made from another base than {base.id}, which this "
                "server runs: send the request to a server with its base, or compress it again from this one"
            )

    def load(
        self, action: LoadAction, record: VersionRecord, max_pinned: int | None = None
    ) -> asyncio.Future[None]:
        """Have the engine load a tenant's own version, as `EngineLink.load` does.

        Raises:
            QueueFull: too many such calls of the tenant have no outcome yet.
        """
        self._load_calls.take(record.tenant, 1)
        outcome = self.engine.load(action, record, max_pinned)
        outcome.add_done_callback(lambda _: self._load_calls.give_back(record.tenant, 1))
        return outcome

    async def _is_in_memory(self, record: VersionRecord, tenant: str) -> bool:
        (state,) = await self.engine.residency_of((record.label,), tenant)
        return state.level != "disk"

    async def _remove_abandoned_uploads(self) -> None:
        """Remove what processes that were killed had received, of this server or of another one."""
        try:
            await self.volume.run_long(self.registry.remove_abandoned_uploads, None)
        except PeraxisError as error:
            log.warning("abandoned uploads are left to `peraxis registry gc`: %s", error)

    async def _warm(self) -> None:
        try:
            await self._text_workers.warm()
        except PeraxisError as error:
            log.warning("the workers for tenants' tokenizers start with the first tasks: %s", error)

    async def close(self) -> None:
        """Refuse new requests, give the others `shutdown_timeout` seconds to end, and end the rest."""
        self.draining = True
        deadline = time.monotonic() + self.settings.shutdown_timeout
        while self.num_in_flight and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        self.engine.disconnect(Draining("the server has shut down: send the request again"))
        await asyncio.gather(*self._kept, return_exceptions=True)
        await self.artifact_checks.close()
        for task in (self._warming, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        await self._text_workers.close()
        await self.grammars.close()
        if self._text is not None:
            self._text.close()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)


async def service_of(request: Request) -> Service:
    """Return the service of the request's application."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


async def admitting_service(service: Annotated[Service, Depends(service_of)]) -> Service:
    """Return the service; raise Draining once shutdown has begun."""
    service.check_admitting()
    return service


async def caller_of(request: Request) -> Caller:
    """Return the caller of a request, which `access.authorize` has found."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


async def tenant_of(request: Request, caller: Annotated[Caller, Depends(caller_of)]) -> Tenant:
    """Return the tenant that a request acts for: the caller's, or the one that an administrator names in `?tenant=`."""
    name = request.query_params.get("tenant", caller.tenant.name)
    if not is_name(name):
        raise InvalidRequest(f"tenant: {shown(name)} is not the name of a tenant", "tenant")
    tenant = Tenant(name)
    if tenant != caller.tenant and not caller.has("admin"):
        raise Forbidden("only a key with the role admin acts for other tenants: leave `tenant` out")
    return tenant


def http_request_id_of(request: Request) -> str:
    """Return the id that the middleware assigned to the request."""
    return str(request.scope["state"]["request_id"])


async def auditor_of(
    request: Request,
    service: Annotated[Service, Depends(service_of)],
    caller: Annotated[Caller, Depends(caller_of)],
) -> Auditor:
    """Return the author of a request's audit lines."""
    return Auditor(service.audit_log, caller.key_id, http_request_id_of(request))


async def changes_of(
    service: Annotated[Service, Depends(service_of)],
    tenant: Annotated[Tenant, Depends(tenant_of)],
    caller: Annotated[Caller, Depends(caller_of)],
    auditor: Annotated[Auditor, Depends(auditor_of)],
) -> VariantChanges:
    """Return the changes that a request makes to its tenant's variants."""
    return VariantChanges(service.registry, tenant, auditor, caller.has(service.settings.public_names))


# AnyService also serves requests during shutdown; ServiceDep refuses them with Draining.
AnyService = Annotated[Service, Depends(service_of)]
ServiceDep = Annotated[Service, Depends(admitting_service)]
CallerDep = Annotated[Caller, Depends(caller_of)]
TenantDep = Annotated[Tenant, Depends(tenant_of)]
AuditorDep = Annotated[Auditor, Depends(auditor_of)]
ChangesDep = Annotated[VariantChanges, Depends(changes_of)]
