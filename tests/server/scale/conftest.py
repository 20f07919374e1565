"""One local Ray for all tests of this folder, because it takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench.process import free_port

# Before ray is imported.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"
# Ray's processes have a niceness of 15 by default, so that on a busy machine they hardly run, and Serve kills a proxy
# that is not ready after 5 s.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (its name)
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "120"
os.environ["RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S"] = "120"
# Seconds between what handles and replicas tell the autoscaler, so that its tests need not wait.
os.environ["RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.2"
os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.2"


@pytest.fixture(scope="session")
def serve_port() -> Iterator[int]:
    """Yield the port of Serve's proxy in a Ray of its own."""
    pytest.importorskip("ray", reason="needs the extra ray: pip install -e '.[ray]'")
    from tests.server.scale.helpers.local_ray import local_ray

    port = free_port()
    with local_ray(port):
        yield port
