"""The environment in which Ray Serve starts HAProxy. Imports no Ray."""

from __future__ import annotations

from pathlib import Path


def haproxy_environment(directory: Path, is_on: bool) -> dict[str, str]:
    """Return the variables of Ray Serve that turn HAProxy on or off, with all its files in a directory.

    By default they lie in one directory of the machine, and a replica of the ingress ends after 30 s without requests.
    """
    paths = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "SERVER_STATE_BASE": ".",
        "SERVER_STATE_FILE": "server-state",
    }
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(is_on)),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        **{f"RAY_SERVE_HAPROXY_{name}": str(directory / path) for name, path in paths.items()},
    }
