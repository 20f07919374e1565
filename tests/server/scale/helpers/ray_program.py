"""A program that serves the application on a local Ray, on loopback only, until its standard input ends.

Its argument is a JSON object of `port`, `ray_directory` and the application's arguments. It prints its URL when it
serves.
"""

from __future__ import annotations

import json
import sys

import ray
from ray import serve

from server.scale.app import app

OBJECT_STORE_BYTES = 80_000_000


def main() -> None:
    """Serve, and end every process of Ray."""
    args = json.loads(sys.argv[1])
    port = args.pop("port")
    ray.init(
        address="local",
        num_cpus=2,  # as many as engines
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        _temp_dir=args.pop("ray_directory"),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(args), name="peraxis", route_prefix="/")
    print(f"http://127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


if __name__ == "__main__":
    main()
