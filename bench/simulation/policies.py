"""Ways to choose a replica: the server's router, and what it is compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle
from typing import Protocol

from bench.simulation.cluster import Replica
from server.scale.routing import Costs, VariantRouter


class Policy(Protocol):
    """Chooses replicas. `observe` is called at every report."""

    def observe(self, replicas: Sequence[Replica]) -> None: ...

    def choose(self, variant: str) -> Replica: ...

    def ended(self, replica: Replica) -> None: ...


class Random:
    """Every replica is as likely as any other."""

    def __init__(self, replicas: Sequence[Replica], generator: random.Random) -> None:
        self._replicas = replicas
        self._generator = generator

    def observe(self, replicas: Sequence[Replica]) -> None:
        pass

    def choose(self, variant: str) -> Replica:
        return self._generator.choice(self._replicas)

    def ended(self, replica: Replica) -> None:
        pass


class BoundedHashing:
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016), by rendezvous hashing.

    A variant has an order of replicas. Its requests go to the first whose open requests are at most `bound` times the
    mean of all; an infinite bound is plain consistent hashing. Open requests are known exactly.
    """

    def __init__(self, replicas: Sequence[Replica], bound: float) -> None:
        self._replicas = replicas
        self._bound = bound
        self._orders: dict[str, list[Replica]] = {}

    def observe(self, replicas: Sequence[Replica]) -> None:
        pass

    def choose(self, variant: str) -> Replica:
        if variant not in self._orders:
            # A generator seeded by the variant is a hash of variant and replica.
            self._orders[variant] = random.Random(variant).sample(self._replicas, len(self._replicas))
        most = self._bound * (sum(one.num_open for one in self._replicas) + 1) / len(self._replicas)
        order = self._orders[variant]
        return next((one for one in order if one.num_open < most), order[0])

    def ended(self, replica: Replica) -> None:
        pass


class Routers:
    """Several of the server's routers; each sees a part of the requests, and the reports of all replicas."""

    def __init__(self, replicas: Sequence[Replica], costs: Costs, num_routers: int) -> None:
        self._by_name = {one.name: one for one in replicas}
        self._routers = [VariantRouter(costs) for _ in range(num_routers)]
        self._turns = cycle(self._routers)
        # The router of each open request of a replica, the oldest first: requests of a replica are alike to it.
        self._open: dict[str, list[VariantRouter]] = {one.name: [] for one in replicas}
        self.observe(replicas)

    def observe(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            report = replica.report()
            for router in self._routers:
                router.observe(report)

    def choose(self, variant: str) -> Replica:
        router = next(self._turns)
        name = router.ranked(variant)[0]
        router.sent(name, variant)
        self._open[name].append(router)
        return self._by_name[name]

    def ended(self, replica: Replica) -> None:
        self._open[replica.name].pop(0).ended(replica.name)
