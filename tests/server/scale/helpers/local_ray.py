"""A Ray cluster of one node on loopback, in processes of its own that end with the test session."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig

# More than the machine has: replicas of tests wait more than they compute.
NUM_CPUS = 16


@contextmanager
def local_ray(port: int) -> Iterator[None]:
    """Start Ray and Serve's proxy on a port of loopback; end both."""
    before = signal.getsignal(signal.SIGTERM)
    ray.init(
        num_cpus=NUM_CPUS,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=100 << 20,
        _node_ip_address="127.0.0.1",
    )
    # Ray has taken SIGTERM for itself; tests that follow raise it.
    signal.signal(signal.SIGTERM, before)
    try:
        serve.start(
            http_options=HTTPOptions(host="127.0.0.1", port=port),
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
        yield
        serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: not within 30 s.
    """
    end = time.monotonic() + 30
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.05)
