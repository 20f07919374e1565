"""One way to answer a number of streams, and its figures: the bare engine, or a server over HTTP."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.http.clients import StreamedRequest, read_streams
from bench.process import Server, serve_command
from bench.process import serving as serving_process
from bench.serving import BenchEngine, text_of
from bench.streams import StreamTimes, gap_seconds, p99, tokens_per_s
from deltastore.registry import Registry

ENGINE, HTTP, BASELINE = "bare engine", "over HTTP", "baseline over HTTP"
FREE, CONSTRAINED, BESIDE = "free", "constrained to JSON", "free beside constrained"
OPEN, SECURED = "without keys", "keys, limits, JSON logs"
PROMPT_TOKENS = 64
KV_CACHE_GB = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one run of one subject."""

    tokens_per_s: float
    p50_gap_s: float
    p99_gap_s: float
    first_token_s: float  # median
    cpu_s: Mapping[str, float]  # processor time per token, by process


@dataclass(slots=True)
class Subject:
    """One way to answer so many streams, and its figures."""

    name: str
    num_streams: int
    num_variants: int  # 0 is the base alone
    answer: Callable[[], Sample]
    samples: list[Sample] = field(default_factory=list)

    def median(self, figure: str) -> float:
        """Return the median of one field of `Sample`."""
        values: list[float] = [getattr(sample, figure) for sample in self.samples]
        return median(values)

    def cpu_s(self) -> dict[str, float]:
        """Return the median processor time per token of each process."""
        parts = dict.fromkeys(part for sample in self.samples for part in sample.cpu_s)
        return {part: median(one.cpu_s.get(part, 0.0) for one in self.samples) for part in parts}


def measure(subjects: Sequence[Subject], repeats: int) -> None:
    """Measure every subject `repeats` times, in turns; the first turn warms up and is not counted."""
    for turn in range(repeats + 1):
        for subject in subjects:
            sample = subject.answer()
            if turn:
                subject.samples.append(sample)
        print(f"turn {turn} of {repeats} is done", file=sys.stderr, flush=True)


def through_engine(
    engine: BenchEngine, asked: Sequence[list[int]], num_variants: int, num_new: int
) -> Sample:
    """Answer all prompts with an engine in this process, spread evenly over the variants."""
    before = time.process_time()
    submitted = [
        engine.ask(engine.records[i % num_variants] if num_variants else None, prompt, num_new)
        for i, prompt in enumerate(asked)
    ]
    streams = [one.times() for one in submitted]
    return _sample(streams, num_new, {ENGINE: time.process_time() - before})


def through_http(
    server: Server, requests: Sequence[StreamedRequest], num_sampled: int | None = None
) -> Sample:
    """Answer all requests with a server; the processor time is that of each of its processes and of the clients.

    With `num_sampled` the figures are those of so many of the requests, the first ones.
    """
    before = server.tree.cpu_s()
    read = read_streams(server.url, requests)
    spent = {part: total - before.get(part, 0.0) for part, total in server.tree.cpu_s().items()}
    return _sample(read.streams[:num_sampled], requests[0].num_new, {**spent, "clients": read.cpu_s})


def streamed_requests(
    asked: Sequence[Sequence[int]], num_variants: int, num_new: int
) -> list[StreamedRequest]:
    """Return the prompts as requests to the base, or spread evenly over variants with a tokenizer of their own."""
    if not num_variants:
        return [StreamedRequest(text_of(prompt), num_new) for prompt in asked]
    return [
        StreamedRequest(text_of(prompt, "x"), num_new, f"v{1 + i % num_variants}")
        for i, prompt in enumerate(asked)
    ]


@contextmanager
def server_for(
    base: Path,
    registry: Registry,
    num_streams: int,
    num_variants: int,
    checkout: Path | None = None,
    flags: Sequence[str] = (),
) -> Iterator[Server]:
    """Start a server that runs so many streams at a time, of this repository or of another checkout."""
    sizes = {
        "--max-num-seqs": num_streams,
        "--max-queue": 4096,
        "--max-gpu-deltas": max(2, num_variants),
        "--max-host-cache-gb": 0,
        "--kv-cache-gb": KV_CACHE_GB,
    }
    words = [word for pair in sizes.items() for word in pair]
    with serving_process(serve_command(base, registry.root, *words, *flags), checkout=checkout) as server:
        yield server


def _sample(streams: Sequence[StreamTimes], num_new: int, cpu_s: Mapping[str, float]) -> Sample:
    """Make the figures of a run.

    Raises:
        RuntimeError: a stream has another number of tokens than `num_new`, so that its rate would not be comparable.
    """
    if found := {len(one.tokens) for one in streams} - {num_new}:
        raise RuntimeError(f"{num_new} tokens were asked for, and a stream has {found.pop()}")
    gaps, num_tokens = gap_seconds(streams), num_new * len(streams)
    return Sample(
        tokens_per_s=tokens_per_s(streams),
        p50_gap_s=median(gaps),
        p99_gap_s=p99(gaps),
        first_token_s=median(one.first_token_s for one in streams),
        cpu_s={part: seconds / num_tokens for part, seconds in cpu_s.items()},
    )
