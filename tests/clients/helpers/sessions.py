"""Stock clients, and the session that a program of each has with a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.clients.helpers.environments import KEPT, ROOT, made
from tests.clients.helpers.relay import Relay
from tests.server.helpers.live_server import LiveServer

PROGRAMS = ROOT / "tests" / "clients" / "programs"
RECORDED = ROOT / "tests" / "clients" / "recorded"


@dataclass(frozen=True, slots=True)
class Client:
    """One client: its program, what the program runs in, and the error that the client makes of a long prompt."""

    name: str
    program: str
    too_long: tuple[str, str | None]  # the class, or without one the reply's status; and the code
    environment: str | None = None
    tools: tuple[str, ...] = ()  # programs of Debian's packages
    calls_beside_schema: bool = False  # its session has that step, too

    def command(self, url: str) -> list[str]:
        """Return the program's command, whose environment is made."""
        python = sys.executable
        if self.environment is not None:
            directory = made(self.environment)
            python = str(directory / "bin" / "python")
        path = PROGRAMS / self.program
        module = f"tests.clients.programs.{path.stem}"
        runner = {".py": [python, "-m", module], ".java": ["java", str(path)]}.get(
            path.suffix, ["node", str(path)]
        )
        return [*runner, f"{url}/v1"]


CODE = "context_length_exceeded"
CLIENTS = [
    Client("curl", "use_curl.py", ("400", CODE), tools=("curl",)),
    Client("fetch", "use_fetch.mjs", ("400", CODE), tools=("node",)),
    Client("instructor", "use_instructor.py", ("InstructorRetryException", CODE), "instructor"),
    Client("jdk", "UseHttpClient.java", ("400", CODE), tools=("java",)),
    Client(
        "langchain", "use_langchain.py", ("ContextOverflowError", CODE), "python", calls_beside_schema=True
    ),
    Client("litellm", "use_litellm.py", ("ContextWindowExceededError", None), "python"),
    Client(
        "openai-agents", "use_openai_agents.py", ("BadRequestError", CODE), "python", calls_beside_schema=True
    ),
    Client("openai-node", "use_openai.cjs", ("BadRequestError", CODE), "node", ("node", "npm")),
    Client("openai-python", "use_openai.py", ("BadRequestError", CODE), "python", calls_beside_schema=True),
]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a session: what the client got, and the requests that it sent for it."""

    name: str
    got: Any
    requests: list[bytes]


def session(client: Client, relay: Relay) -> Iterator[Step]:
    """Run a client's program against the server behind a relay, and yield its steps as they end."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment = {**kept, "NODE_PATH": str(KEPT / "node" / "node_modules")}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            client.command(relay.url),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            step = json.loads(line)
            yield Step(step["step"], step["got"], relay.taken())
            process.stdin.write("\n")
            process.stdin.flush()
        status = process.wait()
        errors.seek(0)
        assert status == 0, errors.read()


def recorded(client: Client) -> dict[str, bytes]:
    """Return the requests that were recorded of a client, by the names of their files."""
    return {path.stem: path.read_bytes() for path in (RECORDED / client.name).glob("*.http")}


def names_of(step: Step) -> dict[str, bytes]:
    """Return a step's requests by the names of their files."""
    return {f"{step.name}-{number}": request for number, request in enumerate(step.requests, 1)}


def num_cancelled(server: LiveServer) -> float:
    """Return how many requests of `chatty` have ended because their clients left."""
    return server.metric("variant_requests_total", variant="default/chatty", finish_reason="cancelled")
