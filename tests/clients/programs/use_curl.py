"""A session of `curl --http2`, which asks to upgrade each connection to HTTP/2 (h2c)."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.clients.programs.session import (
    BASE_URL,
    KEY,
    LONG_ANSWER,
    MESSAGES,
    MODEL,
    RESPONSE_FORMAT,
    SAMPLING,
    TOO_LONG,
    TOOL,
    TOOL_ANSWER,
    report,
)

CURL = [
    "curl",
    "--http2",
    "--silent",
    "--show-error",
    "--no-buffer",
    "--header",
    f"Authorization: Bearer {KEY}",
]
CHAT = f"{BASE_URL}/chat/completions"


def main() -> None:
    report("models", [card["id"] for card in json.loads(curl(f"{BASE_URL}/models"))["data"]])
    report("chat", ask(**SAMPLING)["content"])
    report("stream", "".join(map(content_of, curl(CHAT, body(stream=True, **SAMPLING)).splitlines())))
    report("tools", call_tools())
    report("schema", json.loads(ask(response_format=RESPONSE_FORMAT, **SAMPLING)["content"]))
    reply, _, status = curl(CHAT, body(messages=TOO_LONG), "--write-out", "\n%{http_code}").rpartition("\n")
    report("too-long", [status, json.loads(reply)["error"]["code"]])
    command = [*CURL, CHAT, "--json", body(stream=True, **LONG_ANSWER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
    report("cancel", line.startswith("data: "))


def curl(url: str, body: str | None = None, *options: str) -> str:
    content = [] if body is None else ["--json", body]
    return subprocess.run(
        [*CURL, *options, url, *content], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def body(**fields: Any) -> str:
    return json.dumps({"model": MODEL, "messages": MESSAGES, **fields})


def ask(**fields: Any) -> Any:
    """Return the message of a reply."""
    return json.loads(curl(CHAT, body(**fields)))["choices"][0]["message"]


def content_of(line: str) -> str:
    """Return the text in a line of a stream."""
    if not line.startswith("data: {"):
        return ""
    return "".join(choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])


def call_tools() -> dict[str, Any]:
    messages = list(MESSAGES)
    calls = []
    for _ in range(2):
        message = ask(
            messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **SAMPLING
        )
        messages.append(message)
        for call in message["tool_calls"]:
            calls.append([call["function"]["name"], call["function"]["arguments"]])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": TOOL_ANSWER})
    end = ask(messages=messages, tools=[TOOL], tool_choice="auto", **SAMPLING)
    return {"calls": calls, "text": end["content"]}


if __name__ == "__main__":
    main()
