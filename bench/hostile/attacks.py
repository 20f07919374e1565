"""Requests of a hostile tenant: to variants whose files cost time or memory, of long prompts, and with large schemas.

Its variants are written into the registry as they are, because an upload refuses most of them.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.serving import publish
from bench.synthetic import LlamaShapes, write_delta
from deltastore.base.base import Base
from deltastore.registry import Registry

TENANT = "hostile"
TOKENIZER = "tokenizer.json"
LOOPING = b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
REPLY_S = 120.0
# Between two requests of one connection, so that refusals alone do not fill the processors with the clients' work.
PAUSE_S = 0.02
KINDS = ("looping-template", "backtracking-decoder", "growing-normalizer", "long-prompts", "large-schemas")


@dataclass(frozen=True, slots=True)
class Attack:
    """Requests that are sent again and again, on so many connections.

    Args:
        body: the body of each request, from its number.
    """

    kind: str
    path: str
    body: Callable[[int], dict[str, Any]]
    num_connections: int = 8


def attacks(prompt_chars: int, num_patterns: int) -> list[Attack]:
    """Return all attacks; the arguments are the sizes of long prompts and of schemas."""
    chat = {"messages": [{"role": "user", "content": "x1"}], "max_new_tokens": 4}
    return [
        Attack("looping-template", "/generate?variant=loops", lambda _: chat),
        Attack(
            "backtracking-decoder",
            "/generate?variant=backtracks",
            lambda _: {"prompt": "x1 x2 x3", "max_new_tokens": 32},
        ),
        Attack(
            "growing-normalizer",
            "/generate?variant=grows",
            lambda _: {"prompt": "x y x", "max_new_tokens": 4},
        ),
        Attack(
            "long-prompts", "/generate?variant=plain", lambda _: {"prompt": "x1 " * (prompt_chars // 3)}, 4
        ),
        Attack("large-schemas", "/v1/completions", lambda number: _schema(number, num_patterns)),
    ]


def publish_hostile(
    registry: Registry, directory: Path, shapes: LlamaShapes, files: Mapping[str, bytes], base: Base
) -> None:
    """Publish the hostile tenant's variants of a base; `files` are those of a sound tokenizer."""
    grows = _sequence("normalizer", [_replaced("x", "y" * 10**6), _replaced("y", "z" * 10**6)])
    pattern = {"Regex": r"x*(?!x)\D\d"}
    backtracks = _sequence("decoder", [_replaced("x", "x" * 20_000), _replaced(pattern, "")])
    hostile = {
        "plain": dict(files),
        "loops": {**files, "chat_template.jinja": LOOPING},
        "backtracks": _edited(files, backtracks),
        "grows": _edited(files, grows),
    }
    for seed, (name, own) in enumerate(hostile.items(), 1000):
        path = directory / f"{name}.safetensors"
        write_delta(path, shapes, seed, own, base)
        publish(registry, path, name, TENANT)
        path.unlink()


@contextmanager
def running(attack: Attack, url: str, key: str) -> Iterator[Counter[str]]:
    """Send the requests of an attack while the block runs; yields the replies by status and code."""
    replies: Counter[str] = Counter()
    over = threading.Event()
    with ThreadPoolExecutor(attack.num_connections) as pool:
        clients = [
            pool.submit(_send, attack, (url, key), over, replies) for _ in range(attack.num_connections)
        ]
        try:
            yield replies
        finally:
            over.set()
    for client in clients:
        client.result()


def _send(attack: Attack, server: tuple[str, str], over: threading.Event, replies: Counter[str]) -> None:
    url, key = server
    number = threading.get_ident()
    with httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=REPLY_S) as client:
        while not over.is_set():
            number += 1
            reply = client.post(attack.path, json=attack.body(number))
            code = reply.json()["error"]["code"] if reply.is_error else "ok"
            replies[f"{reply.status_code} {code}"] += 1
            over.wait(PAUSE_S)


def _schema(number: int, num_patterns: int) -> dict[str, Any]:
    """Return a request with a schema that no earlier one had."""
    patterns = {
        f"p{index}": {"type": "string", "pattern": f"^.*{index}x{number}.*$"} for index in range(num_patterns)
    }
    schema = {"type": "object", "properties": patterns, "required": ["p0"]}
    return {
        "model": "plain",
        "prompt": "x1",
        "max_tokens": 16,
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}},
    }


def _edited(files: Mapping[str, bytes], changes: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a tokenizer's files with some parts of its `tokenizer.json` replaced."""
    return {**files, TOKENIZER: json.dumps(json.loads(files[TOKENIZER]) | changes).encode()}


def _sequence(part: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = {"normalizer": "normalizers", "decoder": "decoders"}
    return {part: {"type": "Sequence", kinds[part]: steps}}


def _replaced(pattern: str | dict[str, str], content: str) -> dict[str, Any]:
    return {
        "type": "Replace",
        "pattern": {"String": pattern} if isinstance(pattern, str) else pattern,
        "content": content,
    }
