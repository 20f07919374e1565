"""A session of each stock client with a live server: models, chats, streams, tools, schemas, errors, cancelling."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.helpers.relay import relay_to
from tests.clients.helpers.sessions import CLIENTS, Client, names_of, num_cancelled, recorded, session
from tests.helpers.debian import debian_tool
from tests.server.helpers.live_server import LiveServer, eventually

RENDERED = "<user>hi\n<assistant>"


def asked(request: bytes) -> tuple[bytes, Any]:
    """Return the first line and the document of a request; its headers name versions of what Debian installs."""
    head, _, body = request.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body) if body else None


@pytest.mark.deploy
@pytest.mark.timeout(1800)  # of which most is pip's
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_stock_client_has_its_session(client: Client, server: LiveServer) -> None:
    for tool in client.tools:
        debian_tool(tool, "client-packages")
    cancelled = num_cancelled(server)
    with relay_to(server.url) as relay:
        steps = list(session(client, relay))
    got = {step.name: step.got for step in steps}

    listed = [card["id"] for card in server.client.get("/v1/models").json()["data"]]
    wanted = server.generate("chatty", prompt=RENDERED, max_new_tokens=64).json()["outputs"][0]["text"]
    assert set(got["models"]) == set(listed)
    assert (got["chat"], got["stream"]) == (wanted, wanted)
    assert [(name, json.loads(arguments)) for name, arguments in got["tools"]["calls"]] == [
        ("weather", {"city": "Sofia"})
    ] * 2
    assert isinstance(got["tools"]["text"], str)
    assert got["schema"]["city"] in ("Sofia", "Varna")
    assert isinstance(got["schema"]["rain"], bool)
    assert ("beside" in got) == client.calls_beside_schema
    if client.calls_beside_schema:
        ((name, arguments),) = got["beside"]["calls"]
        assert (name, json.loads(arguments)) == ("weather", {"city": "Sofia"})
        assert got["beside"]["answer"]["city"] in ("Sofia", "Varna")
    assert tuple(got["too-long"]) == client.too_long
    assert got["cancel"] is True
    assert eventually(lambda: num_cancelled(server) == cancelled + 1)

    sent = {name: asked(request) for step in steps for name, request in names_of(step).items()}
    assert sent == {name: asked(request) for name, request in recorded(client).items()}
