"""The router inside a real Ray Serve, in front of replicas that have slots and no model."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

pytest.importorskip("ray", reason="needs the extra ray: pip install -e '.[ray]'")

from ray import serve

from server.scale.routing import PinnedReplicaGone, Route
from tests.server.scale.helpers.fake_engines import (
    CAPACITY,
    ENGINES,
    INGRESS,
    NUM_SLOTS,
    Handle,
    generating,
    is_reported,
    num_known,
    states,
    where,
)
from tests.server.scale.helpers.local_ray import until

pytestmark = pytest.mark.deploy


@pytest.fixture
def engines(serve_port: int) -> Iterator[Handle]:
    """Yield a handle of two new replicas that have both reported."""
    handle = serve.run(ENGINES.bind(), name="fake", route_prefix=None)
    until(lambda: num_known(handle) == 2)
    yield handle
    handle.broadcast("release").results(timeout_s=30)
    serve.delete("fake")


def test_each_variant_returns_to_its_replica_and_both_are_used(engines: Handle) -> None:
    digests = [f"{number:064x}" for number in range(2 * NUM_SLOTS - 2)]
    places = {}
    for digest in digests:
        places[digest] = where(engines, digest)
        # A variant on its way counts as held for two seconds, and reports can take longer on a busy machine.
        until(partial(is_reported, engines, digest))
    for _ in range(4):
        assert {digest: where(engines, digest) for digest in digests} == places
    found = states(engines)
    assert set(places.values()) == set(found)
    assert sum(state["loads"] for state in found.values()) == len(digests)


def test_a_hot_variant_spreads_and_a_burst_loads_it_once_on_each_replica(engines: Handle) -> None:
    held = [generating(engines, "hot", is_held=True) for _ in range(3 * CAPACITY)]
    places = Counter(next(one) for one in held)
    assert len(places) == 2
    assert min(places.values()) >= CAPACITY
    assert [state["loads"] for state in states(engines).values()] == [1, 1]


def test_a_pinned_call_reaches_its_replica(engines: Handle) -> None:
    for name in states(engines):
        for _ in range(3):
            route = Route("other", pinned_replica=name)
            assert engines.state.remote(route=route).result(timeout_s=30)["replica"] == name


def test_calls_go_on_when_a_replica_is_killed_and_those_pinned_to_it_fail(engines: Handle) -> None:
    first = where(engines, "v")
    os.kill(states(engines)[first]["pid"], signal.SIGKILL)
    second = where(engines, "v")
    assert second != first
    with pytest.raises(PinnedReplicaGone, match=first):
        engines.state.remote(route=Route(pinned_replica=first)).result(timeout_s=30)
    assert where(engines, None) == second


def test_a_replica_whose_reports_stand_still_gets_no_more_than_its_turn(engines: Handle) -> None:
    """The calls that a router has open count, even where no report says so."""
    engines.broadcast("freeze").results(timeout_s=30)
    held = [generating(engines, None, is_held=True) for _ in range(2 * CAPACITY)]
    assert sorted(Counter(next(one) for one in held).values()) == [CAPACITY, CAPACITY]


def test_calls_of_one_http_request_are_all_assigned(serve_port: int) -> None:
    handle = serve.run(INGRESS.bind(ENGINES.bind()), name="several", route_prefix=None)
    assert len(handle.ask.remote(16).result(timeout_s=60)) == 16
    serve.delete("several")
