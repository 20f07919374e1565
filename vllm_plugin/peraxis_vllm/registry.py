"""vLLM's own server on a registry: the `model` of a request names a variant, as NAME or NAME@VERSION.

`PERAXIS_VLLM_REGISTRY` names the registry, and `PERAXIS_VLLM_TENANT` the tenant whose variants are served. vLLM's
server asks a resolver for each name that it does not know; the resolver has every worker load the delta beside its
steps, and answers when it is in a slot. Every second it looks whether another version has become the active one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deltastore.base import Base
from deltastore.errors import BaseMismatch, NotServable, PeraxisError, VariantNotFound, VariantQuarantined
from deltastore.loader import Loader
from deltastore.registry import Registry
from deltastore.registry.claims import is_bucket
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.records import VersionRecord
from deltastore.user_cache import user_cache_dir
from peraxis_vllm import REGISTRY
from peraxis_vllm.manager import DeltaManager
from server.deltas.fetcher import Fetcher, HostCache
from server.deltas.residency import Residency
from server.deltas.resident import Rows, size_of_slot
from server.deltas.sharding import ShardTables
from server.metrics.metrics import EngineMetrics, ResidencyMetrics

log = logging.getLogger("vllm.peraxis")
TENANT, HEADROOM = "PERAXIS_VLLM_TENANT", "PERAXIS_VLLM_SLOT_HEADROOM"
# Between two looks at the active versions, and at a load.
FOLLOW_S, POLL_S = 1.0, 0.005
# The defaults of `peraxis serve`.
DEFAULT_TENANT, DEFAULT_HEADROOM, NUM_THREADS, CACHE_BYTES = "default", "1.15", 4, 50 * 10**9
# Loads at a time.
NUM_LOADS = 2
# A version's label and digest; the registry's names hold none of the separators.
PATH = re.compile(r"(?P<tenant>[^/]+)/(?P<name>[^@/]+)@(?P<version>[0-9]+)#[0-9a-f]+")


def location() -> str | None:
    """Return the registry that vLLM's own server is to use; None if it is not to use one."""
    return os.environ.get(REGISTRY)


def section_of_server(vllm_config: Any) -> dict[str, Any] | None:
    """Return the section of the configuration that `peraxis serve` would have set; None without LoRA or a registry.

    Raises:
        NotServable: the model cannot be served with deltas.
    """
    lora, parallel = vllm_config.lora_config, vllm_config.parallel_config
    if location() is None or lora is None:
        return None
    if parallel.pipeline_parallel_size > 1:
        raise NotServable(
            "deltas are not divided among stages of a pipeline: serve with --pipeline-parallel-size 1, and divide the "
            "model with --tensor-parallel-size"
        )
    return {
        "registry": location(),
        "num_slots": lora.max_loras,
        "slot_headroom": float(os.environ.get(HEADROOM, DEFAULT_HEADROOM)),
    }


def check_server(*, has_lora: bool, asks_resolvers: bool) -> None:
    """Refuse to start a server on a registry where every variant would be an unknown model.

    Args:
        has_lora: vLLM was started with `--enable-lora`.
        asks_resolvers: vLLM asks for models that it does not know.

    Raises:
        NotServable: says what is missing.
    """
    where = location() or ""
    if not has_lora:
        raise NotServable(f"{REGISTRY} is set: start vLLM with --enable-lora --max-loras N, or unset it")
    if not asks_resolvers:
        raise NotServable(f"{REGISTRY} is set: set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, too, or unset it")
    if not is_bucket(where) and not Path(where).is_dir():
        raise NotServable(
            f"{REGISTRY} is {where}, which is no directory: name the --registry of peraxis serve"
        )


def open_registry(where: str) -> Registry:
    """Open a registry without writing to it; a bucket's objects are kept in the user's cache directory."""
    cache = ObjectCache(user_cache_dir() / "registry", CACHE_BYTES) if is_bucket(where) else None
    return Registry.open(where, cache, make=False)


def path_of(record: VersionRecord) -> str:
    """Return the text that vLLM keeps as an adapter's path. Its prefix cache tells versions apart by it."""
    return f"{record.label}#{record.digest}"


def label_of(path: str) -> str | None:
    """Return the label of a version by its path; None for vLLM's own dummies, before it serves."""
    return path.partition("#")[0] if PATH.fullmatch(path) else None


class RegistryManager(DeltaManager):
    """Loads the deltas that vLLM's requests name into slots, and finds the slots of a step's rows.

    vLLM gives each adapter a number and bounds the different ones of a step by the number of slots.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, device: torch.device, own: dict[str, Any]) -> None:
        self._used: list[str] = []  # labels of the last step's versions
        super().__init__(model, vllm_config, device, own)
        self._registry = open_registry(own["registry"])
        self._base = Base.of(self.checkpoint)
        self._headroom = float(own["slot_headroom"])
        self._records: dict[int, VersionRecord] = {}  # by vLLM's number of the adapter
        self._errors: dict[str, PeraxisError] = {}  # of loads that failed, by label

    def begin(self) -> None:
        """Begin to take deltas. With several ranks, each reads them and cuts its own share."""
        is_cut = self.num_ranks > 1
        tables = ShardTables(self.tables, self.share(), self.device) if is_cut else self.tables
        metrics, whole = (
            ResidencyMetrics(EngineMetrics()),
            size_of_slot(self.checkpoint.shapes(), self._headroom),
        )
        is_staged = is_cut or self.device.type == "cuda"
        cache = HostCache(0, whole, NUM_LOADS, self.device, metrics, is_staged=is_staged)
        fetcher = Fetcher(Loader(self.device, NUM_THREADS), cache, self._registry, tables)
        self._residency = Residency(self.slots, fetcher, metrics, on_load_ended=lambda: None)

    def rows(self, name: str, num_rows: int, is_head: bool) -> Rows | None:
        """Return the rows that a layer computes, as `DeltaManager.rows`.

        Raises:
            NotServable: they fit no rows of a step with variants, whose tokens would be wrong without a word.
        """
        rows = super().rows(name, num_rows, is_head)
        if rows is None and self._used:
            raise NotServable(self.fault or name)
        return rows

    def slot_of(self, request: Any) -> int:
        """Return the slot of a LoRARequest's delta, which the running step holds; -1 for the base."""
        record = None if request is None else self._records.get(request.lora_int_id)
        delta = None if record is None else self._residency.find(record.label)
        return -1 if delta is None else delta.slot.index

    def begin_load(self, path: str) -> None:
        """Begin to load a version beside the steps, if a slot can be freed."""
        record = self._record(path)
        self._errors.pop(record.label, None)
        self._begin(record)

    def has_loaded(self, path: str) -> bool:
        """Return whether a load that was begun has ended, or none could begin: the first step then begins it."""
        self._poll()
        return not self._residency.is_loading(label_of(path) or "")

    def add_adapter(self, request: Any) -> bool:
        """Take an adapter.

        Raises:
            PeraxisError: its delta could not be loaded.
        """
        record = self._record(request.lora_path)
        if (error := self._errors.pop(record.label, None)) is not None:
            raise error
        self._records[request.lora_int_id] = record
        return True

    def remove_adapter(self, adapter: int) -> bool:
        return self._records.pop(adapter, None) is not None

    def list_adapters(self) -> set[int]:
        return set(self._records)

    def set_active_adapters(self, requests: Iterable[Any], mapping: Any) -> None:
        """Take the slots of a step's rows. Deltas that have left their slots meanwhile are loaded now."""
        if getattr(mapping.type, "name", "LANGUAGE") != "LANGUAGE":
            return
        ours = {request.lora_int_id: request.lora_path for request in requests if label_of(request.lora_path)}
        records = {number: self._record(path) for number, path in ours.items()}
        for label in self._used:
            self._residency.release(label)
        self._used = []
        for record in sorted(records.values(), key=lambda one: not self._residency.is_resident(one.label)):
            self._load_now(record)
            self._residency.acquire(record.label)
            self._used.append(record.label)
        slot_of = np.full(max(records, default=0) + 1, -1, dtype=np.int64)
        for number, record in records.items():
            delta = self._residency.find(record.label)
            assert delta is not None
            slot_of[number] = delta.slot.index
        for rows, numbers in ((self.tokens, mapping.index_mapping), (self.logits, mapping.prompt_mapping)):
            asked = np.asarray(numbers, dtype=np.int64)
            rows.set(slot_of[np.where(asked < len(slot_of), asked, 0)])

    def _record(self, path: str) -> VersionRecord:
        """Return the version of a path.

        Raises:
            VariantNotFound, VariantQuarantined: it is not served.
            BaseMismatch: it was made from another base.
        """
        known = next((record for record in self._records.values() if path_of(record) == path), None)
        if known is not None:
            return known
        if (found := PATH.fullmatch(path)) is None:
            raise VariantNotFound(
                f"{path!r} is no version of the registry: name a variant as the model of a request"
            )
        record = self._registry.resolve(found["tenant"], found["name"], int(found["version"]), owned=True)
        if path_of(record) != path:
            raise VariantNotFound(f"{record.label} has other bytes than it had: ask for it again")
        if not self._base.is_named(record.base_fingerprint):
            raise BaseMismatch(
                f"{record.label} was made from another base than {self._base.id}, which vLLM serves"
            )
        return record

    def _begin(self, record: VersionRecord) -> None:
        if self.device.type == "cuda":
            # A step that still reads the slot's old delta may be running.
            torch.cuda.synchronize(self.device)
        self._residency.retain(record)
        try:
            self._residency.load(record.label, record.tenant)
        finally:
            self._residency.forget(record.label)

    def _load_now(self, record: VersionRecord) -> None:
        while not self._residency.is_resident(record.label):
            if not self._residency.is_loading(record.label):
                self._begin(record)
            self._poll()
            if (error := self._errors.pop(record.label, None)) is not None:
                raise error
            time.sleep(POLL_S)

    def _poll(self) -> None:
        for load in self._residency.poll_loads():
            if load.error is not None:
                self._errors[load.version] = load.error


def register_server() -> None:
    """Let vLLM's own server find variants by their names. vLLM calls this in each of its processes."""
    from vllm import envs
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
    from vllm.v1.worker.worker_base import WorkerBase

    if hasattr(WorkerBase, "peraxis_begin_load"):
        return
    WorkerBase.peraxis_begin_load = lambda self, path: self.model_runner.lora_manager.begin_load(path)
    WorkerBase.peraxis_has_loaded = lambda self, path: self.model_runner.lora_manager.has_loaded(path)

    class RegistryResolver(LoRAResolver):  # type: ignore[misc]
        """Finds variants of the registry."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            return await follower.request_of(lora_name)

    follower = Follower(LoRARequest)
    LoRAResolverRegistry.register_resolver("peraxis", RegistryResolver())
    stock_init: Any = OpenAIServingModels.__init__

    def __init__(self: Any, engine_client: Any, *args: Any, **kwargs: Any) -> None:
        has_lora = engine_client.vllm_config.lora_config is not None
        check_server(has_lora=has_lora, asks_resolvers=envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)
        stock_init(self, engine_client, *args, **kwargs)
        follower.follow(self, engine_client)

    OpenAIServingModels.__init__ = __init__


class Follower:
    """Gives vLLM's server the variants that requests name, and follows their active versions. Event loop only.

    Args:
        make_request: vLLM's LoRARequest.
    """

    def __init__(self, make_request: Any) -> None:
        self._make_request = make_request
        self._tenant = os.environ.get(TENANT, DEFAULT_TENANT)
        self._registry: Registry | None = None
        self._engine: Any = None
        self._following: asyncio.Task[None] | None = None

    def follow(self, models: Any, engine: Any) -> None:
        """Begin to follow the active versions of the variants that `models` has."""
        self._engine = engine
        self._registry = open_registry(location() or "")
        self._following = asyncio.get_running_loop().create_task(self._follow(models))

    async def request_of(self, name: str) -> Any:
        """Return vLLM's request for a variant whose load has ended; None if it is not served, as the log says."""
        try:
            record = await asyncio.to_thread(self._resolve, name)
        except PeraxisError as error:
            log.warning("%s is not served: %s", name, error)
            return None
        await self._load(record)
        return self._make_request(name, 1, path_of(record))

    async def _load(self, record: VersionRecord) -> None:
        """Have every worker load a version. A failure is the answer to vLLM's call that adds it."""
        path = path_of(record)
        try:
            await self._engine.collective_rpc("peraxis_begin_load", args=(path,))
            while not all(await self._engine.collective_rpc("peraxis_has_loaded", args=(path,))):
                await asyncio.sleep(POLL_S)
        except Exception as error:  # noqa: BLE001  vLLM's, of a worker
            log.warning("%s cannot be loaded: %s", record.label, error)

    async def _follow(self, models: Any) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            for name, request in list(models.lora_requests.items()):
                if label_of(request.lora_path) is not None:
                    try:
                        await self._follow_one(models, name, request)
                    except Exception as error:  # noqa: BLE001  nothing may end the following of the others
                        log.warning("%s stays at %s: %s", name, label_of(request.lora_path), error)

    async def _follow_one(self, models: Any, name: str, request: Any) -> None:
        """Replace a variant's version if another one is active now; forget it if there is none."""
        async with models.lora_resolver_lock[name]:
            try:
                record = await asyncio.to_thread(self._resolve, name)
            except (VariantNotFound, VariantQuarantined):
                models.lora_requests.pop(name, None)
                log.info("%s is served no more", name)
                return
            if path_of(record) == request.lora_path:
                return
            await self._load(record)
            following = self._make_request(name, models.lora_id_counter.inc(1), path_of(record))
            await self._engine.add_lora(following)
            models.lora_requests[name] = following
            log.info("%s is %s now", name, record.label)

    def _resolve(self, name: str) -> VersionRecord:
        assert self._registry is not None
        base, separator, version = name.partition("@")
        if separator and not (version.isascii() and version.isdecimal()):
            raise VariantNotFound(f"{version!r} is no number of a version")
        return self._registry.resolve(self._tenant, base, int(version) if separator else None)
