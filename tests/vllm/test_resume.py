"""vLLM's engine dies under requests: another one goes on with them, and the request at fault fails alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.tiny_models import Change, make_pair
from tests.server.helpers import live_server as live
from tests.server.helpers.live_server import LiveServer, error_of, eventually, live_server
from tests.server.helpers.poison import POISON_TOKEN, poisoned_environment
from tests.server.helpers.served import make_delta
from tests.server.supervisor.test_faults import ENGINE, processes
from tests.vllm.helpers.environment import NEEDS_VLLM, PYTHON, SIZES

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(1500)]
NUM_NEW, NUM_INNOCENT = 200, 12
# A start of vLLM takes a minute on a slow machine, and several follow each other.
PATIENCE_S = 900


def asked(server: LiveServer, number: int) -> Any:
    """Return the choices of a greedy answer of the base or of the variant."""
    body = {
        "model": ("base", "tuned")[number % 2],
        "prompt": [number + 5] * (3 + number),
        "max_tokens": NUM_NEW,
    }
    reply = httpx.post(f"{server.url}/v1/completions", json={**body, "temperature": 0}, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def test_requests_go_on_with_another_vllm_and_the_one_at_fault_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "WAIT_S", PATIENCE_S)
    pair = make_pair("llama", tmp_path, seed=0, changes=(Change(noise=0.5),), **SIZES)
    artifact = make_delta(pair.base, pair.finetunes[0], tmp_path / "delta.safetensors")
    options = ("--backend", "vllm", "--engine-python", PYTHON, "--dtype", "float32", "--max-gpu-deltas", 2)
    limits = ("--slot-headroom", 8, "--kv-cache-gb", 0.1, "--resume-timeout", PATIENCE_S)
    environment = poisoned_environment(tmp_path / "poison")
    with (
        live_server(pair.base, tmp_path / "registry", *options, *limits, environment=environment) as server,
        ThreadPoolExecutor(NUM_INNOCENT + 1) as pool,
    ):
        assert server.upload("tuned", artifact).status_code == 201
        want = [asked(server, number) for number in range(NUM_INNOCENT)]
        got = [pool.submit(asked, server, number) for number in range(NUM_INNOCENT)]
        assert eventually(lambda: server.metric("num_requests_running") > 0)
        processes(server, ENGINE)[0].kill()
        assert [answer.result() for answer in got] == want
        got = [pool.submit(asked, server, number) for number in range(NUM_INNOCENT)]
        body = {"model": "tuned", "prompt": [9] * 10 + [POISON_TOKEN], "max_tokens": 60, "temperature": 0}
        at_fault = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert (at_fault.status_code, error_of(at_fault)["code"]) == (500, "engine_failed")
        assert [answer.result() for answer in got] == want
