"""Simulate 64 replicas and 10,000 variants under Zipf, with the server's routing code beside random and hashing ones.

Requests come as a Poisson process, and their times alone are exponential. Reports of the replicas reach the routers at
intervals; consistent hashing with bounded loads knows every replica's open requests at every moment. Times of requests
and loads are parameters: nothing here is a measurement of a GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch

from bench.report import RESULTS, write_result
from bench.simulation.cluster import Clock, Found, Replica, ReplicaScope, SimulatedRequest
from bench.simulation.policies import BoundedHashing, Policy, Random, Routers
from peraxis.demo.table import table
from server.scale.routing import Costs


@dataclass(frozen=True, slots=True)
class SimulationScope:
    """Sizes of a run."""

    num_replicas: int = 64
    num_variants: int = 10_000
    exponent: float = 1.0  # of Zipf's law
    # Of the requests that full batches could answer.
    load: float = 0.7
    mean_alone_s: float = 2.0
    warm_up_s: float = 60.0
    counted_s: float = 120.0
    num_routers: int = 8
    replica: ReplicaScope = field(default_factory=ReplicaScope)

    @property
    def requests_per_s(self) -> float:
        # In a full batch a request takes twice its time alone.
        return self.load * self.num_replicas * self.replica.capacity / (2 * self.mean_alone_s)


SMALL_SCOPE = SimulationScope(num_replicas=4, num_variants=200, warm_up_s=5, counted_s=10, num_routers=2)
PLACES: tuple[Found, ...] = ("slot", "loading", "host", "disk")
REPORT_INTERVAL_S = {"peraxis, reports every 0.25 s": 0.25, "peraxis, reports every 1 s": 1.0}
POLICIES: dict[str, Callable[[Sequence[Replica], SimulationScope], Policy]] = {
    "peraxis, reports every 0.25 s": lambda replicas, scope: _routers(replicas, scope),
    "peraxis, reports every 1 s": lambda replicas, scope: _routers(replicas, scope),
    "random": lambda replicas, scope: Random(replicas, random.Random(1)),
    "consistent hashing": lambda replicas, scope: BoundedHashing(replicas, float("inf")),
    "bounded hashing, 1.25": lambda replicas, scope: BoundedHashing(replicas, 1.25),
}


def simulate(name: str, scope: SimulationScope) -> dict[str, Any]:
    """Run one policy and return its figures, of the requests that came after the warm-up and have started."""
    clock, requests = Clock(), list[SimulatedRequest]()
    replicas = [
        Replica(f"replica-{number}", scope.replica, clock, lambda one, _: policy.ended(one))
        for number in range(scope.num_replicas)
    ]
    policy = POLICIES[name](replicas, scope)
    generator = random.Random(0)
    weights = list(accumulate(1 / rank**scope.exponent for rank in range(1, scope.num_variants + 1)))

    def arrive() -> None:
        variant = f"{bisect(weights, generator.random() * weights[-1]):08x}"
        request = SimulatedRequest(variant, generator.expovariate(1 / scope.mean_alone_s), clock.now_s)
        if clock.now_s >= scope.warm_up_s:
            requests.append(request)
        policy.choose(variant).submit(request)
        clock.after(generator.expovariate(scope.requests_per_s), arrive)

    def report() -> None:
        policy.observe(replicas)
        clock.after(REPORT_INTERVAL_S[name], report)

    arrive()
    if name in REPORT_INTERVAL_S:
        report()
    clock.run(scope.warm_up_s + scope.counted_s)
    return _figures(requests, replicas)


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    scope = SMALL_SCOPE if args.small else SimulationScope()
    found = {}
    for name in POLICIES:
        found[name] = simulate(name, scope)
        print(f"{name} is done", file=sys.stderr, flush=True)
    device = torch.device("cpu")
    print(f"{scope.requests_per_s:.0f} requests/s\n\n{_table(found)}")
    if out := args.out or (None if args.small else RESULTS / "simulation.json"):
        write_result(out, "simulation", device, {"settings": asdict(scope), "results": found})


def _routers(replicas: Sequence[Replica], scope: SimulationScope) -> Policy:
    sizes = scope.replica
    costs = Costs(
        service_s=scope.mean_alone_s,
        load_from_host_s=sizes.load_from_host_s,
        load_from_disk_s=sizes.load_from_disk_s,
    )
    return Routers(replicas, costs, scope.num_routers)


def _figures(requests: Sequence[SimulatedRequest], replicas: Sequence[Replica]) -> dict[str, Any]:
    started = [one for one in requests if one.started_s >= 0]
    delays = [one.started_s - one.arrived_s for one in started]
    shares = Counter(one.found for one in requests)
    num_open = [one.num_open for one in replicas]
    return {
        "num_requests": len(requests),
        "not_started": len(requests) - len(started),
        **{f"found_{place}": round(shares[place] / len(requests), 4) for place in PLACES},
        "delay_median_s": round(median(delays), 4),
        "delay_p99_s": round(quantiles(delays, n=100)[-1], 4),
        "most_open_to_mean": round(max(num_open) / mean(num_open), 2),
    }


def _table(found: dict[str, dict[str, Any]]) -> str:
    heads = ("", *PLACES, "delay, median s", "p99, s", "never started", "most open / mean")
    rows = [
        (
            name,
            *(f"{100 * one[f'found_{place}']:.1f}%" for place in PLACES),
            f"{one['delay_median_s']:.3f}",
            f"{one['delay_p99_s']:.3f}",
            str(one["not_started"]),
            f"{one['most_open_to_mean']:.2f}",
        )
        for name, one in found.items()
    ]
    return table(heads, rows)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.simulation", description=__doc__)
    parser.add_argument("--small", action="store_true", help="four replicas; writes JSON only with --out")
    parser.add_argument("--out", type=Path, help="the JSON file; bench/results/simulation.json by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
