"""Loads into the slots of several ranks, each on a thread that stands for its process: filled, failed, and lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.engine import publish
from deltastore.format.artifact import Artifact
from deltastore.loader import Loader
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.deltas.fetcher import Fetcher
from server.deltas.residency import FinishedLoad, Residency
from server.deltas.resident import DeltaTables, Part, ReadTensors, arena
from server.deltas.sharding import WHOLE, Cut, RankShare
from server.engine.vllm_ranks import Ranks
from server.errors import EngineFailed
from server.metrics.metrics import EngineMetrics, ResidencyMetrics
from tests.server.helpers.residency import MATRIX, NORM, SLOT_BYTES, WAIT_S, write_artifact

CPU = torch.device("cpu")
NUM_SLOTS, NUM_RANKS = 2, 2
RANK = threading.local()


class Worker:
    """Stands for vLLM's worker of one rank, whose model has a matrix's rows and a norm."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank = rank
        self.fault: str | None = None
        with Artifact.open(path) as artifact:
            num_rows, _ = artifact.manifest.tensors[MATRIX].shape
        self.cut = Cut(((rank * num_rows // NUM_RANKS, (rank + 1) * num_rows // NUM_RANKS),))
        self.tables = DeltaTables()
        self.parts = (Part(MATRIX, self.cut.num_rows),)
        self.tables.add_part(self.parts[0])
        self.tables.add_vector(NORM, torch.zeros(NORM_LENGTH))
        self.tables.allocate(NUM_SLOTS, CPU)
        self.slots = arena(NUM_SLOTS, SLOT_BYTES, CPU)
        self.device = CPU
        self.model_runner = SimpleNamespace(lora_manager=self)

    def share(self) -> RankShare:
        read = ReadTensors(self.parts, frozenset({NORM}), (), 0)
        return RankShare(self.parts, (self.cut,), ((NORM, WHOLE),), read, 0, SLOT_BYTES)

    def take_fault(self) -> str | None:
        return self.fault

    def norm(self, slot: int) -> Tensor:
        return self.tables.vectors[0].table[1 + slot]


NORM_LENGTH = 1000


@dataclass
class Llm:
    """Stands for vLLM's engine."""

    workers: list[Worker]
    callbacks: list[Any] = field(default_factory=list)

    @property
    def vllm_config(self) -> Any:
        return SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=len(self.workers)))

    @property
    def model_executor(self) -> Any:
        return SimpleNamespace(register_failure_callback=self.callbacks.append)

    def collective_rpc(self, function: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        answers = {}
        # The last one first, as nothing orders ranks.
        for worker in reversed(self.workers):
            RANK.number = worker.rank
            answers[worker.rank] = function(worker, *args)
        return [answers[worker.rank] for worker in self.workers]


@dataclass
class Harness:
    """A residency over two ranks, and a registry with variants of random content."""

    ranks: Ranks
    residency: Residency
    records: list[VersionRecord]
    paths: list[Path]
    llm: Llm
    ended: threading.Event
    rows: dict[str, Any]

    def load(self, record: VersionRecord) -> FinishedLoad:
        self.residency.retain(record)
        assert self.residency.load(record.label, record.tenant)
        assert self.ended.wait(WAIT_S)
        self.ended.clear()
        (finished,) = self.residency.poll_loads()
        self.residency.forget(record.label)
        return finished


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    stand_ins: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: RANK.number},
        "vllm.v1.sample.logits_processor": {"AdapterLogitsProcessor": object},
    }
    for name, members in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "peraxis_vllm.ranks", raising=False)
    registry, paths = Registry(tmp_path / "registry"), []
    for number in range(3):
        paths.append(tmp_path / f"{number}.safetensors")
        write_artifact(paths[-1], number, NORM_LENGTH)
    records = [publish(registry, path, f"v{number}") for number, path in enumerate(paths)]
    llm, metrics = (
        Llm([Worker(rank, paths[0]) for rank in range(NUM_RANKS)]),
        ResidencyMetrics(EngineMetrics()),
    )
    rows: dict[str, Any] = {}
    ranks = Ranks(llm, rows, 0, SLOT_BYTES, metrics)
    ended = threading.Event()
    fetcher = Fetcher(Loader(CPU, num_threads=2), ranks.host_cache, registry, ranks)
    residency = Residency(ranks.slots(NUM_SLOTS), fetcher, metrics, on_load_ended=ended.set)
    yield Harness(ranks, residency, records, paths, llm, ended, rows)
    residency.close()
    sys.modules.pop("peraxis_vllm.ranks")


def test_every_rank_has_a_delta_through_evictions(harness: Harness) -> None:
    for number in (0, 1, 2, 0):
        record = harness.records[number]
        assert harness.load(record).error is None
        delta = harness.residency.find(record.label)
        assert delta is not None
        with Artifact.open(harness.paths[number]) as artifact:
            signs, norm = artifact.onebit(MATRIX).planes[0].signs, artifact.whole(NORM).float()
        for worker in harness.llm.workers:
            assert torch.equal(worker.norm(delta.slot.index), norm)
            ((begin, end),) = worker.cut.rows or ()
            held = worker.slots[delta.slot.index].memory.numpy().tobytes()
            assert signs[begin:end].numpy().tobytes() in held


def test_a_load_that_fails_on_one_rank_fails_and_frees_the_slot(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(harness.llm.workers[1].tables, "adopt", lambda *_: 1 / 0)
        for _ in range(2 * NUM_SLOTS):
            error = harness.load(harness.records[0]).error
            assert isinstance(error, EngineFailed)
            assert "rank 1 could not take it: ZeroDivisionError" in str(error)
    assert harness.load(harness.records[0]).error is None


def test_a_rank_that_has_ended_fails_loads_and_the_engine(harness: Harness) -> None:
    harness.ranks.check_alive()
    (lost,) = harness.llm.callbacks
    lost()
    with pytest.raises(EngineFailed, match="a process of vLLM has ended"):
        harness.ranks.check_alive()


def test_a_step_leaves_its_logits_and_its_fault(harness: Harness) -> None:
    from peraxis_vllm.ranks import HeldLogits

    row = harness.rows["row"] = SimpleNamespace(logits=None)
    logits = torch.arange(5.0)
    for rank in range(NUM_RANKS):
        RANK.number = rank
        hold = HeldLogits().new_req_logits_processor(SimpleNamespace(extra_args={"peraxis_row": "row"}))
        assert (hold is None) == (rank > 0)
        if hold is not None:
            assert torch.equal(hold([], logits), logits)
    assert HeldLogits().new_req_logits_processor(SimpleNamespace(extra_args=None)) is None
    harness.llm.workers[1].fault = "rows"
    assert harness.ranks.take_fault() == "rows"
    np.testing.assert_array_equal(row.logits, logits)
    row.logits, harness.llm.workers[1].fault = None, None
    assert harness.ranks.take_fault() is None
    assert row.logits is None
