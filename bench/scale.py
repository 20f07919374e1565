"""Measure replicas behind Ray Serve: where variants are resident, the price of the way there, and a killed replica.

Everything runs on one machine, so replicas share its cores and more of them answer no more requests: throughput is
compared between one replica and a plain server alone.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.client import StreamedRequest, StreamEnd, read_stream
from bench.engine import SMALL, publish_variants, write_base
from bench.harness import Bench, Goal, Report, at_least, at_most, fixed, percent, table_of, text
from bench.process import serve_command, serving
from bench.ray_cluster import RANDOM_ROUTER, ROUTER, Node, application, num_running, ray_node
from deltastore.registry import Registry

CALL_S = 120.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests whose variants follow Zipf's law, from clients that each wait for one answer after the other."""

    variants: Sequence[str]
    exponent: float = 1.0
    num_clients: int = 6
    new_tokens: int = 16

    def draw(self, chance: random.Random) -> str:
        weights = [(place + 1) ** -self.exponent for place in range(len(self.variants))]
        return chance.choices(self.variants, weights)[0]


def ask(client: httpx.Client, variant: str | None, new_tokens: int, chance: random.Random) -> bool:
    """Send one request and return whether its variant had to be loaded.

    Raises:
        RuntimeError: it was not answered.
    """
    request = _request(variant, new_tokens, chance)
    reply = client.post(request.path, json={**request.body(), "stream": False})
    if reply.is_error:
        raise RuntimeError(f"{reply.status_code} {reply.text}")
    return bool(reply.json()["timings"]["cold"])


def cold_starts(url: str, traffic: Traffic, num_requests: int) -> int:
    """Send a number of requests and return how many waited for a load."""

    def some(number: int) -> int:
        chance = random.Random(number)
        with httpx.Client(base_url=url, timeout=CALL_S) as client:
            return sum(
                ask(client, traffic.draw(chance), traffic.new_tokens, chance)
                for _ in range(num_requests // traffic.num_clients)
            )

    with ThreadPoolExecutor(traffic.num_clients) as pool:
        return sum(pool.map(some, range(traffic.num_clients)))


def latencies_s(url: str, num_requests: int) -> list[float]:
    """Send requests of one token to the base, one after the other, and return the seconds of each."""
    chance, found = random.Random(0), []
    with httpx.Client(base_url=url, timeout=CALL_S) as client:
        for _ in range(num_requests):
            begun = time.perf_counter()
            ask(client, None, 1, chance)
            found.append(time.perf_counter() - begun)
    return found


def tokens_per_s(url: str, num_clients: int, num_requests: int, new_tokens: int) -> float:
    """Stream answers of the base to clients at the same time and return the rate of all tokens.

    Raises:
        RuntimeError: a stream has no end.
    """

    def some(number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=url, timeout=CALL_S) as client:
            for _ in range(num_requests // num_clients):
                if (ended := read_stream(client, _request(None, new_tokens, chance))).outcome != "done":
                    raise RuntimeError(f"a stream ended with {ended.outcome}")

    begun = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as pool:
        list(pool.map(some, range(num_clients)))
    return num_requests // num_clients * num_clients * new_tokens / (time.perf_counter() - begun)


def stream_until(url: str, traffic: Traffic, stopped: threading.Event) -> list[StreamEnd]:
    """Stream answers until `stopped`, and return all streams."""

    def some(number: int) -> list[StreamEnd]:
        chance, found = random.Random(number), []
        with httpx.Client(base_url=url, timeout=CALL_S) as client:
            while not stopped.is_set():
                variant = traffic.draw(chance)
                found.append(read_stream(client, _request(variant, traffic.new_tokens, chance)))
        return found

    with ThreadPoolExecutor(traffic.num_clients) as pool:
        return [each for found in pool.map(some, range(traffic.num_clients)) for each in found]


def _request(variant: str | None, new_tokens: int, chance: random.Random) -> StreamedRequest:
    # Prompts differ, so that none finds another's pages in the prefix cache.
    prompt = " ".join(f"w{chance.randrange(1, 250)}" for _ in range(16))
    return StreamedRequest(prompt, new_tokens, variant)


MIN_RESIDENT = 0.9
HAPROXY, PROXY = "HAProxy", "Ray Serve's proxy"
# After which no request may fail any more.
MAX_FAILING_S = 5.0
# A replica starts within seconds; where other work keeps the cores, in minutes.
REPLACED_S = 600.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ScaleScope:
    """Sizes of a run."""

    replicas: tuple[int, ...] = (1, 2, 3)
    num_slots: int = 8
    num_variants: int = 20
    num_seqs: int = 8
    requests: int = 600  # counted, for each number of replicas
    latency_requests: int = 60  # of each round
    rate_requests: int = 64  # of each round
    rate_tokens: int = 32
    rounds: int = 3
    before_kill_s: float = 3.0
    after_kill_s: float = 12.0
    stream_tokens: int = 200

    def args(self) -> dict[str, Any]:
        """Return the settings of every engine."""
        return {
            "device": "cpu",
            "max_gpu_deltas": self.num_slots,
            "max_num_seqs": self.num_seqs,
            "max_host_cache_gb": 0,
        }


SMALL_SCOPE = ScaleScope(
    replicas=(2,),
    num_slots=4,
    num_variants=6,
    requests=48,
    latency_requests=5,
    rate_requests=8,
    rate_tokens=8,
    rounds=1,
    before_kill_s=1.0,
    after_kill_s=7.0,
)


@dataclass(frozen=True, slots=True)
class ResidentShare:
    """How often the variant of a request had to be loaded."""

    router: str
    replicas: int
    requests: int
    cold: int

    @property
    def resident_share(self) -> float:
        return 1 - self.cold / self.requests


@dataclass(frozen=True, slots=True)
class Hop:
    """One replica behind Ray Serve beside a plain server, in turns; medians."""

    proxy: str
    plain_ms: float
    ray_ms: float
    plain_tokens_per_s: float
    ray_tokens_per_s: float

    @property
    def throughput_cost(self) -> float:
        return 1 - self.ray_tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True, slots=True)
class Kill:
    """Streams around the SIGKILL of one replica, by how they ended."""

    streams: int
    running: int  # at the kill
    outcomes: dict[str, int]
    failed_begun: int  # that had begun to stream before the kill, and ended with an error event
    failed_otherwise: int
    last_failure_s: float  # after the kill
    replaced_s: float  # until as many replicas run as before


@dataclass(slots=True)
class Measured:
    """All figures of a run."""

    residency: list[ResidentShare] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)
    kill: Kill | None = None

    def goals(self) -> list[Goal]:
        """Compare what the design promises with what was reached."""
        most = max(one.replicas for one in self.residency)
        ours, other = (
            next(one for one in self.residency if one.router == router and one.replicas == most)
            for router in (ROUTER, RANDOM_ROUTER)
        )
        found = [
            at_least(f"share resident at {most} replicas", ours.resident_share, MIN_RESIDENT),
            at_most("cold loads, fewer than with random routing", ours.cold, other.cold - 1),
        ]
        if self.kill is not None:
            otherwise = "streams that fail but had not begun, or without an error event"
            found += [
                at_most(otherwise, self.kill.failed_otherwise, 0),
                at_most("last failure after the kill, s", self.kill.last_failure_s, MAX_FAILING_S),
            ]
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "residency": [{**asdict(one), "resident_share": one.resident_share} for one in self.residency],
            "hops": [{**asdict(one), "throughput_cost": one.throughput_cost} for one in self.hops],
            "kill": None if self.kill is None else asdict(self.kill),
        }


def measure(directory: Path, scope: ScaleScope) -> Measured:
    """Run all parts, one application after the other."""
    base, registry = write_base(directory / "base", SMALL), directory / "registry"
    records = publish_variants(Registry(registry), base, SMALL, scope.num_variants)
    traffic = Traffic([record.name for record in records])
    args = {
        **scope.args(),
        "base": str(base),
        "registry": str(registry),
        "auth": "none",
        "allow_unauthenticated": True,
    }
    found, most = Measured(), max(scope.replicas)
    plain = serve_plain(base, registry, scope)
    with ray_node(has_haproxy=True) as node, application(node, directory, args, num_replicas=1) as url:
        found.hops.append(hop(HAPROXY, url, plain, scope))
    with ray_node() as node:
        with application(node, directory, args, num_replicas=1) as url:
            found.hops.append(hop(PROXY, url, plain, scope))
        for num_replicas in scope.replicas:
            with application(node, directory, args, num_replicas) as url:
                found.residency.append(residency(url, traffic, scope, num_replicas, ROUTER))
                if num_replicas == most:
                    found.kill = kill(node, url, traffic, scope)
        with application(node, directory, args, most, RANDOM_ROUTER) as url:
            found.residency.append(residency(url, traffic, scope, most, RANDOM_ROUTER))
    return found


def serve_plain(base: Path, registry: Path, scope: ScaleScope) -> list[object]:
    """Return the command of a server without Ray and the same settings."""
    flags = [word for name, value in scope.args().items() for word in (f"--{name.replace('_', '-')}", value)]
    return serve_command(base, registry, *flags)


def residency(url: str, traffic: Traffic, scope: ScaleScope, num_replicas: int, router: str) -> ResidentShare:
    """Ask for every variant once, then count the cold ones of the requests that follow."""
    with httpx.Client(base_url=url, timeout=60) as client:
        for variant in traffic.variants:
            ask(client, variant, 1, random.Random(0))
    num_requests = scope.requests // traffic.num_clients * traffic.num_clients
    return ResidentShare(router, num_replicas, num_requests, cold_starts(url, traffic, num_requests))


def hop(proxy: str, url: str, plain: list[object], scope: ScaleScope) -> Hop:
    """Measure both servers in turns, each while the other is idle."""
    seconds: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    with serving(plain) as server:
        for each in (url, server.url):
            latencies_s(each, scope.latency_requests)
        for _ in range(scope.rounds):
            for each in (url, server.url):
                seconds.setdefault(each, []).extend(latencies_s(each, scope.latency_requests))
                rate = tokens_per_s(each, scope.num_seqs, scope.rate_requests, scope.rate_tokens)
                rates.setdefault(each, []).append(rate)
        return Hop(
            proxy,
            plain_ms=1000 * median(seconds[server.url]),
            ray_ms=1000 * median(seconds[url]),
            plain_tokens_per_s=median(rates[server.url]),
            ray_tokens_per_s=median(rates[url]),
        )


def kill(node: Node, url: str, traffic: Traffic, scope: ScaleScope) -> Kill:
    """Kill one replica under load.

    Raises:
        RuntimeError: no other takes its place within `REPLACED_S`.
    """
    stopped, num_before = threading.Event(), num_running()
    load = Traffic(traffic.variants, new_tokens=scope.stream_tokens)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream_until, url, load, stopped)
        try:
            time.sleep(scope.before_kill_s)
            victim = random.Random(0).choice(node.engine_processes())
            known = {each.pid for each in node.engine_processes()}
            victim.kill()
            killed = time.perf_counter()
            replaced_s = _replaced_s(node, known, num_before, killed)
            time.sleep(max(0.0, killed + scope.after_kill_s - time.perf_counter()))
        finally:
            stopped.set()
        return judged(running.result(), killed, replaced_s)


def judged(streams: Sequence[StreamEnd], killed: float, replaced_s: float) -> Kill:
    """Count the streams by how they ended."""
    failed = [one for one in streams if one.outcome != "done"]
    begun = [
        one
        for one in failed
        if one.outcome == "error" and one.times.tokens and one.times.tokens[0] <= killed <= one.ended
    ]
    return Kill(
        streams=len(streams),
        running=sum(one.times.begun <= killed <= one.ended for one in streams),
        outcomes=dict(Counter(one.outcome for one in streams)),
        failed_begun=len(begun),
        failed_otherwise=len(failed) - len(begun),
        last_failure_s=max((one.ended - killed for one in failed), default=0.0),
        replaced_s=replaced_s,
    )


def _replaced_s(node: Node, known: set[int], num_replicas: int, killed: float) -> float:
    while True:
        is_new = any(each.pid not in known for each in node.engine_processes())
        if is_new and num_running() == num_replicas:
            return time.perf_counter() - killed
        if time.perf_counter() - killed > REPLACED_S:
            raise RuntimeError(f"no replica took the place of a killed one within {REPLACED_S:g} s")
        time.sleep(POLL_S)


RESIDENCY = {
    "chosen by": lambda row: "random" if row["router"] == RANDOM_ROUTER else "Peraxis",
    "replicas": text("replicas"),
    "variant resident": percent("resident_share"),
    "cold starts": text("cold"),
}
# Of a replica behind Ray Serve, and of the plain server beside it.
HOPS = {
    "one replica behind": text("proxy"),
    "one token, ms": fixed("ray_ms"),
    "plain, ms": fixed("plain_ms"),
    "tokens/s": fixed("ray_tokens_per_s", 0),
    "plain, tokens/s": fixed("plain_tokens_per_s", 0),
}


def report(args: Namespace) -> Report:
    """Measure; the command fails when a goal was missed."""
    scope = SMALL_SCOPE if args.small else ScaleScope()
    found = measure(args.directory, scope)
    results, goals = found.as_json(), found.goals()
    tables = [table_of(RESIDENCY, results["residency"]), table_of(HOPS, results["hops"])]
    return Report(
        asdict(scope),
        results,
        [*tables, f"kill: {results['kill']}"],
        goals,
        libraries=["ray"],
        is_failed=not all(goal.is_met for goal in goals),
    )


main = Bench("scale", __doc__, report, small="a short run", folder="for the base and the registry")

if __name__ == "__main__":
    sys.exit(main())
