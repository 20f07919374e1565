"""Kill processes of a server at random moments under load, and check what survives.

Each turn kills an engine, an HTTP process or a text worker with SIGKILL. Replies that come to their end must have the
tokens of an undisturbed run; at the end no process, socket or shared memory may be left.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.client import StreamedRequest, read_stream
from bench.engine import SMALL, prompts, text_of, write_base
from bench.harness import Bench, Report, option
from bench.process import CALL_S, Server, part_of, serve_command, serving
from deltastore.console import table

PARTS = ("engine", "http_process", "workers")
NUM_PROMPTS = 8
NUM_CLIENTS = 8
PROMPT_TOKENS = 16
NEW_TOKENS = 200
READY_S = 60.0
# Between a ready server and the next kill, at most.
MAX_PAUSE_S = 1.0
POLL_S = 0.1
REFUSED_S = 0.5  # until a client whose stream was lost asks again
# Connections that are asked, so that every HTTP process is.
NUM_ASKED = 8


@dataclass(slots=True)
class Outcome:
    """Counts of a run."""

    kills: Counter[str] = field(default_factory=Counter)
    # Identical, differing, ended with an error, cut off.
    streams: Counter[str] = field(default_factory=Counter)
    ready_s: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    leaked: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.leaked and not self.streams["differing"]

    def as_json(self) -> dict[str, Any]:
        return {
            "kills": dict(self.kills),
            "streams": dict(self.streams),
            "ready_s": self.ready_s,
            "leaked": self.leaked,
        }


def measure(directory: Path, num_kills: int, chance: random.Random) -> Outcome:
    """Kill a process `num_kills` times under load."""
    base, found = write_base(directory / "base", SMALL), Outcome()
    runtime = directory / "runtime"
    runtime.mkdir()
    command = serve_command(base, directory / "registry", "--http-workers", 2, "--max-restarts", 1000)
    environment = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime)}
    shared_before = set(os.listdir("/dev/shm"))
    # Each request has a connection of its own, so that every HTTP process is asked.
    limits = httpx.Limits(max_keepalive_connections=0)
    with (
        serving(command, environment) as server,
        httpx.Client(base_url=server.url, timeout=CALL_S, limits=limits) as client,
    ):
        expected = expected_texts(server)
        with under_load(client, expected, found):
            for _ in range(num_kills):
                time.sleep(chance.random() * MAX_PAUSE_S)
                kill_one(server, client, found, chance)
        descendants = psutil.Process(server.process.pid).children(recursive=True)
    found.leaked += [name for each in descendants if (name := part_name(each))]
    found.leaked += sorted(set(os.listdir("/dev/shm")) - shared_before)
    found.leaked += sorted(path.name for path in runtime.iterdir())
    return found


def expected_texts(server: Server) -> dict[str, str]:
    """Return the answer to each prompt in an undisturbed run."""
    asked = [text_of(prompt) for prompt in prompts(NUM_PROMPTS, PROMPT_TOKENS, SMALL.vocabulary)]
    return {prompt: server.generate(None, prompt, NEW_TOKENS)["outputs"][0]["text"] for prompt in asked}


@contextmanager
def under_load(client: httpx.Client, expected: dict[str, str], found: Outcome) -> Iterator[None]:
    """Keep `NUM_CLIENTS` streams running within the block."""
    stopped, lock = threading.Event(), threading.Lock()

    def ask(number: int) -> None:
        chance = random.Random(number)
        while not stopped.is_set():
            prompt = chance.choice(sorted(expected))
            outcome = stream_outcome(client, prompt, expected[prompt])
            with lock:
                found.streams[outcome] += 1
            if outcome not in ("identical", "differing"):
                time.sleep(REFUSED_S)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        running = [pool.submit(ask, number) for number in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            stopped.set()
    for each in running:
        each.result()


def stream_outcome(client: httpx.Client, prompt: str, expected: str) -> str:
    """Stream one answer and compare it."""
    stream = read_stream(client, StreamedRequest(prompt, NEW_TOKENS))
    if stream.outcome == "error":
        return "ended with an error"
    if stream.outcome in ("done", "incomplete"):
        return "identical" if stream.outcome == "done" and stream.text == expected else "differing"
    return stream.outcome


def kill_one(server: Server, client: httpx.Client, found: Outcome, chance: random.Random) -> None:
    """Kill a random process and wait until the server is ready again.

    Raises:
        RuntimeError: it is not ready within `READY_S`.
    """
    part = chance.choice(PARTS)
    alive = [each for each in descendants_of(server) if part_name(each) == part]
    if not alive:
        return
    killed = chance.choice(alive)
    killed.kill()
    start = time.perf_counter()
    found.kills[part] += 1
    while killed.is_running() and killed.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    num_before = len(alive)
    while not is_ready(server, client, part, num_before):
        if time.perf_counter() - start > READY_S:
            raise RuntimeError(f"the server is not ready {READY_S:g} s after a kill of {part}")
        time.sleep(POLL_S)
    found.ready_s[part].append(time.perf_counter() - start)


def descendants_of(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def part_name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return part_of(process.cmdline())
    return ""


def is_ready(server: Server, client: httpx.Client, part: str, num_processes: int) -> bool:
    """Return whether every HTTP process is ready; workers are started again only when they are needed."""
    if part != "workers" and [part_name(each) for each in descendants_of(server)].count(part) < num_processes:
        return False
    try:
        return all(client.get("/ready").status_code == 200 for _ in range(NUM_ASKED))
    except httpx.TransportError:
        return False


def kill_table(found: Outcome) -> str:
    """Return the kills of each part, and the seconds until the server was ready again."""
    rows = [
        [part, str(found.kills[part]), f"{max(times, default=0.0):.1f}"]
        for part, times in found.ready_s.items()
    ]
    return table(["killed", "times", "ready after at most, s"], rows)


def report(args: Namespace) -> Report:
    """Measure; the command fails when tokens differed or something was left."""
    found = measure(args.directory, args.kills, random.Random(args.seed))
    return Report(
        {"kills": args.kills, "seed": args.seed, "clients": NUM_CLIENTS},
        found.as_json(),
        [kill_table(found), f"{dict(found.streams)}; left: {found.leaked}"],
        is_failed=not found.is_clean,
    )


OPTIONS = (option("--kills", 100), option("--seed", 0))
main = Bench("chaos", __doc__, report, OPTIONS, folder="for the base and the registry")

if __name__ == "__main__":
    sys.exit(main())
