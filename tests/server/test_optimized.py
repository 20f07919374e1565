"""Guards hold under `python -O`, which removes every assert."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {
    "ready_while_loading": "RuntimeError: 503 overloaded",
    "facts_before_an_engine_is_ready": "QueueFull: the base is still loading",
    "text_before_the_service_has_started": "QueueFull: the server is starting",
    "ready_while_draining": "Draining: the server is shutting down",
    "delta_of_an_overwritten_slot": "EngineFailed: slot 0 no longer holds delta",
    "load_into_a_slot_that_is_too_small": "ValueError: object ddd",
    "kv_cache_of_one_page": "ValueError: a KV cache needs at least 2 pages",
    "prefix_attached_to_a_sequence_with_pages": "RuntimeError: sequence request/0 has pages already",
    "sequence_scheduled_twice": "ValueError: sequence request/0 was scheduled before",
    "step_without_tokens_for_prompts": "ValueError: max_batch_tokens must be above max_num_seqs",
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Run `tests/server/helpers/guards.py` once with `python -O`; return the error of each guard by its name."""
    directory = str(tmp_path_factory.mktemp("guards"))
    command = [sys.executable, "-O", "-m", "tests.server.helpers.guards", directory]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_asserts_are_off_in_the_program(errors: dict[str, str | None]) -> None:
    assert errors.pop("assert_statement") is None
    assert set(errors) == set(EXPECTED)


@pytest.mark.parametrize("guard", EXPECTED)
def test_a_guard_raises_under_python_o(errors: dict[str, str | None], guard: str) -> None:
    assert (errors[guard] or "nothing raised").startswith(EXPECTED[guard])
