"""Has a source tree fit a delta, take an upload and answer a request, and records which files that takes."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from server.supervisor.http_keeper import PING_S
from tests.replay.source_tree import SourceTree
from tests.server.helpers.live_server import Artifacts, address_in
from tests.ways.call_hook import CallHook, FileCall

CHAT = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 4,
    "temperature": 1,
    "stop": ["zzz"],
    "stream": True,
}


@dataclass(frozen=True, slots=True)
class Way:
    """The first calls of each file in each process, in the order of time."""

    calls: Sequence[FileCall]
    # Files that are called without a request, too: when they come first says nothing.
    idle: Collection[str] = frozenset()

    @property
    def files(self) -> Sequence[str]:
        """Each file once."""
        return tuple(dict.fromkeys(call.file for call in self.calls))


@dataclass(frozen=True, slots=True)
class Ways:
    """A fit by `peraxis compress`, an upload, and a streamed chat request of a variant without a slot."""

    fit: Way
    upload: Way
    request: Way


def record(source: SourceTree, artifacts: Artifacts, directory: Path) -> Ways:
    """Record all three, in a new directory. Takes half a minute."""
    directory.mkdir()
    hooked = directory / "hook"
    hooked.mkdir()
    hook = CallHook(source.directory, hooked)
    return Ways(_fit(source, hook, artifacts, directory), *_serve(source, hook, artifacts, directory))


def _fit(source: SourceTree, hook: CallHook, artifacts: Artifacts, directory: Path) -> Way:
    finetune = sorted((artifacts.base.parent).glob("finetune*"))[0]
    text = directory / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
    with hook.recording() as calls:
        done = source.run(
            *("compress", "--base", artifacts.base, "--finetune", finetune, "--out", directory / "fit.safetensors"),
            *("--calibration", text, "--samples", 20, "--distill-epochs", 1, "--no-progress"),
            **hook.environment,
        )  # fmt: skip
        if done.exit_code:
            raise RuntimeError(done.errors)
    return Way(calls)


def _serve(source: SourceTree, hook: CallHook, artifacts: Artifacts, directory: Path) -> tuple[Way, Way]:
    registry = directory / "registry"
    made = source.run(
        *("keys", "create", "--registry", registry, "--tenant", "acme", "--json"),
        *("--role", "inference", "--role", "publish"),
    )
    headers = {"Authorization": f"Bearer {made.document()['key']}"}
    options = (
        "--base", artifacts.base, "--registry", registry, "--port", 0, "--dtype", "float32", "--kv-cache-gb", 0.05,
        "--auth", "keys", "--max-host-cache-gb", 0,
    )  # fmt: skip
    with ExitStack() as stack:
        log = directory / "serve.log"
        _, lines = stack.enter_context(source.serving(log, *options, **hook.environment))
        url = address_in(lines[-1])
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=240))
        # What happens once in a server's life, such as the start of workers, is on no request's way.
        with hook.recording():
            _publish(client, "warm", artifacts.spare[1])
            _chat(client, "warm")
        with hook.recording() as idle_calls:
            # So long that a Ping is among them: when it comes says nothing of a request.
            time.sleep(PING_S)
        with hook.recording() as upload_calls:
            _publish(client, "chatty", artifacts.chatty)
        with hook.recording() as request_calls:
            _chat(client, "chatty")
    idle = frozenset(call.file for call in idle_calls)
    return Way(upload_calls, idle), Way(request_calls, idle)


def _publish(client: httpx.Client, name: str, artifact: Path) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    client.post(
        "/variants", params={"name": name}, headers=headers, content=artifact.read_bytes()
    ).raise_for_status()


def _chat(client: httpx.Client, variant: str) -> None:
    client.post("/v1/chat/completions", json={**CHAT, "model": variant}).raise_for_status()
