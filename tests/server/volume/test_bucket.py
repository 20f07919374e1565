"""Servers whose registry is a bucket, as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.s3_server import Bucket
from tests.server.helpers.live_server import Artifacts, LiveServer, eventually, live_server

Start = Callable[[str], LiveServer]


@pytest.fixture
def start(
    artifacts: Artifacts, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Return a function that starts a server on the bucket, with a cache of a name."""
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as servers:

        def start_one(cache: str) -> LiveServer:
            flags = ("--registry", bucket.url, "--registry-cache", tmp_path / cache, "--engine", "inline")
            return servers.enter_context(live_server(artifacts.base, tmp_path / f"of-{cache}", *flags))

        yield start_one


def test_what_one_server_publishes_in_a_bucket_is_served_by_another(
    start: Start, artifacts: Artifacts, tmp_path: Path
) -> None:
    first, second = start("first"), start("second")
    created = first.upload("plain", artifacts.plain)
    assert created.status_code == 201, created.text
    digest = created.json()["digest"].removeprefix("sha256:")
    assert first.token_ids("plain") == second.token_ids("plain")
    assert (tmp_path / "second" / "objects" / digest).read_bytes() == artifacts.plain.read_bytes()
    second.upload("plain", artifacts.third)
    assert eventually(lambda: first.generate("plain").json()["version"] == 2)
    assert second.client.delete("/variants/plain").is_success
    assert eventually(lambda: first.generate("plain").status_code == 404)
