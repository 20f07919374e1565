"""An engine with tiny models in the tests' process: compress, publish, ask; the server without HTTP."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from bench.engine import BlockingEngine, engine_process, publish, running_engine
from compressor.config import CompressConfig
from compressor.convert.merge import MergeConfig, merge
from compressor.pipeline import compress
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.verified_object import read_files
from server.engine.model_runner import Batch, ModelRunner
from server.protocol.messages import DoneEvent, ErrorEvent, Event, TokenEvent
from server.protocol.request import Request, SamplingParams, token_ids_of
from server.settings import Settings
from server.text.generation_config import base_generation_config, eos_token_ids
from tests.helpers.tiny_models import Change, load_whole, make_pair
from tests.server.engine.helpers.forked_engine import forked_engine
from tests.vllm.helpers.environment import PYTHON, SIZES

WAIT_S = 240.0
# The native engine on a thread of the tests or in a process of its own, or a process with vLLM.
Mode = Literal["thread", "process", "vllm"]
PAGE_TOKENS: dict[Mode, int] = {"thread": 16, "process": 16, "vllm": 128}
TOKEN_BYTES = 1024  # keys and values of a token in a model of `make_family`

# From the tokens that a sequence has generated to those that may follow.
AllowedTokens = Callable[[list[int]], set[int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """All events of one request."""

    events: list[Event]

    @property
    def token_ids(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenEvent)]

    @property
    def end(self) -> Event:
        return self.events[-1]


@dataclass(slots=True)
class Pending:
    """A submitted request and its events."""

    request: Request
    events: queue.SimpleQueue[Event]

    def answer(self) -> Answer:
        events: list[Event] = []
        while not events or not isinstance(events[-1], DoneEvent | ErrorEvent):
            events.append(self.events.get(timeout=WAIT_S))
        return Answer(events)


@dataclass(slots=True)
class Served:
    """An engine and its registry, with short calls for tests."""

    engine: BlockingEngine
    registry: Registry
    eos_token_ids: frozenset[int]  # of the base; an HTTP process sends them with each request
    _ids: Iterator[int] = field(default_factory=itertools.count)
    # Of a test that shares the engine with others: in front of its names, and the engine's counts when it began.
    prefix: str = ""
    before: Mapping[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)
    _published: list[VersionRecord] = field(default_factory=list)
    _num_embeddings: dict[str, int] = field(default_factory=dict)  # by digest
    _started: list[str] = field(default_factory=list)  # ids of requests

    def publish(self, artifact: Path, name: str) -> VersionRecord:
        """Publish a version of a name; use the record's, which may have a prefix."""
        record = publish(self.registry, artifact, self.prefix + name)
        base = self.engine.facts.base
        assert base.embedding is not None
        shapes = {**base.shapes, **read_files(self.registry, record).shapes}
        self._published.append(record)
        self._num_embeddings[record.digest] = shapes[base.embedding][0]
        return record

    def start(self, record: VersionRecord | None, prompt: list[int], **sampling: Any) -> Pending:
        pending = Pending(self.request(record, prompt, **sampling), queue.SimpleQueue())
        self.engine.submit(pending.request, pending.events.put)
        return pending

    def request(self, record: VersionRecord | None, prompt: list[int], **sampling: Any) -> Request:
        self._started.append(f"request-{self.prefix}{next(self._ids)}")
        return Request(
            id=self._started[-1],
            tenant="default",
            name=None if record is None else record.name,
            record=record,
            prompt_ids=token_ids_of(prompt),
            num_embeddings=self._rows(record),
            sampling_params=SamplingParams(
                **{"temperature": 0.0, "stop_token_ids": self.eos_token_ids, **sampling}
            ),
        )

    def ask(self, record: VersionRecord | None, prompt: list[int], **sampling: Any) -> Answer:
        return self.start(record, prompt, **sampling).answer()

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a series; a count is of this test's requests alone."""
        is_count = name.endswith(("_total", "_count", "_sum"))
        before = self.before.get((name, frozenset(labels.items())), 0.0) if is_count else 0.0
        return self.engine.metric(name, **labels) - before

    def leave(self) -> None:
        """Cancel what still runs, and free the slots and copies of this test's versions."""
        for request_id in self._started:
            self.engine.cancel(request_id)
        deadline = time.monotonic() + WAIT_S
        while self.metric("num_requests_running") or self.metric("num_requests_waiting"):
            assert time.monotonic() < deadline, "requests of a test do not end"
            time.sleep(0.02)
        for record in self._published:
            if self.engine.state_of(record).is_pinned:
                self.engine.load(record, "unpin").result(WAIT_S)
            self.engine.load(record, "unload").result(WAIT_S)

    def num_cancelled(self) -> float:
        """Return how many requests were cancelled; a client that cancels gets no more events of its request."""
        variants = [f"default/{name}" for name in {record.name for record in self._published}]
        counts = [
            self.metric("variant_requests_total", variant=variant, finish_reason="cancelled")
            for variant in ("base", *variants)
        ]
        return sum(counts)

    def level(self, record: VersionRecord) -> str:
        return self.engine.state_of(record).level

    def _rows(self, record: VersionRecord | None) -> int:
        return self.engine.num_embeddings if record is None else self._num_embeddings[record.digest]


def kv_cache_gb(mode: Mode, num_pages: int) -> float:
    """Return the setting that gives `num_pages` pages to an engine on a base of `make_family`."""
    return num_pages * PAGE_TOKENS[mode] * TOKEN_BYTES / 1e9


@contextmanager
def serving(base: Path, registry_dir: Path, mode: Mode = "thread", **overrides: Any) -> Iterator[Served]:
    """Run an engine on `base` in float32; `overrides` are settings. One with a Python of its own is not forked.

    An engine with vLLM, whose start takes long, is shared by the tests of a module that ask for the same.
    """
    if mode == "vllm":
        with _shared.lent(base, registry_dir, overrides) as served:
            yield served
        return
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "max_gpu_deltas": 2, "max_host_cache_gb": 0.02, "max_num_seqs": 16,
        "max_queue": 64, "load_timeout": 30.0, "load_threads": 2,
    }  # fmt: skip
    given = Settings(base=base, registry=str(registry_dir), **{**settings, **overrides})
    run_process = forked_engine if given.engine_python is None else engine_process
    with running_engine(given, mode, run_process) as engine:
        yield Served(engine, Registry(registry_dir), eos_token_ids(base_generation_config(base)))


class SharedEngines:
    """Engines with vLLM that go on when a test ends: the last two, because a module's tests ask for two in turns."""

    MAX = 2

    def __init__(self) -> None:
        # By what was asked for, the last one used last.
        self._running: dict[str, tuple[Served, ExitStack]] = {}
        self._numbers = itertools.count()

    @contextmanager
    def lent(self, base: Path, registry_dir: Path, settings: Mapping[str, Any]) -> Iterator[Served]:
        """Yield an engine to one test, which finds nothing of other tests in it."""
        key = str((base, sorted(settings.items())))
        known = self._running.pop(key) if key in self._running else None
        engine, _ = self._running[key] = known or self._start(base, registry_dir, settings)
        served = Served(
            engine.engine,
            engine.registry,
            engine.eos_token_ids,
            prefix=f"t{next(self._numbers)}-",
            before=engine.engine.metrics(),
        )
        try:
            yield served
            served.leave()
        except BaseException:
            # It may be in any state.
            self._running.pop(key)[1].close()
            raise

    def close(self) -> None:
        while self._running:
            self._running.pop(next(iter(self._running)))[1].close()

    def _start(self, base: Path, registry_dir: Path, settings: Mapping[str, Any]) -> tuple[Served, ExitStack]:
        while len(self._running) >= self.MAX:
            self._running.pop(next(iter(self._running)))[1].close()
        vllm = {"backend": "vllm", "engine_python": PYTHON}
        stack = ExitStack()
        return stack.enter_context(serving(base, registry_dir, "process", **vllm, **settings)), stack


_shared = SharedEngines()


@contextmanager
def sharing_engines() -> Iterator[None]:
    """End the engines that tests share."""
    try:
        yield
    finally:
        _shared.close()


def on_forward(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Batch, Callable[[], Tensor]], Tensor]
) -> None:
    """Replace each forward pass by `change`, which is given the batch and a function that runs the pass."""
    forward = ModelRunner.forward

    def changed(runner: ModelRunner, batch: Batch, *args: Any) -> Tensor:
        return change(batch, lambda: forward(runner, batch, *args))

    monkeypatch.setattr(ModelRunner, "forward", changed)


def slow_down(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make every step slow until the event is set, so that requests of many tokens are still running a moment later."""
    is_over = threading.Event()

    def slowly(batch: Batch, forward: Callable[[], Tensor]) -> Tensor:
        is_over.wait(0.02)
        return forward()

    on_forward(monkeypatch, slowly)
    return is_over


@dataclass(frozen=True, slots=True)
class Family:
    """A base and the artifacts of its variants."""

    base: Path
    artifacts: list[Path]


def make_family(directory: Path, seed: int, num_variants: int) -> Family:
    """Make a tiny Llama, its fine-tunes and their deltas."""
    pair = make_pair("llama", directory, seed, (Change(),) * num_variants, **SIZES)
    artifacts = [
        make_delta(pair.base, finetune, directory / f"{number}.safetensors")
        for number, finetune in enumerate(pair.finetunes)
    ]
    return Family(pair.base, artifacts)


def make_delta(base: Path, finetune: Path, out: Path, **config: Any) -> Path:
    compress(CompressConfig(str(base), str(finetune), out, **config))
    return out


def merged(base: Path, artifact: Path, out: Path) -> Any:
    """Load the model that `peraxis merge --dtype float32` writes."""
    merge(MergeConfig(str(base), artifact, out, "float32"))
    return load_whole(out)


@torch.inference_mode()
def generate(
    model: Any, prompt: list[int], count: int, allowed: AllowedTokens | None = None
) -> tuple[list[int], list[float]]:
    """Return the greedy tokens of transformers, and for each the distance between the two best scores.

    Args:
        allowed: the tokens that may follow those generated so far; by default any.
    """
    constraint: dict[str, Any] = {}
    if allowed is not None:
        constraint["prefix_allowed_tokens_fn"] = lambda _, ids: sorted(allowed(ids[len(prompt) :].tolist()))
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **constraint,
    )
    best = [scores[0].topk(2).values for scores in output.scores]
    return output.sequences[0, len(prompt) :].tolist(), [float(two[0] - two[1]) for two in best]


def same_up_to_a_tie(got: list[int], want: list[int], margins: list[float]) -> bool:
    """Compare token for token; a difference where the reference's two best logits are within 1e-4 is a tie."""
    for position, (ours, theirs) in enumerate(zip(got, want, strict=False)):
        if ours != theirs:
            return margins[position] <= 1e-4
    return len(got) == len(want)
