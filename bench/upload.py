"""Measure uploads of a gigabyte beside eight running streams: the streams' gaps, the rate of the upload, and memory.

An artifact that holds every tensor of a 252M Llama whole in float32 goes over loopback HTTP to `peraxis serve`: each
byte is durable and each number checked before the reply. In turns, curl sends the same file to a sink that only writes
it and calls fsync. curl is the client of both.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.client import Span, StreamedRequest, StreamTimes, gaps_meeting, gaps_within, running_clients
from bench.engine import FULL, SMALL, prompts, text_of, write_base
from bench.harness import BEST_DEVICE, Bench, Goal, Report, at_least, at_most, option, p99, say
from bench.process import Server, serve_command, serving
from bench.synthetic import LlamaShapes, write_whole_delta
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.console import table
from deltastore.format.artifact import Artifact

UPLOAD, SINK = "upload to the server", "curl into a file"
PROMPT_TOKENS = 64
MAX_P99_RATIO = 1.2
MIN_RATE_RATIO = 0.5
MAX_GROWTH_MIB = 64
# Slots that hold every tensor in float32: 32 bits per weight, and the alignment of small tensors.
SLOT_HEADROOM = 40


@dataclass(frozen=True, slots=True)
class UploadScope:
    """Sizes of a run."""

    shapes: LlamaShapes
    num_streams: int = 8
    stream_tokens: int = 1900  # more than are waited for
    quiet_s: float = 2.0


FULL_SCOPE = UploadScope(replace(FULL, num_layers=20))
SMALL_SCOPE = UploadScope(SMALL, num_streams=2, quiet_s=0.3)


@dataclass(slots=True)
class Observations:
    """The measurements of all turns."""

    num_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {SINK: [], UPLOAD: []})
    quiet: list[float] = field(default_factory=list)  # gaps between tokens
    busy: dict[str, list[float]] = field(default_factory=lambda: {SINK: [], UPLOAD: []})
    growth_bytes: list[int] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)  # of each part of the server

    @property
    def rates(self) -> dict[str, float]:
        """Median bytes per second."""
        return {name: self.num_bytes / median(seconds) for name, seconds in self.seconds.items()}

    def add_gaps(self, streams: Sequence[StreamTimes], quiet: Sequence[Span], busy: dict[str, Span]) -> None:
        self.quiet += gaps_within(streams, quiet)
        for name, span in busy.items():
            self.busy[name] += gaps_meeting(streams, [span])

    def as_json(self) -> dict[str, Any]:
        gaps = {"quiet": self.quiet, **self.busy}
        return {
            "bytes": self.num_bytes,
            "seconds": {name: [round(one, 4) for one in values] for name, values in self.seconds.items()},
            "gaps": {
                name: {"count": len(some), "p50_s": round(median(some), 6), "p99_s": round(p99(some), 6)}
                for name, some in gaps.items()
            },
            "growth_bytes": self.growth_bytes,
            "peak_bytes": self.peak_bytes,
        }


def measure(directory: Path, scope: UploadScope, repeats: int) -> Observations:
    """Run a turn `repeats` times; one more before them warms up and is not counted."""
    base, path = write_base(directory / "base", scope.shapes), directory / "delta.safetensors"
    write_whole_delta(path, scope.shapes, Base.of(Checkpoint.open(base)))
    flags = ("--max-num-seqs", scope.num_streams, "--max-gpu-deltas", 2, "--slot-headroom", SLOT_HEADROOM)
    more = ("--max-host-cache-gb", 0, "--kv-cache-gb", 0.7)
    sink_command = [sys.executable, "-m", "bench.sink", directory / "sink"]
    found = Observations(path.stat().st_size)
    with ExitStack() as stack:
        server = stack.enter_context(serving(serve_command(base, directory / "registry", *flags, *more)))
        sink = stack.enter_context(serving(sink_command))
        for number in range(repeats + 1):
            observations = Observations(found.num_bytes) if number == 0 else found
            turn(server, sink.url, path, number, scope, observations)
            say(f"turn {number} of {repeats} is done")
    return found


def turn(server: Server, sink: str, path: Path, number: int, scope: UploadScope, found: Observations) -> None:
    """Run the streams, send the file to the sink and then to the server, with quiet periods between."""
    change(path, number)
    asked = prompts(scope.num_streams, PROMPT_TOKENS, scope.shapes.vocabulary, seed=number)
    requests = [StreamedRequest(text_of(prompt), scope.stream_tokens) for prompt in asked]
    quiet, busy = [], {}
    with running_clients(server.url, requests) as clients:
        clients.wait_for_first_tokens()
        quiet.append(_timed(partial(time.sleep, scope.quiet_s)))
        busy[SINK] = _timed(partial(curl, path, sink))
        quiet.append(_timed(partial(time.sleep, scope.quiet_s)))
        before = server.memory()["VmRSS"]
        server.peak.restart()
        busy[UPLOAD] = _timed(partial(curl, path, f"{server.url}/variants?name=v{number}"))
        found.growth_bytes.append(max(0, server.peak.num_bytes - before))
        for part, peak in server.tree.of_each("VmHWM").values():
            found.peak_bytes[part] = max(peak, found.peak_bytes.get(part, 0))
        quiet.append(_timed(partial(time.sleep, scope.quiet_s)))
        streams = clients.stop().streams
    for name, span in busy.items():
        found.seconds[name].append(span.ended - span.began)
    found.add_gaps(streams, quiet, busy)


def change(path: Path, number: int) -> None:
    """Change one value of the artifact, so that it has another digest."""
    with Artifact.open(path) as artifact:
        start = artifact.header.data_start
    with path.open("r+b") as file:
        file.seek(start)
        file.write(struct.pack("<f", number / 1024))


def curl(path: Path, url: str) -> None:
    """Send a file as the body of a POST.

    Raises:
        RuntimeError: it was not answered 201, or curl is not installed.
    """
    program = shutil.which("curl")
    if program is None:
        raise RuntimeError("curl is not installed: install it, this bench measures uploads with it")
    command = [program, "--silent", "--show-error", "--request", "POST", "--upload-file", str(path)]
    # Without `Expect`, curl does not wait for leave to send the body.
    headers = ["--header", "Content-Type: application/octet-stream", "--header", "Expect:"]
    ran = subprocess.run(
        [*command, *headers, "--write-out", "\n%{http_code}", url],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode or not ran.stdout.endswith("201"):
        raise RuntimeError(f"the upload was answered {ran.stdout} {ran.stderr}")


def goals(found: Observations) -> list[Goal]:
    """Compare the figures with their limits."""
    gaps, growth = p99(found.busy[UPLOAD]) / p99(found.quiet), max(found.growth_bytes) / 2**20
    return [
        at_most("p99 between tokens, uploading / quiet", gaps, MAX_P99_RATIO),
        at_least(
            "rate of the upload / curl into a file", found.rates[UPLOAD] / found.rates[SINK], MIN_RATE_RATIO
        ),
        at_most("server's growth, MiB", growth, MAX_GROWTH_MIB),
    ]


def gap_table(found: Observations, scope: UploadScope) -> str:
    quiet = p99(found.quiet)
    cases = {"nothing else": found.quiet, **found.busy}
    rows = [
        (name, f"{1e3 * median(gaps):.1f}", f"{1e3 * p99(gaps):.1f}", f"{p99(gaps) / quiet:.2f}")
        for name, gaps in cases.items()
    ]
    return table(
        (f"between tokens of {scope.num_streams} streams", "median, ms", "p99, ms", "of quiet p99"), rows
    )


def rate_table(found: Observations) -> str:
    rows = [
        (name, f"{median(found.seconds[name]):.2f}", f"{rate / 1e6:.0f}", f"{rate / found.rates[SINK]:.2f}")
        for name, rate in found.rates.items()
    ]
    return table(("beside the streams", "seconds", "MB/s", "of curl into a file"), rows)


def memory_line(found: Observations) -> str:
    parts = ", ".join(f"{part} {peak / 1e6:.0f}" for part, peak in found.peak_bytes.items())
    return f"Peak resident memory while uploads run, MB: {parts}."


def _timed(work: Callable[[], object]) -> Span:
    began = time.perf_counter()
    work()
    return Span(began, time.perf_counter())


def report(args: Namespace) -> Report:
    scope = SMALL_SCOPE if args.small else FULL_SCOPE
    found = measure(args.directory, scope, args.repeats)
    return Report(
        {**asdict(scope), "repeats": args.repeats, "statistic": "median", "page_cache": "warm"},
        found.as_json(),
        [gap_table(found, scope), rate_table(found), memory_line(found)],
        goals(found),
        conditions=f"{found.num_bytes / 1e6:.0f} MB, median of {args.repeats}, page cache warm",
        device=BEST_DEVICE,
    )


OPTIONS = [option("--repeats", 5)]
main = Bench(
    "upload",
    __doc__,
    report,
    OPTIONS,
    small="a few megabytes",
    folder="for the files: a disk with 10 GB of room",
)

if __name__ == "__main__":
    sys.exit(main())
