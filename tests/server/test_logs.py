"""The log of a running server: one JSON object per line, the request's id in its lines, and no tenant's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers.live_server import Artifacts, LiveServer, eventually, live_server

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
NUM_REQUESTS = 4
PROMPT = "xyzzy-the-words-of-a-tenant"


def lines_of(server: LiveServer) -> list[dict[str, Any]]:
    # The last line may not be complete yet.
    return [json.loads(line) for line in server.log.read_text().split("\n")[:-1]]


def ask(server: LiveServer, request_id: str) -> None:
    """Send requests with a prompt that succeed and that fail, all under one id."""
    headers = {"X-Request-Id": request_id, "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    for target, body in (
        ("/generate", {"prompt": PROMPT, "max_new_tokens": 2}),
        ("/generate", {"messages": [{"role": "user", "content": PROMPT}], "max_new_tokens": 1}),
        ("/generate", {"prompt": PROMPT * 4096, "max_new_tokens": 1}),
        (f"/{PROMPT}?key={PROMPT}", {}),
    ):
        server.client.post(target, json=body, headers=headers)


@pytest.mark.parametrize("logs_prompts", [False, True])
def test_lines_name_their_request_and_show_its_prompt_only_on_demand(
    artifacts: Artifacts, tmp_path: Path, logs_prompts: bool
) -> None:
    flags = ["--log-prompts"] if logs_prompts else []
    with live_server(artifacts.base, tmp_path / "registry", "--log-format", "json", *flags) as server:
        ask(server, "req-of-the-test")
        # A reply's line follows its last byte.
        assert eventually(lambda: sum("status" in line for line in lines_of(server)) == NUM_REQUESTS)
        lines = lines_of(server)
    replies = [line for line in lines if "status" in line]
    assert [(line["method"], line["route"], line["status"]) for line in replies] == [
        ("POST", "/generate", 200), ("POST", "/generate", 400), ("POST", "/generate", 400), ("POST", "other", 404),
    ]  # fmt: skip
    assert {(line["request_id"], line["trace_id"]) for line in replies} == {("req-of-the-test", TRACE)}
    assert replies[0]["tenant"] == "default"
    assert {line["role"] for line in lines} == {"supervisor", "engine", "http-1"}
    starting, engine, listening = (line["message"] for line in lines[:3])
    assert starting == f"starting with base {artifacts.base} and registry {tmp_path / 'registry'}"
    assert engine.startswith("the engine is native: ")
    assert listening == f"listening at {server.url}: requests get 503 until the base is loaded"
    shown = [line for line in lines if PROMPT in json.dumps(line)]
    assert bool(shown) == logs_prompts
    assert all(line["request_id"] == "req-of-the-test" for line in shown)
