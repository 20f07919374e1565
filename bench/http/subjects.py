"""The ways to answer streams that are compared: the bare engine, servers over HTTP, and streams under constraints.

Free streams, constrained streams, and half of each, of one base, go through `POST /v1/completions` in turns.

The same streams of one base go through `POST /generate` of both servers in turns. The limits of the tenant are set, and
so high that none refuses a request. Both servers log one line per request; without keys it is text.

Running streams are also watched while the server tokenizes long prompts of others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.engine import BenchEngine, prompts, publish_variants, text_of, tokenizer_files, write_base
from bench.http.clients import StreamedRequest, read_streams, running_clients
from bench.process import Server, serve_command
from bench.process import serving as serving_process
from bench.streams import Span, StreamTimes, gap_seconds, gaps_meeting, gaps_within, p99, tokens_per_s
from bench.synthetic import LlamaShapes
from deltastore.registry import Registry
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.limits import LimitsDirectory
from server.tenants.tenant import TenantLimits

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


# A list that is never complete, so that each stream has all its tokens.
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}
PRINTABLE = [chr(code) for code in range(0x21, 0x7F)]


def measure_constrained(
    directory: Path,
    shapes: LlamaShapes,
    num_streams: int,
    num_new: int,
    repeats: int,
    flags: Sequence[str] = (),
) -> list[Subject]:
    """Measure the three subjects in turns, on one server that is started with `flags`, too."""
    base, registry = write_json_base(directory / "base", shapes), Registry(directory / "registry")
    texts = ["".join(_printable(prompt)) for prompt in prompts(num_streams, PROMPT_TOKENS, len(PRINTABLE))]
    half = num_streams // 2
    free = _requests(texts, num_new, {})
    constrained = _requests(texts, num_new, SCHEMA)
    with server_for(base, registry, num_streams, 0, flags=flags) as server:
        answers: dict[str, Callable[[], Sample]] = {
            FREE: partial(through_http, server, free),
            CONSTRAINED: partial(through_http, server, constrained),
            BESIDE: partial(through_http, server, [*free[:half], *constrained[half:]], half),
        }
        subjects = [Subject(name, num_streams, 0, answer) for name, answer in answers.items()]
        measure(subjects, repeats)
    return subjects


def write_json_base(directory: Path, shapes: LlamaShapes) -> Path:
    """Write a base with random weights whose tokens are printable ASCII: single characters, then longer words."""
    write_base(directory, shapes)
    # The byte-level alphabet writes a space as U+0120.
    words = [*PRINTABLE, "\u0120"]
    words += [f"{first}{second}" for first in PRINTABLE[32:58] for second in words][
        : shapes.vocabulary - len(words)
    ]
    words += [f"w{number}x" for number in range(shapes.vocabulary - len(words))]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    return directory


def _printable(token_ids: Sequence[int]) -> list[str]:
    return [PRINTABLE[token_id] for token_id in token_ids]


def _requests(texts: Sequence[str], num_new: int, schema: dict[str, Any]) -> list[StreamedRequest]:
    return [StreamedRequest(text, num_new, schema=schema) for text in texts]


TENANT = "acme"
# Every limit, each more than a run can use.
LIMITS = TenantLimits(
    requests_per_minute=10**6,
    tokens_per_minute=10**9,
    max_running=10**4,
    max_uploads=8,
    max_stored_bytes=1 << 40,
    max_pinned=8,
)
SECURED_FLAGS = ("--auth", "keys", "--log-format", "json")


def measure_secured(
    directory: Path, shapes: LlamaShapes, num_streams: int, num_new: int, repeats: int
) -> list[Subject]:
    """Measure both servers in turns."""
    base, registry = write_base(directory / "base", shapes), Registry(directory / "registry")
    key = _make_tenant(registry.root)
    asked = prompts(num_streams, PROMPT_TOKENS, shapes.vocabulary)
    requests = streamed_requests(asked, 0, num_new)
    with (
        server_for(base, registry, num_streams, 0) as without,
        server_for(base, registry, num_streams, 0, flags=SECURED_FLAGS) as secured,
    ):
        with_key = [replace(one, key=key) for one in requests]
        subjects = [
            Subject(OPEN, num_streams, 0, partial(through_http, without, requests)),
            Subject(SECURED, num_streams, 0, partial(through_http, secured, with_key)),
        ]
        measure(subjects, repeats)
    return subjects


def _make_tenant(registry: Path) -> str:
    """Set the tenant's limits and make a key of it; return what its owner sends."""
    LimitsDirectory(registry, TenantLimits()).write(TENANT, LIMITS)
    return KeyStore(registry).create(Auditor(AuditLog(registry)), TENANT, ["inference"]).text


ROOM = 2 * PROMPT_TOKENS  # positions beside the long prompt
BASE, OWN = "base's tokenizer", "variant's own tokenizer"


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """Sizes of the measurement."""

    num_tokens: int = 10_000
    count: int = 40
    num_streams: int = 8
    pause_s: float = 0.1  # between two long prompts
    quiet_s: float = 3.0


def measure_tokenizing(
    directory: Path, shapes: LlamaShapes, long: LongPrompts
) -> dict[str, dict[str, float]]:
    """Return figures by whose tokenizer makes the tokens of the long prompts."""
    positions = long.num_tokens + ROOM
    base = write_base(directory / "base", shapes, positions)
    registry = Registry(directory / "registry")
    publish_variants(registry, base, shapes, 1, tokenizer_files(directory, shapes))
    asked = prompts(long.num_streams, PROMPT_TOKENS, shapes.vocabulary)
    requests = streamed_requests(asked, 0, positions - PROMPT_TOKENS)
    # Short words, so that the prompt is not refused for its length in characters.
    (prompt,) = prompts(1, long.num_tokens, shapes.vocabulary // 10, seed=1)
    figures = {}
    with server_for(base, registry, long.num_streams, 1) as server:
        for name, variant, letter in ((BASE, None, "w"), (OWN, "v1", "x")):
            text = text_of(prompt, letter)
            # Loads the tokenizer.
            _tokenize(server, variant, text)
            with running_clients(server.url, requests) as clients:
                clients.wait_for_first_tokens()
                quiet = [_wait(long.quiet_s / 2)]
                busy = list(_tokenize_often(server, variant, text, long))
                quiet.append(_wait(long.quiet_s / 2))
                streams = clients.stop().streams
            figures[name] = _figures(streams, quiet, busy)
    return figures


def _tokenize_often(server: Server, variant: str | None, text: str, long: LongPrompts) -> Iterator[Span]:
    """Send long prompts one after another; yield the time from each request to its reply."""
    for _ in range(long.count):
        began = time.perf_counter()
        _tokenize(server, variant, text)
        yield Span(began, time.perf_counter())
        time.sleep(long.pause_s)


def _tokenize(server: Server, variant: str | None, text: str) -> None:
    """Let the server tokenize a prompt that it then refuses, because one token more is asked for than fits.

    Raises:
        RuntimeError: it was not refused, or for another reason.
    """
    params = {"variant": variant} if variant else {}
    body = {"prompt": text, "max_new_tokens": ROOM + 1}
    reply = server.client.post("/generate", params=params, json=body)
    if reply.status_code != 400 or "tokens" not in reply.json()["error"]["message"]:
        raise RuntimeError(f"a prompt that is too long was answered {reply.status_code}: {reply.text[:500]}")


def _wait(seconds: float) -> Span:
    began = time.perf_counter()
    time.sleep(seconds)
    return Span(began, time.perf_counter())


def _figures(streams: Sequence[StreamTimes], quiet: Sequence[Span], busy: Sequence[Span]) -> dict[str, float]:
    without, during = gaps_within(streams, quiet), gaps_meeting(streams, busy)
    return {
        "gaps_quiet": len(without),
        "gaps_busy": len(during),
        "reply_p50_s": round(median(span.ended - span.began for span in busy), 6),
        "quiet_p50_s": round(median(without), 6),
        "quiet_p99_s": round(p99(without), 6),
        "busy_p50_s": round(median(during), 6),
        "busy_p99_s": round(p99(during), 6),
    }
