"""Measure what HTTP costs: streams of a server over HTTP beside the bare engine, and beside another server.

1, 16 and 64 streams of one model go through `peraxis serve` and through an engine in this process, in turns. Then 300
streams of a tiny model, whose steps take almost no time, go through this repository's server and, with `--baseline`,
through that of another checkout. Then streams that are constrained to JSON run alone and beside free ones, and streams
of a server with keys, limits and JSON logs beside those of a server without. Last, prompts of 10,000 tokens are
tokenized while eight streams run.

Constrained streams, free ones and half of each, of one base, go through `POST /v1/completions` in turns. The limits of
the tenant are set, and so high that none refuses a request. Both servers log one line per request; without keys it is
text.

The clients run on the same processors as the server; a table says how much of them they take.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.client import (
    Span,
    StreamedRequest,
    StreamTimes,
    gap_seconds,
    gaps_meeting,
    gaps_within,
    read_streams,
    running_clients,
    tokens_per_s,
)
from bench.engine import (
    FULL,
    SMALL,
    BenchEngine,
    prompts,
    publish_variants,
    serving,
    text_of,
    tokenizer_files,
    write_base,
)
from bench.harness import (
    BEST_DEVICE,
    Bench,
    Columns,
    Goal,
    Report,
    at_least,
    at_most,
    ms,
    option,
    p99,
    rounded,
    say,
    table_of,
    text,
)
from bench.process import Server, serve_command
from bench.process import serving as serving_process
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

    @property
    def case(self) -> tuple[str, int, int]:
        return self.name, self.num_streams, self.num_variants

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
        say(f"turn {turn} of {repeats} is done")


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


def server_for(
    base: Path,
    registry: Registry,
    num_streams: int,
    num_variants: int,
    checkout: Path | None = None,
    flags: Sequence[str] = (),
) -> AbstractContextManager[Server]:
    """Start a server that runs so many streams at a time, of this repository or of another checkout."""
    sizes = {
        "--max-num-seqs": num_streams,
        "--max-queue": 4096,
        "--max-gpu-deltas": max(2, num_variants),
        "--max-host-cache-gb": 0,
        "--kv-cache-gb": KV_CACHE_GB,
    }
    words = [word for pair in sizes.items() for word in pair]
    return serving_process(serve_command(base, registry.root, *words, *flags), checkout=checkout)


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
    return rounded(
        {
            "gaps_quiet": len(without),
            "gaps_busy": len(during),
            "reply_p50_s": median(span.ended - span.began for span in busy),
            "quiet_p50_s": median(without),
            "quiet_p99_s": p99(without),
            "busy_p50_s": median(during),
            "busy_p99_s": p99(during),
        }
    )


@dataclass(frozen=True, slots=True)
class HttpScope:
    """Sizes of a run."""

    shapes: LlamaShapes
    streams: tuple[int, ...] = (1, 16, 64)
    num_variants: int = 8  # each with a tokenizer of its own
    num_new: int = 128
    num_tiny: int = 300  # streams of the tiny model
    long: LongPrompts = field(default_factory=LongPrompts)


SMALL_SCOPE = HttpScope(
    SMALL,
    streams=(1, 4),
    num_variants=2,
    num_new=8,
    num_tiny=12,
    long=LongPrompts(num_tokens=500, count=2, num_streams=2, quiet_s=0.2),
)


def beside_engine(directory: Path, scope: HttpScope, repeats: int) -> list[Subject]:
    """Measure an engine in this process and a server, in turns, on the same base and variants."""
    base, registry = write_base(directory / "base", scope.shapes), Registry(directory / "registry")
    files = tokenizer_files(directory, scope.shapes)
    records = publish_variants(registry, base, scope.shapes, scope.num_variants, files)
    most, subjects = max(scope.streams), []
    with ExitStack() as stack:
        settings: dict[str, Any] = {"max_num_seqs": most, "kv_cache_gb": KV_CACHE_GB}
        engine = stack.enter_context(serving(base, registry, records, **settings))
        server = stack.enter_context(server_for(base, registry, most, scope.num_variants))
        for num_streams, num_variants in (
            *((count, 0) for count in scope.streams),
            (most, scope.num_variants),
        ):
            asked = prompts(num_streams, PROMPT_TOKENS, scope.shapes.vocabulary)
            bare = partial(through_engine, engine, asked, num_variants, scope.num_new)
            subjects.append(Subject(ENGINE, num_streams, num_variants, bare))
            requests = streamed_requests(asked, num_variants, scope.num_new)
            subjects.append(Subject(HTTP, num_streams, num_variants, partial(through_http, server, requests)))
        measure(subjects, repeats)
    return subjects


def tiny_model(directory: Path, scope: HttpScope, baseline: Path | None, repeats: int) -> list[Subject]:
    """Measure many streams of a model that costs almost nothing, on this server and on the baseline's, in turns."""
    base, registry = write_base(directory / "base", SMALL), Registry(directory / "registry")
    requests = streamed_requests(prompts(scope.num_tiny, PROMPT_TOKENS, SMALL.vocabulary), 0, scope.num_new)
    checkouts = {HTTP: None} if baseline is None else {HTTP: None, BASELINE: baseline}
    subjects = []
    with ExitStack() as stack:
        for name, checkout in checkouts.items():
            server = stack.enter_context(server_for(base, registry, scope.num_tiny, 0, checkout))
            subjects.append(Subject(name, scope.num_tiny, 0, partial(through_http, server, requests)))
        measure(subjects, repeats)
    return subjects


HEADS: Columns = {
    "streams": lambda one: one.num_streams,
    "variants": lambda one: one.num_variants or "base",
    "": lambda one: one.name,
}
RATES: Columns = {
    **HEADS,
    "tokens/s": lambda one: f"{one.median('tokens_per_s'):.0f}",
    "between tokens, ms": lambda one: f"{1e3 * one.median('p50_gap_s'):.1f}",
    "p99, ms": lambda one: f"{1e3 * one.median('p99_gap_s'):.1f}",
    "first token, ms": lambda one: f"{1e3 * one.median('first_token_s'):.1f}",
}
# The processor time per token by process, and the cores that are busy at the measured rate.
TIMES: Columns = {
    **HEADS,
    "processor time, µs per token": lambda one: ", ".join(
        f"{part} {1e6 * seconds:.0f}" for part, seconds in one.cpu_s().items()
    ),
    "cores busy": lambda one: f"{one.median('tokens_per_s') * sum(one.cpu_s().values()):.2f}",
    "of them by clients": lambda one: f"{one.median('tokens_per_s') * one.cpu_s().get('clients', 0.0):.2f}",
}


def tokenizing_table(figures: Mapping[str, Mapping[str, float]], num_tokens: int) -> str:
    columns: Columns = {
        f"{num_tokens} tokens, by": text("name"),
        "tokenized in, ms": ms("reply_p50_s"),
        "others' p99, quiet, ms": ms("quiet_p99_s"),
        "busy, ms": ms("busy_p99_s"),
        "ratio": lambda row: f"{row['busy_p99_s'] / row['quiet_p99_s']:.2f}",
    }
    return table_of(columns, [{"name": name, **one} for name, one in figures.items()])


def goals(subjects: Sequence[Subject]) -> list[Goal]:
    """Compare the figures with their limits; a figure without its peer is not measured."""
    found = {one.case: one for one in subjects}
    most = max(one.num_streams for one in subjects if one.name == ENGINE)
    many = max(one.num_streams for one in subjects if one.name == HTTP)

    def ratio(name: str, other: str, figure: str = "tokens_per_s", streams: int = most) -> float | None:
        peer = found.get((other, streams, 0))
        return None if peer is None else found[name, streams, 0].median(figure) / peer.median(figure)

    return [
        at_least(f"{most} streams: tokens/s over HTTP / bare engine", ratio(HTTP, ENGINE), 0.95),
        at_most(f"{most} streams: p99 over HTTP / bare engine", ratio(HTTP, ENGINE, "p99_gap_s"), 1.1),
        at_least(
            f"{many} streams of a tiny model: tokens/s / baseline", ratio(HTTP, BASELINE, streams=many), 2.0
        ),
        at_most(
            f"{most} streams: time per token, constrained to JSON / free", ratio(FREE, CONSTRAINED), 1.15
        ),
        at_most(
            f"{most} streams: p99 of free ones, beside as many constrained / all free",
            ratio(BESIDE, FREE, "p99_gap_s"),
            1.1,
        ),
        at_least(
            f"{most} streams: tokens/s with keys, limits and JSON logs / without", ratio(SECURED, OPEN), 0.97
        ),
    ]


def results(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Return all samples, for the JSON document."""
    return [
        {
            "who": one.name,
            "streams": one.num_streams,
            "variants": one.num_variants,
            "samples": [rounded(asdict(sample), 7) for sample in one.samples],
        }
        for one in subjects
    ]


def report(args: Namespace) -> Report:
    scope, directory, repeats = SMALL_SCOPE if args.small else HttpScope(FULL), args.directory, args.repeats
    subjects = beside_engine(directory / "engine", scope, repeats)
    subjects += tiny_model(directory / "tiny", scope, args.baseline, repeats)
    sizes = scope.shapes, max(scope.streams), scope.num_new, repeats
    subjects += measure_constrained(directory / "json", *sizes)
    subjects += measure_secured(directory / "secured", *sizes)
    tokenizing = measure_tokenizing(directory / "long", scope.shapes, scope.long)
    more = {"prompt_tokens": PROMPT_TOKENS, "repeats": repeats, "statistic": "median"}
    tables = [table_of(RATES, subjects), table_of(TIMES, subjects)]
    return Report(
        {**asdict(scope), **more},
        {"streams": results(subjects), "tokenizing": tokenizing},
        [*tables, tokenizing_table(tokenizing, scope.long.num_tokens)],
        goals(subjects),
        conditions=f"median of {repeats}",
        device=BEST_DEVICE,
    )


OPTIONS = (
    option("--repeats", 3),
    option("--baseline", None, "another checkout, whose server runs 300 streams, too", type=Path),
)
main = Bench("http", __doc__, report, OPTIONS, small="a tiny model", folder="for checkpoints and registries")

if __name__ == "__main__":
    sys.exit(main())
