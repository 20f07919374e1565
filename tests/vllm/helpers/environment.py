"""The interpreter that runs engines with vLLM, what it does not serve, and sizes of models that it runs on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "vllm.md"
# `make test-deploy` makes an environment with vLLM and names its interpreter.
PYTHON = os.environ.get("TESTS_VLLM_PYTHON")
NEEDS_VLLM = [
    pytest.mark.deploy,
    pytest.mark.skipif(PYTHON is None, reason="TESTS_VLLM_PYTHON names no interpreter that has vLLM"),
]
# The rows of "What is different" in docs/vllm.md that requests can meet, and what their refusal says.
NOT_SERVED = {
    "variants with more added tokens than `--max-added-tokens` (256)": "can raise --max-added-tokens"
}
# Its attention on the CPU has no heads of fewer dimensions.
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}


def tables_of(section: str) -> list[dict[str, list[str]]]:
    """Return the tables under a heading of docs/vllm.md, each with the cells of its rows by the first one."""
    text = PAGE.read_text().split(f"### {section}\n")[1].split("\n#")[0]
    tables: list[dict[str, list[str]]] = []
    for block in text.split("\n\n"):
        if block.startswith("|"):
            rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]]
            tables.append({first: others for first, *others in rows})
    return tables
