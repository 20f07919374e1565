"""vLLM's calls that load and unload LoRA adapters, on variants: its bodies, replies, statuses and messages.

Controllers were written against `vllm/entrypoints/openai/models/serving.py` and `vllm/entrypoints/serve/lora/`. In two
places this server answers otherwise: a load that is repeated is answered with 200, as controllers expect of a call that
they repeat, and `lora_path` names an artifact instead of an adapter's directory.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shlex
import stat
import time
from collections.abc import Awaitable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from msgspec import Struct
from starlette.concurrency import run_in_threadpool

from deltastore.errors import PeraxisError, VariantNotFound, shown
from deltastore.registry.records import VersionRecord, check_names
from server.api.errors import error_body, failure_of
from server.api.json_io import JsonReply, json_body
from server.api.outputs import while_connected
from server.api.publishing import Destination, publish_file
from server.api.schemas import BASE
from server.api.service import AnyService, ChangesDep, Service, TenantDep, http_request_id_of
from server.errors import InvalidRequest
from server.publishing.directories import ARTIFACT_SUFFIX, open_path
from server.shared_state import AdapterChange, LoadedAdapter
from server.tenants.changes import VariantChanges
from server.tenants.tenant import Tenant

# vLLM's words for statuses in the field `type` of an error; its field `code` is the status.
TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    404: "NotFoundError",
    503: "ServiceUnavailableError",
}
SERVER_FAILED, CLIENT_FAILED = "InternalServerError", "BadRequestError"
# The supervisor keeps the path of each adapter.
MAX_PATH_BYTES = 1024
# The file by which peft tells an adapter.
PEFT_CONFIG = "adapter_config.json"
# How long an unload waits until no request uses the variant.
OUTCOME_S = 1.0

router = APIRouter(prefix="/v1")
log = logging.getLogger(__name__)


class LoadLoraBody(Struct, frozen=True):
    """The body of `POST /v1/load_lora_adapter`. As in vLLM, further fields are ignored."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoraBody(Struct, frozen=True):
    """The body of `POST /v1/unload_lora_adapter`. As in vLLM, further fields are ignored."""

    lora_name: str


class InvalidUserInput(InvalidRequest):
    """A body that vLLM refuses with this type."""


_load_body = json_body(LoadLoraBody)
_unload_body = json_body(UnloadLoraBody)


@router.post("/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(request: Request, service: AnyService, changes: ChangesDep) -> Response:
    """Load a variant and list it in `/v1/models`; publish the artifact at `lora_path` first, if there is one."""

    async def load() -> str:
        service.check_ready()
        body = await _load_body(request)
        return await while_connected(request, _load(service, changes, body))

    return await _answered(request, load())


@router.post("/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(request: Request, service: AnyService, tenant: TenantDep) -> Response:
    """List a variant in `/v1/models` no longer, and free its memory as soon as no request uses it."""

    async def unload() -> str:
        service.check_admitting()
        return await _unload(service, tenant, await _unload_body(request))

    return await _answered(request, unload())


async def _answered(request: Request, work: Awaitable[str]) -> Response:
    """Return the reply with a text, or vLLM's form of an error."""
    try:
        return PlainTextResponse(await work)
    except PeraxisError as error:
        failure = failure_of(error)
        ours = error_body(error, http_request_id_of(request))["error"]
        kind = TYPES.get(failure.status, SERVER_FAILED if failure.status >= 500 else CLIENT_FAILED)
        if isinstance(error, InvalidUserInput):
            kind = InvalidUserInput.__name__
        document = {"message": ours["message"], "type": kind, "param": ours["param"], "code": failure.status}
        retry = {} if failure.retry_after_s is None else {"Retry-After": str(failure.retry_after_s)}
        return JsonReply({"error": document}, failure.status, retry)


async def _load(service: Service, changes: VariantChanges, body: LoadLoraBody) -> str:
    tenant, name, path = changes.tenant, body.lora_name, body.lora_path
    if not name or not path:
        raise InvalidUserInput("Both 'lora_name' and 'lora_path' must be provided.")
    if name == BASE:
        raise InvalidUserInput(f"The lora adapter '{name}' conflicts with a served base model.", "lora_name")
    if len(path.encode(errors="surrogatepass")) > MAX_PATH_BYTES:
        raise InvalidUserInput(
            f"lora_path has more than {MAX_PATH_BYTES} bytes: give a shorter one", "lora_path"
        )
    check_names(tenant.name, name)
    record = await _registered(service, tenant, name)
    known = None if record is None else (await adapters_of(service, tenant)).get(name)
    if known is None or body.load_inplace:
        record = await _from_path(service, changes, body) or record
    elif known.path != path:
        raise InvalidUserInput(
            f"The lora adapter '{name}' has already been loaded from another path. "
            "If you want to load this one in its place, set 'load_inplace' to True.",
            "lora_path",
        )
    if record is None:
        raise VariantNotFound(
            f"Loading lora {name} failed: No adapter found for {path}: publish a variant of this name, "
            "or give the path of an artifact below the server's --lora-dir"
        )
    await service.load("load", record)
    if known is None or body.load_inplace:
        adapter = LoadedAdapter(tenant.name, name, path, time.time())
        await service.shared.change_adapters(AdapterChange(tenant.name, loaded=adapter))
        log.info("%s is loaded as a LoRA adapter", record.label)
    return f"Success: LoRA adapter '{name}' added successfully."


async def _registered(service: Service, tenant: Tenant, name: str) -> VersionRecord | None:
    """Return the active version of the tenant's own variant, or None if there is none."""
    try:
        record = await service.resolutions.resolve(tenant.name, name, owned=True)
    except VariantNotFound:
        return None
    service.check_base(record)
    return record


async def _from_path(service: Service, changes: VariantChanges, body: LoadLoraBody) -> VersionRecord | None:
    """Publish the artifact at the body's path and make it the active version; None if the path names no file."""
    file = await run_in_threadpool(open_artifact, body.lora_path, service.settings.lora_dir)
    if file is None:
        return None
    destination = Destination(changes, body.lora_name, activate=True)
    with file:
        publication = await publish_file(service, destination, file.fileno())
    record = publication.record
    if publication.active_version != record.version:
        # The variant had these bytes, and another version was active.
        await service.volume.run_long(
            partial(changes.promote, record.name, record.version), changes.tenant.name
        )
    return record


async def _unload(service: Service, tenant: Tenant, body: UnloadLoraBody) -> str:
    name = body.lora_name
    if not name:
        raise InvalidUserInput("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    in_memory = await _in_memory(service, tenant, name)
    if not in_memory and name not in await adapters_of(service, tenant):
        raise VariantNotFound(f"The lora adapter '{name}' cannot be found.")
    await service.shared.change_adapters(AdapterChange(tenant.name, unloaded=name))
    # The engine unloads when no request uses the variant. Errors mean that it has restarted, with empty memory.
    unloading = asyncio.gather(
        *(service.engine.load("unload", record) for record in in_memory), return_exceptions=True
    )
    await asyncio.wait({unloading}, timeout=OUTCOME_S)
    log.info("%s/%s is no longer loaded as a LoRA adapter", tenant.name, name)
    return f"Success: LoRA adapter '{name}' removed successfully."


async def _in_memory(service: Service, tenant: Tenant, name: str) -> list[VersionRecord]:
    """Return the versions of a tenant's own variant whose deltas are in memory; those of public ones serve others."""
    try:
        variant = await service.volume.run_long(
            partial(service.registry.variant, tenant.name, name), tenant.name
        )
    except VariantNotFound:
        return []
    labels = [record.label for record in variant.versions]
    states = await service.engine.residency_of(labels, tenant.name)
    return [record for record, state in zip(variant.versions, states, strict=True) if state.level != "disk"]


async def adapters_of(service: Service, tenant: Tenant) -> dict[str, LoadedAdapter]:
    """Return what a tenant has loaded with vLLM's call and not unloaded since, by name."""
    adapters = await service.shared.change_adapters(AdapterChange(tenant.name))
    return {adapter.name: adapter for adapter in adapters}


def open_artifact(lora_path: str, lora_dir: Path | None) -> BinaryIO | None:
    """Open the artifact that a path names: a file, or the only `.safetensors` file of a directory.

    Paths come from clients, so no symbolic link below the directory is followed.

    Args:
        lora_path: relative to `lora_dir`, or absolute and below it.
        lora_dir: the allowed directory; None allows no file.

    Returns:
        The open file, or None if a relative path names nothing, as the hub id that a controller sends may.

    Raises:
        InvalidRequest: the path leads out of the directory or through a symbolic link, or names no artifact.
    """
    parts = _parts_below(lora_path, lora_dir)
    if lora_dir is None:
        return None
    descriptor = _open_parts(lora_dir, parts, lora_path)
    if descriptor is None:
        if lora_path.startswith("/"):
            raise _refused_path(lora_path, "names nothing in the server's --lora-dir")
        return None
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        try:
            parts = (*parts, _only_artifact(os.listdir(descriptor), lora_path))
        finally:
            os.close(descriptor)
        descriptor = _open_parts(lora_dir, parts, lora_path)
        if descriptor is None:
            raise _refused_path(lora_path, "changed while it was read")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused_path(lora_path, "is neither a file nor a directory")
    return os.fdopen(descriptor, "rb")


def _parts_below(lora_path: str, lora_dir: Path | None) -> tuple[str, ...]:
    """Return the names of a path relative to the allowed directory, by its text alone."""
    parts = PurePosixPath(lora_path).parts
    if len(lora_path) > MAX_PATH_BYTES or "\0" in lora_path or ".." in parts:
        raise _refused_path(lora_path, "is no plain path: give one without '..'")
    if not lora_path.startswith("/"):
        return parts
    for directory in () if lora_dir is None else (lora_dir.absolute(), lora_dir.resolve()):
        if parts[: len(directory.parts)] == directory.parts:
            return parts[len(directory.parts) :]
    raise _refused_path(lora_path, "does not lie in a directory that the server allows with --lora-dir")


def _open_parts(lora_dir: Path, parts: tuple[str, ...], lora_path: str) -> int | None:
    """Return a descriptor of the file or directory, or None if there is none."""
    try:
        return open_path(lora_dir, parts)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return None
        if error.errno == errno.ELOOP:
            raise _refused_path(
                lora_path, "leads through a symbolic link: give the path of the file itself"
            ) from error
        raise _refused_path(lora_path, f"cannot be read: {error.strerror}") from error


def _only_artifact(names: list[str], lora_path: str) -> str:
    """Return the name of the artifact among the files of a directory."""
    if PEFT_CONFIG in names:
        adapter = shlex.quote(lora_path.rstrip("/"))
        raise _refused_path(
            lora_path,
            "is a PEFT adapter, and this server takes deltas. Make one of it: "
            f"peraxis compress --base BASE --finetune {adapter} --out {adapter}{ARTIFACT_SUFFIX}",
        )
    artifacts = [name for name in names if name.endswith(ARTIFACT_SUFFIX)]
    if len(artifacts) != 1:
        raise _refused_path(
            lora_path,
            f"is a directory with {len(artifacts)} {ARTIFACT_SUFFIX} files: give the path of one file",
        )
    return artifacts[0]


def _refused_path(lora_path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"lora_path {shown(lora_path)} {why}", "lora_path")
