"""The exposition of `/metrics`: every name, type, help and label, and the values that count questions and answers."""

from __future__ import annotations

import itertools
import re

COUNTED = re.compile(
    r"^(peraxis_(http_requests|tenant|variant_(requests|tokens|active)|uploads|upload_bytes|registry_(objects|quar|up)|slots"
    r"|variants_resident|variant_resident|ready|build|prompt_tokens|generation_tokens|admission|time_to_first_token_seconds_count"
    r"|e2e_request_latency_seconds_count)|vllm:(max_gpu|num_requests))"
)


def steady_metrics(text: str) -> str:
    """Return an exposition with the values of time, memory and steps left out, and the series of a metric sorted."""
    lines: list[str] = []
    for is_comment, group in itertools.groupby(text.splitlines(), lambda line: line.startswith("#")):
        samples = map(str if is_comment else _steady_sample, group)
        lines += samples if is_comment else sorted(samples)
    return "\n".join(lines) + "\n"


def _steady_sample(line: str) -> str:
    is_kept = COUNTED.match(line) is not None and "_created" not in line
    return line if is_kept else f"{line.rpartition(' ')[0]} ..."
