"""Two servers on one registry: what one publishes, promotes or deletes, the other serves so at once."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from deltastore.registry import Registry
from tests.deltastore.helpers.stored import publish_file
from tests.server.helpers.live_server import Artifacts, LiveServer, live_server


@pytest.fixture(scope="module")
def other(artifacts: Artifacts, server: LiveServer) -> Iterator[LiveServer]:
    with live_server(artifacts.base, server.registry, "--max-gpu-deltas", 2) as running:
        yield running


def served_version(server: LiveServer, variant: str) -> str:
    reply = server.generate(variant, max_new_tokens=1)
    assert reply.status_code == 200, reply.text
    return reply.headers["X-Peraxis-Version"]


def test_every_change_by_one_server_is_served_by_the_other_at_once(
    artifacts: Artifacts, server: LiveServer, other: LiveServer
) -> None:
    for number, artifact in enumerate((artifacts.plain, artifacts.chatty), 1):
        assert server.upload("shared", artifact).status_code == 201
        assert served_version(other, "shared") == str(number)
    assert server.token_ids("shared") == other.token_ids("shared")
    assert other.client.patch("/variants/shared", json={"active": 1}).status_code == 200
    assert served_version(server, "shared") == "1"
    assert server.client.delete("/variants/shared", params={"version": 2}).status_code == 200
    assert other.generate("shared@2").status_code == 404
    assert other.client.delete("/variants/shared").status_code == 200
    assert server.generate("shared").status_code == 404
    assert "shared" not in json.dumps(server.client.get("/v1/models").json())


def test_a_server_that_was_killed_serves_after_its_restart_what_others_changed(
    artifacts: Artifacts, server: LiveServer
) -> None:
    with live_server(artifacts.base, server.registry) as killed:
        assert killed.upload("survives", artifacts.plain).status_code == 201
        assert killed.upload("deleted", artifacts.plain).status_code == 201
        killed.stop(signal.SIGKILL)
    assert served_version(server, "survives") == "1"
    assert server.upload("survives", artifacts.third).status_code == 201
    assert server.client.delete("/variants/deleted").status_code == 200
    with live_server(artifacts.base, server.registry) as restarted:
        assert served_version(restarted, "survives") == "2"
        assert restarted.generate("deleted").status_code == 404


def test_a_version_that_a_server_of_another_base_published_is_refused_and_harms_no_other(
    artifacts: Artifacts, server: LiveServer
) -> None:
    # As that server does: its own checks have passed.
    publish_file(Registry(server.registry), artifacts.foreign, "foreign")
    expected = server.token_ids()
    for reply in (
        server.generate("foreign"),
        server.client.post("/variants/foreign/load"),
        server.client.post("/variants/foreign/pin"),
    ):
        assert reply.status_code == 409, reply.text
        assert reply.json()["error"]["code"] == "base_mismatch"
        assert "another base" in reply.json()["error"]["message"]
    assert server.token_ids() == expected
    assert server.client.get("/variants/foreign/artifact").content == artifacts.foreign.read_bytes()
    assert server.client.delete("/variants/foreign").status_code == 200
