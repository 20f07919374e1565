"""Answers in order, without what differs from run to run: times, ids, ports and paths."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Fields of times, machines and processes, and hashes of records that hold times.
VARIABLE = re.compile(
    r"(?:^|_)(?:at|created|s|seconds|ms|pid|time|free_bytes)$"
    r"|^(?:host_cache_limit_bytes|peak_memory_bytes|tokens_last_minute|secret_sha256|after|change)$"
)
PATTERNS: Mapping[str, str] = {
    r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?": "TIME",
    r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT": "TIME",
    r"\b(boundary=)[0-9a-f]{16,}": r"\1ID",
    # Of tool calls, also in the form of earlier builds.
    r'"id": ?"(?:call_[0-9a-f]{24}|[A-Za-z0-9]{9})"(?=,\s*"type": ?"function")': '"id": "ID"',
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b": "ID",
    # A digest has 64.
    r"\b[0-9a-f]{16,63}\b": "ID",
    r"127\.0\.0\.1:\d+": "127.0.0.1:PORT",
    r"\bport \d+": "port PORT",
    r"\b\d+(?:\.\d+)? (?:ms|s)\b": "N s",
    r"\bpid \d+": "pid N",
    r"\S+ are free": "N are free",
}


class Transcript:
    """Titles with the answers to them, in order.

    Args:
        secrets: texts that this run alone has, such as directories, and their names in all runs.
    """

    def __init__(self, secrets: dict[str, str]) -> None:
        self.answers: dict[str, str] = {}
        self.secrets = secrets

    def add(self, title: str, answer: object) -> None:
        """Keep an answer: a text, or a document to be written as JSON.

        Raises:
            ValueError: the title was used before.
        """
        if title in self.answers:
            raise ValueError(f"{title!r} was asked before")
        text = answer if isinstance(answer, str) else json.dumps(steady(answer), indent=1, ensure_ascii=False)
        self.answers[title] = self.steady_text(text)

    def steady_text(self, text: str) -> str:
        for secret, name in self.secrets.items():
            text = text.replace(secret, name)
        for pattern, name in PATTERNS.items():
            text = re.sub(pattern, name, text)
        return text


def steady(value: Any, name: str = "") -> Any:
    """Return a JSON value with the type alone of what differs from run to run, and rounded numbers."""
    if isinstance(value, dict):
        return {key: steady(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [steady(each, name) for each in value]
    if VARIABLE.search(name) and value is not None and not isinstance(value, bool):
        return f"<{type(value).__name__}>"
    return round(value, 4) if isinstance(value, float) else value


def differences(before: Transcript, after: Transcript) -> Iterator[str]:
    """Yield the lines of a unified diff of each answer that is not the same in both."""
    for title in [*before.answers, *(title for title in after.answers if title not in before.answers)]:
        old, new = (each.answers.get(title, "(not asked)\n") for each in (before, after))
        if old != new:
            yield f"=== {title}"
            yield from difflib.unified_diff(
                old.splitlines(), new.splitlines(), "before", "after", "", "", 2, ""
            )
