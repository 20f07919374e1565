"""Record anew what stock clients send: `python -m tests.clients.record [CLIENT ...]`, by default all of them."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from tests.clients.helpers.relay import relay_to
from tests.clients.helpers.sessions import CLIENTS, RECORDED, Client, names_of, session
from tests.server.helpers.live_server import live_server, make_artifacts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.record", description=__doc__)
    parser.add_argument(
        "clients", nargs="*", metavar="CLIENT", help=", ".join(client.name for client in CLIENTS)
    )
    names = parser.parse_args().clients
    if unknown := set(names) - {client.name for client in CLIENTS}:
        parser.error(f"unknown clients: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as scratch:
        artifacts = make_artifacts(Path(scratch))
        with live_server(artifacts.base, Path(scratch) / "registry") as server:
            server.upload("chatty", artifacts.chatty).raise_for_status()
            for client in CLIENTS:
                if client.name in names or not names:
                    record(client, server.url)


def record(client: Client, url: str) -> None:
    """Write the requests of a client's session, one a file."""
    directory = RECORDED / client.name
    with relay_to(url) as relay:
        requests = {
            name: request for step in session(client, relay) for name, request in names_of(step).items()
        }
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, request in requests.items():
        (directory / f"{name}.http").write_bytes(request)
    print(f"{client.name}: {len(requests)} requests")


if __name__ == "__main__":
    main()
