"""One rank of a model that vLLM divides among processes: what `peraxis serve` has each of them do.

The functions that take a worker are called through vLLM's `collective_rpc`, between steps. Deltas come over a
connection of their own, so that a load waits for no step and no step for a load.
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from deltastore.threads import lower_thread_priority
from server.deltas.fetcher import mapped
from server.deltas.resident import Slot
from server.deltas.sharding import RankShare, ShardTables

# Names the row of a sequence in the sampling parameters that vLLM passes on.
ROW = "peraxis_row"
# Logits of the last step whose tokens the engine draws, by the names of their rows. All ranks have the same.
_held: dict[str, Tensor] = {}


class HeldLogits(AdapterLogitsProcessor):  # type: ignore[misc]
    """Keeps the logits of rows whose tokens the engine draws."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        name = (params.extra_args or {}).get(ROW)
        if name is None or get_tensor_model_parallel_rank():
            return None

        def hold(token_ids: list[int], logits: Tensor) -> Tensor:
            _held[name] = logits.clone()
            return logits

        return hold


def open_rank(worker: Any, address: str, path: str) -> RankShare:
    """Take deltas over a connection from now on, on a thread of its own, and return what this rank reads of them.

    Args:
        address: at which the engine takes connections.
        path: host memory of the engine, which holds the device sections of deltas.
    """
    manager = worker.model_runner.lora_manager
    share: RankShare = manager.share()
    connection, section = Client(address), mapped(path)
    connection.send(get_tensor_model_parallel_rank())
    tables = ShardTables(manager.tables, share, manager.device)
    arguments = connection, tables, manager.slots, section
    threading.Thread(target=_take_deltas, args=arguments, name="delta-shards", daemon=True).start()
    return share


def end_step(worker: Any) -> tuple[str | None, dict[str, np.ndarray]]:
    """Return why the last step's tokens of variants are wrong, if they are, and the logits that it has kept."""
    logits = {name: row.float().cpu().numpy() for name, row in _held.items()}
    _held.clear()
    fault: str | None = worker.model_runner.lora_manager.take_fault()
    return fault, logits


def _take_deltas(connection: Connection, tables: ShardTables, slots: list[Slot], section: Tensor) -> None:
    """Fill slots until the engine ends. The answer to each is the error, or None."""
    lower_thread_priority()
    while True:
        try:
            index, begin, end, shard = connection.recv()
        except EOFError:
            return
        error = None
        try:
            tables.adopt(shard, slots[index], section[begin:end])
        except Exception as problem:  # noqa: BLE001  the load fails, and the rank goes on
            error = f"{type(problem).__name__}: {problem}"
        connection.send(error)
