"""Publishing over HTTP from directories that the operator allowed, within the call."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.helpers.live_server import Artifacts, LiveServer, error_of, eventually, live_server

FILE = "delta.safetensors"


@pytest.fixture(scope="module")
def allowed(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("allowed")
    shutil.copy(artifacts.third, directory / FILE)
    shutil.copy(artifacts.foreign, directory / "foreign.safetensors")
    (directory / "text.safetensors").write_text("no artifact, whatever its name says")
    (directory / "link.safetensors").symlink_to(artifacts.plain)
    (directory / "empty.safetensors").touch()
    # Beyond --max-upload-gb, and without a block on the disk.
    (directory / "huge.safetensors").touch()
    os.truncate(directory / "huge.safetensors", 17_000_000_000)
    return directory


@pytest.fixture(scope="module")
def sourced(
    artifacts: Artifacts, allowed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Run a server that publishes from two directories."""
    registry = tmp_path_factory.mktemp("sources") / "registry"
    options = ("--source-dir", allowed, "--source-dir", artifacts.base, "--max-gpu-deltas", 2)
    with live_server(artifacts.base, registry, *options) as running:
        yield running


def published(server: LiveServer, name: str, source: str | Path, **query: str) -> httpx.Response:
    return server.client.post("/variants", params={"name": name, **query}, json={"source": str(source)})


def test_an_artifact_below_an_allowed_directory_is_published_as_an_upload_is(
    sourced: LiveServer, allowed: Path, artifacts: Artifacts
) -> None:
    content = artifacts.third.read_bytes()
    reply = published(sourced, "from-directory", allowed / FILE)
    assert (reply.status_code, reply.json()) == (
        201,
        {
            "name": "from-directory",
            "version": 1,
            "digest": f"sha256:{hashlib.sha256(content).hexdigest()}",
            "size_bytes": len(content),
            "active": True,
        },
    )
    assert sourced.generate("from-directory", max_new_tokens=1).json()["version"] == 1
    assert published(sourced, "from-directory", allowed / FILE).status_code == 200
    assert sourced.upload("from-directory", artifacts.third).status_code == 200


def test_the_version_may_stay_inactive(sourced: LiveServer, allowed: Path, artifacts: Artifacts) -> None:
    sourced.upload("quiet", artifacts.plain)
    reply = published(sourced, "quiet", allowed / FILE, activate="false").json()
    assert (reply["version"], reply["active"]) == (2, False)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("foreign.safetensors", 409, "base_mismatch"),
        ("text.safetensors", 400, "invalid_artifact"),
        ("empty.safetensors", 400, "invalid_artifact"),
        ("huge.safetensors", 413, "too_large"),
        ("link.safetensors", 400, "invalid_request"),
        ("absent.safetensors", 400, "invalid_request"),
        ("../secret.safetensors", 400, "invalid_request"),
    ],
)
def test_a_path_that_cannot_be_published_gives_the_error_of_an_upload(
    sourced: LiveServer, allowed: Path, path: str, status: int, code: str
) -> None:
    reply = published(sourced, "unpublished", f"{allowed}/{path}")
    assert (reply.status_code, error_of(reply)["code"]) == (status, code)
    assert str(sourced.registry) not in error_of(reply)["message"]
    assert sourced.client.get("/variants/unpublished").status_code == 404
    assert eventually(lambda: not list((sourced.registry / "uploads").iterdir()))
    children = psutil.Process(sourced.process.pid).children(recursive=True)
    assert f"{allowed}/{path}" not in [file.path for each in children for file in each.open_files()]


@pytest.mark.parametrize(
    "body",
    [{}, {"source": ""}, {"source": 1}, {"source": "/x", "more": 1}, {"source": "x" * 5000}, []],
    ids=str,
)
def test_a_body_that_names_no_path_is_refused(sourced: LiveServer, body: Any) -> None:
    reply = sourced.client.post("/variants?name=bodies", json=body)
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("source", "way_out"),
    [("/tmp", "--source-dir"), ("hf://acme/plain@main", "run `peraxis push` of it")],
)
def test_a_server_publishes_from_no_directory_by_default_and_never_from_a_hub(
    server: LiveServer, source: str, way_out: str
) -> None:
    reply = published(server, "off", source)
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_request", "source")
    assert way_out in error["message"]
