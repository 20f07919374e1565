"""Tensor parallelism with vLLM: a model in several processes, the ranks, each with slots and tables of its own.

The engine reads and verifies a delta once, into host memory that the ranks map, and plans each rank's share of it. A
loader thread then has every rank pack its share and copy it into its slot. So slots, host cache, loads and evictions
are counted in one place, as for one device; a load has ended when it has on every rank, and fails if one fails.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch
from torch import Tensor

from deltastore.format.header import Header
from deltastore.format.manifest import Manifest
from server.deltas.fetcher import HostCache
from server.deltas.resident import ResidentDelta, Slot
from server.deltas.sharding import RankShare, Shard, shard_of
from server.engine.build import NUM_LOADS
from server.errors import EngineFailed
from server.metrics.metrics import ResidencyMetrics


class Ranks:
    """All ranks of a model: the tables in which a load enters a delta, and what a step has left behind.

    Args:
        llm: vLLM's LLMEngine.
        rows: `OwnRow` of the sequences whose tokens this process draws, by vLLM's ids.
        cache_bytes: bytes of the host cache.
        slot_bytes: bytes of the largest delta.
        metrics: of the host cache.
    """

    in_place = False

    def __init__(
        self,
        llm: Any,
        rows: Mapping[str, Any],
        cache_bytes: int,
        slot_bytes: int,
        metrics: ResidencyMetrics,
    ) -> None:
        from peraxis_vllm.ranks import end_step, open_rank

        num_ranks = int(llm.vllm_config.parallel_config.tensor_parallel_size)
        self.slot_bytes = slot_bytes
        self.host_cache = HostCache(
            cache_bytes, slot_bytes, NUM_LOADS, torch.device("cpu"), metrics, is_staged=True, is_shared=True
        )
        self._llm, self._rows, self._end_step = llm, rows, end_step
        # Of one load after the other.
        self._loading = threading.Lock()
        self._has_loaded = False
        self._lost = threading.Event()
        # In a directory that only this user can enter.
        with Listener(family="AF_UNIX", backlog=num_ranks) as listener:
            arguments = listener.address, self.host_cache.path
            self.shares: list[RankShare] = llm.collective_rpc(open_rank, args=arguments)
            connections = [listener.accept() for _ in self.shares]
        by_rank = {connection.recv(): connection for connection in connections}
        self._connections: list[Connection] = [by_rank[rank] for rank in range(num_ranks)]
        llm.model_executor.register_failure_callback(self._lost.set)

    def slots(self, num_slots: int) -> list[Slot]:
        """Return slots each of which stands for one of every rank."""
        memory = torch.empty(self.slot_bytes, dtype=torch.uint8, device="meta")
        return [Slot(index, memory) for index in range(num_slots)]

    def layout(self, header: Header, manifest: Manifest, digest: str) -> list[Shard]:
        """Plan every rank's share of an artifact. Raises as `shard_of`."""
        return [shard_of(header, manifest, digest, share) for share in self.shares]

    def adopt(self, shards: list[Shard], slot: Slot, section: Tensor) -> ResidentDelta:
        """Have every rank fill its slot, which no step reads, from a device section in the shared host memory.

        Raises:
            EngineFailed: a rank could not, or its process has ended.
        """
        begin = section.storage_offset()
        with self._loading:
            self._has_loaded = True
            try:
                for connection, shard in zip(self._connections, shards, strict=True):
                    connection.send((slot.index, begin, begin + len(section), shard))
                # All of them, so that none writes when the slot is given to another delta.
                errors = [connection.recv() for connection in self._connections]
            except (EOFError, OSError) as error:
                self._lost.set()
                raise EngineFailed("a process of the engine has ended: send the request again") from error
        for rank, problem in enumerate(errors):
            if problem is not None:
                raise EngineFailed(f"rank {rank} could not take it: {problem}")
        first = shards[0].layout
        return ResidentDelta(first.digest, slot, slot.generation, frozenset(first.vectors), first.num_added)

    def check_alive(self) -> None:
        """Raise EngineFailed if the process of a rank has ended."""
        if self._lost.is_set():
            raise EngineFailed("a process of vLLM has ended")

    def take_fault(self) -> str | None:
        """Give rows the logits of the last step, and return why its tokens of variants are wrong, if they are."""
        if not (self._rows or self._has_loaded):
            return None
        faults = []
        for fault, logits in self._llm.collective_rpc(self._end_step):
            faults.append(fault)
            for name, values in logits.items():
                if (row := self._rows.get(name)) is not None:
                    row.logits = torch.from_numpy(values)
        return next((fault for fault in faults if fault is not None), None)
