"""An engine and a client of it for benches and tests, which call and wait, and a base with random weights to serve.

The engine is a process, as a server's is, or a thread of this one, where a test can reach into it. Events arrive on the
thread of the client's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from bench.client import StreamTimes
from bench.synthetic import LlamaShapes, write_delta
from deltastore.architecture import POSITIONS
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.format.artifact import Artifact
from deltastore.format.files import FILES
from deltastore.registry import Registry
from deltastore.registry.records import ArtifactFacts, VersionRecord
from deltastore.threads import bound_spinning
from server.engine.main import serve_engine
from server.errors import EngineFailed
from server.metrics.exposition import render
from server.metrics.metrics import EngineMetrics
from server.protocol.control import EngineConfig
from server.protocol.engine_client import EngineClient, OnEvent
from server.protocol.messages import (
    DeltaState,
    DoneEvent,
    EngineFacts,
    ErrorEvent,
    Event,
    LoadAction,
    TokenEvent,
)
from server.protocol.request import Request, SamplingParams, token_ids_of
from server.settings import Settings

Mode = Literal["process", "thread"]
START_S = 600.0
STOP_S = 60.0

# Runs an engine that listens on an address, and yields what stops it.
EngineRunner = Callable[[Settings, str], AbstractContextManager[Callable[[], None]]]

T = TypeVar("T")
_numbers = itertools.count()


class BlockingEngine:
    """A client of a running engine. Any thread may call it."""

    def __init__(
        self, client: EngineClient, loop: asyncio.AbstractEventLoop, stop: Callable[[], None]
    ) -> None:
        self._client = client
        self._loop = loop
        self.stop = stop

    @property
    def facts(self) -> EngineFacts:
        return self._client.facts

    @property
    def num_embeddings(self) -> int:
        """Rows of the base's embedding."""
        base = self.facts.base
        return base.shapes[base.embedding or ""][0]

    def submit(self, request: Request, on_event: OnEvent, first_mask: bytes | None = None) -> None:
        """Send a request; raises what `EngineClient.submit` does. `on_event` is called with each event."""
        self.run(lambda: self._client.submit(request, on_event, first_mask))

    def send_mask(self, request_id: str, index: int, position: int, bits: bytes | None) -> None:
        """Send a mask for the next token of a sequence."""
        self._loop.call_soon_threadsafe(self._client.send_mask, request_id, index, position, bits)

    def cancel(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self._client.cancel, request_id)

    def stop_sequence(self, request_id: str, index: int) -> None:
        self._loop.call_soon_threadsafe(self._client.stop_sequence, request_id, index)

    def set_paused(self, request_id: str, is_paused: bool) -> None:
        """Let a request wait outside the batch, or go on."""
        self._loop.call_soon_threadsafe(self._client.set_paused, request_id, is_paused)

    def load(self, record: VersionRecord, action: LoadAction = "load") -> Future[None]:
        """Start a load, pin, unpin or unload; the future is done when it has happened."""

        async def call() -> None:
            await self._client.load(action, record)

        return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def state_of(self, record: VersionRecord) -> DeltaState:
        """Return where a version's delta is now, and its pin and requests."""
        (state,) = self.wait(self._client.residency_of((record.label,), record.tenant))
        return state

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return the value of each of the engine's series by name, such as ``preemptions_total``, and labels."""
        text = render(self.wait(self._client.metrics())).decode()
        return {
            (sample.name.removeprefix("peraxis_"), frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one of the engine's series; 0 if there is none."""
        return self.metrics().get((name, frozenset(labels.items())), 0.0)

    def run(self, call: Callable[[], T]) -> T:
        """Run a function on the client's event loop and return its result."""

        async def run() -> T:
            return call()

        return self.wait(run())

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the client's event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_S)


@contextmanager
def engine_process(settings: Settings, address: str) -> Iterator[Callable[[], None]]:
    """Run an engine in a process that is started as the supervisor starts its own."""
    config = EngineConfig(settings.model_dump_json(), address, os.getpid())
    environment = dict(os.environ)
    bound_spinning(environment)
    command = [str(settings.engine_python or sys.executable), "-P", "-m", "server.engine.main"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(msgspec.json.encode(config))
    try:
        yield process.terminate
    finally:
        process.terminate()
        try:
            code = process.wait(STOP_S)
        finally:
            process.kill()
            process.wait()
    if code:
        raise EngineFailed(f"the engine ended with exit code {code}")


@contextmanager
def running_engine(
    settings: Settings, mode: Mode = "process", run_process: EngineRunner = engine_process
) -> Iterator[BlockingEngine]:
    """Run an engine and a client of it; `run_process` runs it in mode "process".

    Raises:
        PeraxisError: the engine cannot start.
        EngineFailed: it has ended with an error.
    """
    with _event_loop() as loop, tempfile.TemporaryDirectory(prefix="peraxis-") as directory:
        name = f"engine-{next(_numbers)}"
        address = f"ipc://{directory}/{name}" if mode == "process" else f"inproc://{name}"
        with (run_process if mode == "process" else _engine_thread)(settings, address) as stop:
            client = asyncio.run_coroutine_threadsafe(_connected(address), loop).result(START_S)
            try:
                yield BlockingEngine(client, loop, stop)
            finally:
                asyncio.run_coroutine_threadsafe(_disconnected(client), loop).result(STOP_S)


async def _connected(address: str) -> EngineClient:
    client = EngineClient("blocking")
    client.connect(address)
    try:
        await client.welcomed
    except BaseException:
        client.disconnect()
        raise
    return client


async def _disconnected(client: EngineClient) -> None:
    client.disconnect()


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="client", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STOP_S)
        loop.close()


@contextmanager
def _engine_thread(settings: Settings, address: str) -> Iterator[Callable[[], None]]:
    stopping = threading.Event()
    with ThreadPoolExecutor(1, "engine") as thread:
        metrics = EngineMetrics()
        served = thread.submit(serve_engine, settings, address, metrics, stopping, on_built=lambda: None)
        try:
            yield stopping.set
        finally:
            stopping.set()
            wait([served])
    if code := served.result():
        raise EngineFailed(f"the engine ended with {code}")


FULL = LlamaShapes(num_layers=12, hidden=1024, intermediate=2816, kv=512, vocabulary=8192)  # 158M weights
SMALL = LlamaShapes(num_layers=2, hidden=128, intermediate=192, kv=64, vocabulary=256)
# By name: the bench's own; TinyLlama-1.1B; Llama-3.2-1B; Llama-3.1-8B with as many of its 32 layers as leave room
# for peers.
SHAPES = {
    "158m": FULL,
    "1.1b": LlamaShapes(22, hidden=2048, intermediate=5632, kv=256, vocabulary=32000),
    "1b": LlamaShapes(16, hidden=2048, intermediate=8192, kv=512, vocabulary=128256, tied=True),
    "8b": LlamaShapes(3, hidden=4096, intermediate=14336, kv=1024, vocabulary=128256, head_dim=128),
}
MAX_POSITIONS = 2048


@dataclass(slots=True)
class SubmittedRequest:
    """A request and the times of its events, in seconds of `time.perf_counter`."""

    id: str
    begun: float
    # None is the end of a request that was stopped: no event of it follows.
    events: queue.SimpleQueue[tuple[float, Event | None]] = field(default_factory=queue.SimpleQueue)

    def times(self) -> StreamTimes:
        """Wait for the end and return the time of each token.

        Raises:
            RuntimeError: the request failed.
        """
        times: list[float] = []
        while True:
            when, event = self.events.get()
            if isinstance(event, ErrorEvent):
                raise RuntimeError(f"a request failed: {event.error}")
            if event is None or isinstance(event, DoneEvent):
                return StreamTimes(self.begun, times)
            if isinstance(event, TokenEvent):
                times.append(when)


@dataclass(slots=True)
class BenchEngine:
    """An engine, the variants that it serves, and its metrics."""

    engine: BlockingEngine
    records: list[VersionRecord]
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def ask(self, record: VersionRecord | None, prompt: list[int], num_new: int) -> SubmittedRequest:
        """Submit one greedy request."""
        asked = SubmittedRequest(f"bench-{next(self._ids)}", time.perf_counter())
        request = Request(
            id=asked.id,
            tenant="default",
            name=None if record is None else record.name,
            record=record,
            prompt_ids=token_ids_of(prompt),
            num_embeddings=self.engine.num_embeddings,
            sampling_params=SamplingParams(max_new_tokens=num_new, temperature=0.0),
        )
        self.engine.submit(request, lambda event: asked.events.put((time.perf_counter(), event)))
        return asked

    def load(self, record: VersionRecord) -> None:
        """Bring a variant into a slot and wait until it is there."""
        self.engine.load(record).result()

    def unload(self, record: VersionRecord) -> None:
        """Free a variant's slot and wait until it is free."""
        self.engine.load(record, "unload").result()

    def stop(self, asked: SubmittedRequest) -> None:
        """Cancel a request; the times of its tokens until now remain."""
        self.engine.cancel(asked.id)
        asked.events.put((time.perf_counter(), None))


def write_base(
    directory: Path,
    shapes: LlamaShapes,
    max_positions: int = MAX_POSITIONS,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a checkpoint with random weights and no end token, so that answers have their full length.

    The tokens of its tokenizer are the words `w0`, `w1` and so on.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shapes.vocabulary,
        hidden_size=shapes.hidden,
        intermediate_size=shapes.intermediate,
        num_hidden_layers=shapes.num_layers,
        num_attention_heads=shapes.hidden // shapes.head_dim,
        num_key_value_heads=shapes.kv // shapes.head_dim,
        max_position_embeddings=max_positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=shapes.tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=_words("w", shapes)).save_pretrained(directory)
    return directory


def publish_variants(
    registry: Registry, base: Path, shapes: LlamaShapes, count: int, files: Mapping[str, bytes] | None = None
) -> list[VersionRecord]:
    """Publish `count` variants of a base, `v1` and so on, with random signs and the same `files`."""
    records, identity = [], Base.of(Checkpoint.open(base))
    for seed in range(1, count + 1):
        path = base.with_name(f"{seed}.safetensors")
        write_delta(path, shapes, seed, files or {}, identity)
        records.append(publish(registry, path, f"v{seed}"))
        path.unlink()
    return records


def publish(registry: Registry, path: Path, name: str, tenant: str = "default") -> VersionRecord:
    """Publish an artifact as it is, without the checks of an upload."""
    with Artifact.open(path) as artifact:
        manifest = artifact.manifest
        facts = ArtifactFacts(
            artifact.header.data_start,
            manifest.device_bytes,
            manifest.base_fingerprint,
            manifest.method,
            manifest.fidelity,
            manifest.config.get(POSITIONS),
        )
    with registry.open_upload(None) as upload, path.open("rb") as file:
        while block := file.read(1 << 22):
            upload.write(block)
        return registry.publish(upload.seal(), facts, tenant=tenant, name=name).record


def tokenizer_files(scratch: Path, shapes: LlamaShapes) -> dict[str, bytes]:
    """Make the files of a variant's own tokenizer, whose tokens are the words `x0`, `x1` and so on."""
    directory = scratch / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=_words("x", shapes)).save_pretrained(directory)
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name in FILES}


def text_of(prompt: Sequence[int], letter: str = "w") -> str:
    """Return the text of a prompt, for the base's tokenizer, or with the letter `x` for a variant's own."""
    return " ".join(f"{letter}{token_id}" for token_id in prompt)


@contextmanager
def serving(
    base: Path, registry: Registry, records: list[VersionRecord], *, mode: Mode = "process", **overrides: Any
) -> Iterator[BenchEngine]:
    """Run an engine as a process, or as a thread that a bench reaches into; `overrides` are settings."""
    settings: dict[str, Any] = {
        "max_gpu_deltas": max(2, len(records)),
        "max_host_cache_gb": 0,
        "max_num_seqs": 16,
        "max_queue": 4096,
        "load_timeout": 300.0,
        "load_threads": 2,
    }
    given = Settings(base=base, registry=str(registry.root), **{**settings, **overrides})
    with running_engine(given, mode) as engine:
        yield BenchEngine(engine, records)


def prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Draw random prompts that share no prefix."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(1, vocabulary, (count, length), generator=generator).tolist()
    return ids


def _words(letter: str, shapes: LlamaShapes) -> Tokenizer:
    """Make a tokenizer whose tokens are words: a letter and the token's id."""
    vocabulary = {f"{letter}{token_id}": token_id for token_id in range(shapes.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=f"{letter}0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
