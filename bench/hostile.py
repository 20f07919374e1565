"""Measure the streams of one tenant while another one, a page or a slow client attacks the server.

Two honest streams of a variant with its own tokenizer run on `peraxis serve` with API keys. Beside them a client in a
process of its own sends the requests of an attack for as long as they run, then as many to a sink: the control, which
takes the same from the processors. Attacks that fill the batch are compared with other honest tenants that fill it with
prompts as long, and those of one trick with the same load without it: `begun-queue` with as many requests of one
version, `pipelining` with as many on few connections, each after the reply to the one before, `unread-streams` with the
same streams that are read. Each attack has a server of its own. Two attacks at once are given as `one+other`, and have
both controls at once; each is of a tenant of its own. With `--minutes` an attack goes on for so long, and the sizes of
all processes must be level: the largest of its last third is compared with that of the third before.
Meanwhile the honest tenant asks for `/health`, lists, an upload and a short greedy stream, whose time to the first
token is compared, too, and the operator scrapes `/metrics`; none of these may be refused. A minute after each attack,
the memory of each process is compared with that after the start.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx

from bench.attacker import Sent, attacking
from bench.attacks import (
    HOARDER,
    KINDS,
    SMALL_SIZES,
    TENANTS,
    Attack,
    Sizes,
    attacks,
    publish_hostile,
    publish_public,
)
from bench.client import StreamedRequest, gap_seconds, read_stream, read_streams
from bench.engine import SHAPES, SMALL, prompts, publish, text_of, tokenizer_files, write_base
from bench.harness import CPU, Bench, Report, fixed, machine, ms, option, p99, table_of, text
from bench.process import Server, serve_command, serving
from bench.synthetic import LlamaShapes, write_delta, write_norm_delta
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.registry import Registry
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.tenant import Role

HONEST = "honest"
# Between the names of attacks that run at once.
TOGETHER = "+"
PROMPT_TOKENS = 32
# Between two rounds of calls. A round has a scrape in each `SCRAPE_EVERY`.
ROUND_S = 0.25
SCRAPE_EVERY = 8


@dataclass(slots=True)
class Watched:
    """The outcome of the honest tenant's calls."""

    health_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    num_calls: int = 0
    is_same: bool = True  # the text of each greedy request


class HonestTenant:
    """An honest tenant's client, and the operator's.

    Args:
        keys: of the honest tenant and of a scraper; both None without keys.
        artifact: published in each measurement, under a new name.
    """

    def __init__(
        self,
        url: str,
        keys: tuple[str | None, str | None],
        artifact: Path,
        shapes: LlamaShapes,
        num_streams: int,
        num_new: int,
    ) -> None:
        texts = [text_of(one, "x") for one in prompts(num_streams, PROMPT_TOKENS, shapes.vocabulary)]
        key, scraper = keys
        self._streams = [StreamedRequest(text, num_new, "v1", key=key) for text in texts]
        self._url = url
        self._client = httpx.Client(base_url=url, headers=_headers(key), timeout=600.0)
        self._operator = httpx.Client(base_url=url, headers=_headers(scraper), timeout=600.0)
        self._artifact = artifact.read_bytes()
        self._num_uploads = 0
        self._request = StreamedRequest(texts[0], 4, "v1")
        first = read_stream(self._client, self._request)
        if first.outcome != "done":
            raise RuntimeError(f"the honest tenant's first request was {first.outcome}")
        self._expected = first.text

    def close(self) -> None:
        self._client.close()
        self._operator.close()

    def gaps(self) -> list[float]:
        """Read all streams to their ends and return the seconds between their tokens."""
        return gap_seconds(read_streams(self._url, self._streams).streams)

    def is_served(self) -> bool:
        """Ask for the greedy output once; False if that is refused.

        Raises:
            RuntimeError: another output came.
        """
        answer = read_stream(self._client, self._request)
        if answer.outcome == "done" and answer.text != self._expected:
            raise RuntimeError("the honest tenant got another output than before")
        return answer.outcome == "done"

    @contextmanager
    def watching(self) -> Iterator[Watched]:
        """Make the honest calls while the block runs."""
        watched, over = Watched(), threading.Event()
        thread = threading.Thread(target=self._watch, args=(watched, over))
        thread.start()
        try:
            yield watched
        finally:
            over.set()
            thread.join()

    def _watch(self, watched: Watched, over: threading.Event) -> None:
        self._publish(watched)
        for number in count():
            start = time.perf_counter()
            self._call(watched, self._client, "GET", "/health")
            watched.health_s.append(time.perf_counter() - start)
            if number % SCRAPE_EVERY == 0:
                self._call(watched, self._operator, "GET", "/metrics")
            else:
                self._call(
                    watched, self._client, "GET", ("/variants/v1", "/v1/models/v1", "/v1/models")[number % 3]
                )
            self._generate(watched)
            if over.wait(ROUND_S):
                return

    def _generate(self, watched: Watched) -> None:
        watched.num_calls += 1
        answer = read_stream(self._client, self._request)
        if answer.outcome != "done":
            watched.refused[f"POST {self._request.path.partition('?')[0]}: {answer.outcome}"] += 1
            return
        watched.first_token_s.append(answer.times.first_token_s)
        watched.is_same &= answer.text == self._expected

    def _publish(self, watched: Watched) -> None:
        self._num_uploads += 1
        headers = {"Content-Type": "application/octet-stream"}
        name = f"upload-{self._num_uploads}"
        self._call(
            watched, self._client, "POST", f"/variants?name={name}", content=self._artifact, headers=headers
        )

    def _call(self, watched: Watched, client: httpx.Client, method: str, path: str, **body: Any) -> None:
        watched.num_calls += 1
        try:
            reply = client.request(method, path, **body)
            is_refused, outcome = reply.is_error, str(reply.status_code)
        except httpx.TransportError as error:
            is_refused, outcome = True, type(error).__name__
        if is_refused:
            watched.refused[f"{method} {path.partition('?')[0]}: {outcome}"] += 1


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"X-API-Key": key}


# Other honest tenants.
CROWD = ("crowd-1", "crowd-2", "crowd-3", "crowd-4")
SCRAPER = "scraper"
# Gives an attack time to occupy what it can.
HEAD_START_S = 2.0
# After an attack, until memory counts again.
REST_S = 60.0
MAX_RATIO = 1.5
MAX_HEALTH_S = 0.2
# A minute later a process may have so much of its size after the start, and so much more.
MAX_GROWTH, FREE_GROWTH = 1.2, 64 << 20
# While an attack goes on for minutes, a process may grow by so much of its size, and so much more.
MAX_RISE, FREE_RISE = 1.1, 16 << 20
KV_CACHE_GB = 0.5
# What a process may take above its size after the start; docs/security.md says what for. The engine's pages and slots
# are counted by Linux when they are first used.
BUDGETS = {
    "peraxis": 64 << 20,
    "engine": 10**9 + int(KV_CACHE_GB * 10**9),
    "http_process": 768 << 20,
    "workers": 2 << 30,
}


@dataclass(frozen=True, slots=True)
class HostileScope:
    """Sizes of a run."""

    shapes: LlamaShapes
    sizes: Sizes = field(default_factory=Sizes)
    num_streams: int = 2
    num_new: int = 120
    rest_s: float = REST_S
    max_connections: int = 256
    minutes: float = 0.0  # that an attack lasts at least


DEFAULT_SHAPES = "1.1b"
SMALL_SCOPE = HostileScope(SMALL, SMALL_SIZES, num_new=16, rest_s=0.0, max_connections=32)


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of the largest process of one kind."""

    start: int
    peak: int
    later: int
    rounds: Sequence[int] = ()  # after each round of the honest streams

    @property
    def is_level(self) -> bool:
        """True if it grew no more in the last third of an attack of six rounds or more."""
        third = len(self.rounds) // 3
        if third < 2:
            return True
        return max(self.rounds[-third:]) <= MAX_RISE * max(self.rounds[-2 * third : -third]) + FREE_RISE

    @property
    def is_given_back(self) -> bool:
        return self.later <= MAX_GROWTH * self.start + FREE_GROWTH

    def is_within(self, budget: int) -> bool:
        return self.peak <= self.start + budget


@dataclass(frozen=True, slots=True)
class Beside:
    """Figures of the honest tenant beside one attack and beside its control."""

    attack: str
    control_s: Sequence[float]  # gaps between tokens
    beside_s: Sequence[float]
    control: Watched
    watched: Watched
    sent: Sent
    memory: Mapping[str, Memory]

    @property
    def ratio(self) -> float:
        return p99(self.beside_s) / p99(self.control_s)

    @property
    def median_ratio(self) -> float:
        return median(self.beside_s) / median(self.control_s)

    @property
    def first_token_ratio(self) -> float | None:
        """The ratio of medians, since a run has some dozens of requests; None if none was answered."""
        if not self.watched.first_token_s or not self.control.first_token_s:
            return None
        return median(self.watched.first_token_s) / median(self.control.first_token_s)

    @property
    def faults(self) -> list[str]:
        """The figures that exceed the goals."""
        peaks = [part for part, memory in self.memory.items() if not memory.is_within(BUDGETS[part])]
        kept = [part for part, memory in self.memory.items() if not memory.is_given_back]
        rising = [part for part, memory in self.memory.items() if not memory.is_level]
        found = {
            "p99": self.ratio > MAX_RATIO,
            "median": self.median_ratio > MAX_RATIO,
            "first token": self.first_token_ratio is None or self.first_token_ratio > MAX_RATIO,
            "/health": max(self.watched.health_s) > MAX_HEALTH_S,
            "refused": bool(self.watched.refused),
            "text": not self.watched.is_same,
        }
        return [
            *(name for name, is_so in found.items() if is_so),
            *(f"peak of {part}" for part in peaks),
            *(f"memory kept by {part}" for part in kept),
            *(f"memory of {part} not level" for part in rising),
        ]

    def results(self) -> dict[str, Any]:
        """Return the figures for the JSON document."""
        return {
            "attack": self.attack,
            **{f"control_{name}": value for name, value in _figures(self.control_s).items()},
            **{f"beside_{name}": value for name, value in _figures(self.beside_s).items()},
            "ratio": round(self.ratio, 3),
            "median_ratio": round(self.median_ratio, 3),
            "control_first_token_s": [round(seconds, 4) for seconds in self.control.first_token_s],
            "beside_first_token_s": [round(seconds, 4) for seconds in self.watched.first_token_s],
            "first_token_ratio": self.first_token_ratio,
            "same_text": self.watched.is_same,
            "health_s": round(max(self.watched.health_s), 4),
            "honest_calls": self.watched.num_calls,
            "honest_refused": dict(self.watched.refused),
            "replies": dict(self.sent.replies),
            "seconds": round(self.sent.seconds, 1),
            "memory_bytes": {part: asdict(memory) for part, memory in self.memory.items()},
            "not_met": self.faults,
        }


class World(NamedTuple):
    """A base, everybody's variants, and the artifact that the honest tenant publishes meanwhile."""

    base: Path
    registry: Registry
    upload: Path


@dataclass(slots=True)
class ServedWorld:
    """A server with everybody's keys, and its sizes after the start."""

    server: Server
    sink: str
    honest: HonestTenant
    hostile: Mapping[str, str]  # keys by tenant; empty without keys
    crowd: list[str]
    start: Mapping[str, int]

    def keys_of(self, attack: Attack, number: int = 0) -> list[str]:
        """Return the key of an attack's requests, if they have one; `number` counts the attacks at once."""
        if attack.tenant is None or not self.hostile:
            return []
        return [self.hostile[TENANTS[number] if attack.tenant in TENANTS else attack.tenant]]

    def measure(self, together: Sequence[Attack], scope: HostileScope) -> Beside:
        """Run attacks at once, then their controls."""
        self.server.tree.restart_peaks()
        with ExitStack() as running:
            sent = [
                running.enter_context(
                    attacking(attack, scope.sizes, self.server.url, self.keys_of(attack, number))
                )
                for number, attack in enumerate(together)
            ]
            time.sleep(HEAD_START_S)
            with self.honest.watching() as watched:
                beside, rounds = self._streams(scope.minutes)
        peaks, ended = _largest(self.server, "VmHWM"), time.monotonic()
        with ExitStack() as running:
            for number, (attack, one) in enumerate(zip(together, sent, strict=True)):
                running.enter_context(self._control(attack, scope, one, self.keys_of(attack, number)))
            time.sleep(HEAD_START_S)
            with self.honest.watching() as control:
                gaps = self.honest.gaps()
        time.sleep(max(0.0, scope.rest_s - (time.monotonic() - ended)))
        later = _largest(self.server, "VmRSS")
        memory = {
            part: Memory(
                self.start[part], peaks[part], later.get(part, 0), [one.get(part, 0) for one in rounds]
            )
            for part in peaks
            if part in self.start
        }
        return Beside(_name(together), gaps, beside, control, watched, _all(sent), memory)

    def _streams(self, minutes: float) -> tuple[list[float], list[dict[str, int]]]:
        """Read the honest streams, again until so many minutes have passed.

        Returns:
            the seconds between tokens, and the sizes of processes after each round, in bytes.
        """
        end = time.monotonic() + 60 * minutes
        gaps, sizes = self.honest.gaps(), [_largest(self.server, "VmRSS")]
        while time.monotonic() < end:
            gaps += self.honest.gaps()
            sizes.append(_largest(self.server, "VmRSS"))
        return gaps, sizes

    def _control(
        self, attack: Attack, scope: HostileScope, sent: Sent, keys: Sequence[str]
    ) -> AbstractContextManager[Sent]:
        """Return the control of an attack that has sent requests."""
        url = self.server.url
        if attack.control is None:
            return attacking(attack, scope.sizes, self.sink, keys, sent.interval_s)
        other = attacks(scope.sizes)[attack.control]
        if other.is_own_control:
            return attacking(other, scope.sizes, url, keys, sent.interval_s)
        return attacking(other, scope.sizes, url, self.crowd)


def _name(together: Sequence[Attack]) -> str:
    return TOGETHER.join(attack.kind for attack in together)


def _all(sent: Sequence[Sent]) -> Sent:
    """Return what attacks that ran at once have sent."""
    replies: Counter[str] = Counter()
    for one in sent:
        replies.update(one.replies)
    return Sent(replies, max(one.seconds for one in sent))


def _kept(out: Path, scope: HostileScope, measured: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of other attacks that a file has of this machine and these settings.

    Each is beside a control of its own, so they need not be of one run; each keeps its date.
    """
    if not out.exists():
        return []
    old = json.loads(out.read_text())
    # A kernel leaves some KB more or less of the memory than another one.
    old_machine, this = (
        {**facts, "memory_bytes": facts["memory_bytes"] >> 30} for facts in (old["machine"], machine(CPU))
    )
    if (old_machine, old["settings"]) != (this, _settings(scope, old["settings"]["sizes"])):
        return []
    return [{"date": old["date"], **one} for one in old["results"] if one["attack"] not in measured]


def _settings(scope: HostileScope, sizes: Collection[str]) -> dict[str, Any]:
    """Return what rows of one document have in common: of the attacks' sizes, those with these names."""
    settings = asdict(scope)
    del settings["minutes"]
    return {**settings, "sizes": {name: settings["sizes"].get(name) for name in sizes}}


def measure(directory: Path, scope: HostileScope, kinds: Sequence[str]) -> list[Beside]:
    """Serve all tenants and measure the honest one beside attacks of these kinds."""
    world = make_world(directory, scope, 1 + any(TOGETHER in kind for kind in kinds))
    known = attacks(scope.sizes)
    found: list[Beside] = []
    for kind in kinds:
        together = [known[one] for one in kind.split(TOGETHER)]
        few = any(attack.few_connections for attack in together)
        flags = ("--max-connections", scope.max_connections) if few else ()
        with serving_all(world, scope, *flags, with_keys=together[0].keys) as subject:
            found.append(subject.measure(together, scope))
        print(f"{kind}: {', '.join(found[-1].faults) or 'met'}", flush=True)
    return found


def make_world(directory: Path, scope: HostileScope, num_hostile: int = 1) -> World:
    """Write the base and everybody's variants, those of so many hostile tenants."""
    base, registry = write_base(directory / "base", scope.shapes), Registry(directory / "registry")
    files = tokenizer_files(directory, scope.shapes)
    identity = Base.of(Checkpoint.open(base))
    variant, upload = directory / "honest.safetensors", directory / "upload.safetensors"
    write_delta(variant, scope.shapes, 1, files, identity)
    write_norm_delta(upload, scope.shapes, 1, files, identity)
    # Without keys, every request is of the tenant `default`.
    for tenant in (HONEST, "default"):
        publish(registry, variant, "v1", tenant)
    for tenant in TENANTS[:num_hostile]:
        publish_hostile(registry, directory, scope.shapes, files, identity, scope.sizes, tenant)
    publish_public(registry, identity, scope.sizes)
    return World(base, registry, upload)


@contextmanager
def serving_all(world: World, scope: HostileScope, *flags: object, with_keys: bool) -> Iterator[ServedWorld]:
    """Serve everybody's variants with these and other flags, with keys for tenants or without."""
    registry = world.registry
    flags = (*flags, "--max-gpu-deltas", 8, "--max-host-cache-gb", 0, "--kv-cache-gb", KV_CACHE_GB)
    keys: dict[str, str] = {}
    if with_keys:
        flags, store = (*flags, "--auth", "keys"), KeyStore(registry.root)
        auditor = Auditor(AuditLog(registry.root))
        roles: dict[str, list[Role]] = {
            HONEST: ["inference", "publish"],
            **{tenant: ["inference", "publish"] for tenant in TENANTS},
            HOARDER: ["publish"],
            SCRAPER: ["metrics"],
        }
        keys = {
            tenant: store.create(auditor, tenant, roles.get(tenant, ["inference"])).text
            for tenant in (HONEST, *TENANTS, HOARDER, SCRAPER, *CROWD)
        }
    with ExitStack() as stack:
        server = stack.enter_context(serving(serve_command(world.base, registry.root, *flags)))
        sink = stack.enter_context(serving([sys.executable, "-m", "bench.sink"]))
        own = keys.get(HONEST), keys.get(SCRAPER)
        honest = HonestTenant(server.url, own, world.upload, scope.shapes, scope.num_streams, scope.num_new)
        stack.callback(honest.close)
        with honest.watching():
            honest.gaps()
        hostile = {tenant: keys[tenant] for tenant in (*TENANTS, HOARDER)} if with_keys else {}
        crowd = [keys[tenant] for tenant in CROWD] if with_keys else []
        yield ServedWorld(server, sink.url, honest, hostile, crowd, _largest(server, "VmRSS"))


def _largest(server: Server, field_name: str) -> dict[str, int]:
    """Return the bytes of the largest running process of each kind."""
    found: dict[str, int] = {}
    for part, num_bytes in server.tree.of_each(field_name).values():
        found[part] = max(found.get(part, 0), num_bytes)
    return found


def _sizes(memory: Mapping[str, Mapping[str, int]], when: str) -> str:
    return ", ".join(f"{part} {sizes[when] / 1e6:.0f}" for part, sizes in sorted(memory.items()))


def _figures(gaps: Sequence[float]) -> dict[str, float]:
    named = {"median_s": median(gaps), "p99_s": p99(gaps), "max_s": max(gaps)}
    return {name: round(value, 5) for name, value in named.items()}


def _kind(text: str) -> str:
    """Check the name of an attack, or those of several at once."""
    kinds = text.split(TOGETHER)
    if not set(kinds) <= set(KINDS) or len({attacks(SMALL_SIZES)[kind].keys for kind in kinds}) > 1:
        raise ArgumentTypeError(f"{text} is no attack, or its attacks need keys and no keys")
    if len(kinds) > len(TENANTS):
        raise ArgumentTypeError(f"{text}: at most {len(TENANTS)} attacks at once")
    return text


COLUMNS = {
    "attack": text("attack"),
    "p99 control, ms": ms("control_p99_s", 0),
    "p99 beside, ms": ms("beside_p99_s", 0),
    "ratio": fixed("ratio", 2),
    "of medians": fixed("median_ratio", 2),
    "of first tokens": lambda row: row["first_token_ratio"] and f"{row['first_token_ratio']:.2f}",
    "slowest /health, ms": ms("health_s", 0),
    "honest calls": text("honest_calls"),
    "refused": lambda row: sum(row["honest_refused"].values()),
    "peaks, MB": lambda row: _sizes(row["memory_bytes"], "peak"),
    "a minute later, MB": lambda row: _sizes(row["memory_bytes"], "later"),
    "not met": lambda row: ", ".join(row["not_met"]),
    "replies to the attacker": lambda row: ", ".join(
        f"{count} x {reply}" for reply, count in sorted(row["replies"].items())
    ),
}


def report(args: Namespace) -> Report:
    scope = replace(SMALL_SCOPE if args.small else HostileScope(SHAPES[args.shapes]), minutes=args.minutes)
    found = [one.results() for one in measure(args.directory, scope, args.attacks)]
    results = [*(_kept(args.out, scope, args.attacks) if args.out else []), *found]
    results.sort(key=lambda one: [KINDS.index(kind) for kind in one["attack"].split(TOGETHER)])
    return Report(_settings(scope, asdict(scope.sizes)), results, [table_of(COLUMNS, found)])


def _file(args: Namespace) -> str:
    """Name the document; the default shapes are not part of it."""
    return "hostile.json" if args.shapes == DEFAULT_SHAPES else f"hostile-{args.shapes}.json"


OPTIONS = [
    option("--shapes", DEFAULT_SHAPES, "of the base", choices=SHAPES),
    option("--attacks", KINDS, f"all by default, one at a time: {', '.join(KINDS)}", nargs="+", type=_kind),
    option("--minutes", 0.0, "each attack lasts so long at least (default: as long as the streams)"),
]
main = Bench(
    "hostile",
    __doc__,
    report,
    OPTIONS,
    small="a tiny model",
    folder="for checkpoints and the registry",
    file=_file,
)

if __name__ == "__main__":
    sys.exit(main())
