"""The exposition of `/metrics`: every name, type, help and label, and the values that count questions and answers."""

from __future__ import annotations

import re

COUNTED = re.compile(
    r"^(peraxis_(http_requests|tenant|variant_(requests|tokens|active)|uploads|upload_bytes|registry_(objects|quar|up)|slots"
    r"|variants_resident|variant_resident|ready|build|prompt_tokens|generation_tokens|admission|time_to_first_token_seconds_count"
    r"|e2e_request_latency_seconds_count)|vllm:(max_gpu|num_requests))"
)


def steady_metrics(text: str) -> str:
    """Return an exposition with the values of time, memory and steps left out."""
    lines = []
    for line in text.splitlines():
        series = line.rpartition(" ")[0]
        is_kept = line.startswith("#") or (COUNTED.match(line) is not None and "_created" not in line)
        lines.append(line if is_kept else f"{series} ...")
    return "\n".join(lines) + "\n"
