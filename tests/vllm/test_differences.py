"""Tests expect something else of vLLM than of the native engine only where docs/vllm.md says so."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from deltastore.errors import NotServable
from server.engine import vllm_admission
from server.engine.vllm_backend import build_vllm_engine
from server.model import loader
from server.settings import Settings
from tests.helpers.tiny_models import ARCHITECTURES, MORE_SERVED, WRAPPERS, make_pair
from tests.server.helpers.served import PAGE_TOKENS
from tests.vllm.helpers.environment import NOT_SERVED, tables_of

# Of bases and settings, which no request can meet.
AT_START = {
    "Gemma 3 from 4B, Gemma 4, Mistral 3 (`gemma3`, `gemma4`, `mistral3`)",
    "vision towers, experts, stages of a pipeline",
}


def test_the_page_names_what_tests_see_refused_and_nothing_else() -> None:
    refused, _ = tables_of("What is different")
    assert refused.keys() == NOT_SERVED.keys() | AT_START


def test_the_page_has_the_sizes_of_pages() -> None:
    _, otherwise = tables_of("What is different")
    assert otherwise["tokens of a KV cache page"] == [
        str(PAGE_TOKENS["process"]),
        f"{PAGE_TOKENS['vllm']} on the CPU",
    ]
    assert (PAGE_TOKENS["process"], PAGE_TOKENS["vllm"]) == (loader.PAGE_TOKENS, vllm_admission.PAGE_TOKENS)


def test_the_page_lists_the_types_that_tests_serve() -> None:
    (types,) = tables_of("Model types")
    assert types.keys() == {f"`{name}`" for name in (*ARCHITECTURES, *MORE_SERVED)}


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_a_base_with_towers_is_refused_at_start_by_name(architecture: str, tmp_path: Path) -> None:
    base = make_pair(architecture, tmp_path, changes=()).base
    settings = Settings(base=base, registry=str(tmp_path / "registry"), backend="vllm", device="cpu")
    # It ends before it uses any of them.
    unused: Any = None
    with pytest.raises(NotServable, match=f"'{architecture}': .* --backend native"):
        build_vllm_engine(settings, unused, unused, unused, threading.Event())
    (row,) = (name for name in AT_START if f"`{architecture}`" in name)
    assert row
