"""The session that every client has with a server, for the programs in Python.

A program is called with the server's address, with /v1 at its end, and prints a line after each step,
`{"step": ..., "got": ...}`: the ids of the listed models; the text of a chat; that of a streamed one; the calls of a
tool, which is forced twice, and the text behind their answers; an answer to a schema; of some clients, the call of a
tool that may be called beside a schema, and the answer to the schema behind it; the error of a prompt that is too
long; and whether a stream had begun when it was left after its first event. Before each next step it waits for a line
on standard input, so that the requests of steps are told apart.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_SESSION: dict[str, Any] = json.loads(Path(__file__).with_name("session.json").read_text())
BASE_URL = sys.argv[1]
MODEL: str = _SESSION["model"]
KEY: str = _SESSION["key"]
MESSAGES: list[Any] = _SESSION["messages"]
TOOL: Any = _SESSION["tool"]
TOOL_ANSWER: str = _SESSION["tool_answer"]
RESPONSE_FORMAT: Any = _SESSION["response_format"]
# Biases by which the model begins a call (with the letter n) or the answer to the schema (with a c).
CALLING: dict[str, int] = _SESSION["favouring"]["call"]
ANSWERING: dict[str, int] = _SESSION["favouring"]["answer"]
SAMPLING: dict[str, Any] = _SESSION["sampling"]
# An answer whose events fill the buffers between server and client, so that it cannot have ended when a client leaves.
LONG_ANSWER: dict[str, Any] = _SESSION["long_answer"]
TOO_LONG: list[Any] = [{"role": "user", "content": "a " * 4096}]


def report(step: str, got: Any) -> None:
    """Print the result of a step and wait for a line."""
    print(json.dumps({"step": step, "got": got}), flush=True)
    sys.stdin.readline()
