"""Two servers with API keys that share a bucket and nothing else, as processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import obstore
import pytest

from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from tests.helpers.s3_server import Bucket
from tests.server.helpers.live_server import WAIT_S, Artifacts, LiveServer, eventually, live_server

Start = Callable[[str], LiveServer]


@pytest.fixture
def token(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an operator's key, which a command has made in the bucket before there was a server."""
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    auditor = Auditor(AuditLog(bucket.url))
    return KeyStore(bucket.url).create(auditor, "ops", ["inference", "publish", "admin"]).text


@pytest.fixture
def start(artifacts: Artifacts, bucket: Bucket, token: str, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a server with a cache of a name, called with the operator's key."""
    with ExitStack() as servers:

        def start_one(cache: str) -> LiveServer:
            flags = ("--registry", bucket.url, "--registry-cache", tmp_path / cache, "--engine", "inline")
            unused = tmp_path / f"of-{cache}"
            server = servers.enter_context(live_server(artifacts.base, unused, *flags, "--auth", "keys"))
            server.client.headers["Authorization"] = f"Bearer {token}"
            return server

        yield start_one


def as_caller(server: LiveServer, key: str) -> httpx.Response:
    return httpx.get(f"{server.url}/me", headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S)


def me(server: LiveServer, key: str) -> Any:
    return as_caller(server, key).json()


def test_servers_that_share_only_a_bucket_share_variants_keys_and_limits_also_after_a_kill(
    start: Start, artifacts: Artifacts, bucket: Bucket, tmp_path: Path
) -> None:
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(start, ("first", "second"))
    created = first.upload("plain", artifacts.plain)
    assert created.status_code == 201, created.text
    assert first.token_ids("plain") == second.token_ids("plain")
    digest = created.json()["digest"].removeprefix("sha256:")
    assert (tmp_path / "second" / "objects" / digest).read_bytes() == artifacts.plain.read_bytes()

    made = first.client.post("/keys", json={"tenant": "acme", "roles": ["inference", "publish"]}).json()
    assert as_caller(second, made["key"]).status_code == 200
    assert as_caller(second, made["key"][:-4] + "0000").status_code == 401
    limits = {"requests_per_minute": 7}
    assert first.client.put("/tenants/acme", json=limits).is_success
    assert eventually(lambda: me(second, made["key"])["limits"]["requests_per_minute"] == 7)

    second.stop(signal.SIGKILL)
    first.upload("plain", artifacts.third)
    second = start("second")
    assert second.token_ids("plain") == first.token_ids("plain")
    assert second.generate("plain").json()["version"] == 2
    assert first.client.patch("/variants/plain", json={"active": 1}).is_success
    assert eventually(lambda: second.generate("plain").json()["version"] == 1)
    assert first.client.delete("/variants/plain").is_success
    assert eventually(lambda: second.generate("plain").status_code == 404)

    assert as_caller(second, made["key"]).status_code == 200
    assert first.client.delete(f"/keys/{made['id']}").is_success
    assert eventually(lambda: as_caller(second, made["key"]).status_code == 401)
    # The deletion has a line for each of the two versions.
    changes = "create_key publish create_key set_limits publish promote delete delete revoke_key"
    assert audited(bucket) == changes.split()
    # Either server lists them all, newest first.
    for server in (first, second):
        listed = server.client.get("/changes").json()["changes"]
        assert [each["action"] for each in listed][::-1] == changes.split()
    assert {path.name for path in (tmp_path / "first").iterdir()}.isdisjoint({"tenants", "audit"})


def audited(bucket: Bucket) -> list[str]:
    """Return the actions of all audit lines, in the order of their times."""
    store = bucket.store("registry")
    paths = sorted(meta["path"] for page in obstore.list(store, "audit") for meta in page)
    lines = b"".join(bytes(obstore.get(store, path).bytes()) for path in paths).splitlines()
    return [msgspec.json.decode(line)["action"] for line in lines]
