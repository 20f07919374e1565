"""A server whose engine is vLLM: variants are published while it runs, answer over HTTP, and it ends in order."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.helpers.tiny_models import Change, make_pair
from tests.server.helpers.live_server import WAIT_S, clean_environment, live_server, serve_command
from tests.server.helpers.served import generate, make_delta, merged
from tests.vllm.helpers.environment import NEEDS_VLLM, PYTHON, SIZES

pytestmark = NEEDS_VLLM


def test_a_variant_published_while_vllm_serves_answers_as_its_merged_weights(tmp_path: Path) -> None:
    pair = make_pair("llama", tmp_path, seed=0, changes=(Change(noise=0.5),), **SIZES)
    artifact = make_delta(pair.base, pair.finetunes[0], tmp_path / "delta.safetensors")
    options = ("--backend", "vllm", "--engine-python", PYTHON, "--dtype", "float32", "--max-gpu-deltas", 2)
    prompt = list(range(5, 40))
    with live_server(
        pair.base, tmp_path / "registry", *options, "--slot-headroom", 8, "--kv-cache-gb", 0.1
    ) as server:
        published = httpx.post(
            f"{server.url}/variants?name=tuned", content=artifact.read_bytes(), timeout=WAIT_S
        )
        assert published.status_code == 201, published.text
        body = {"model": "tuned", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S).json()
        echoed = httpx.post(
            f"{server.url}/v1/completions", json={**body, "echo": True}, timeout=WAIT_S
        ).json()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
    tokens, _ = generate(merged(pair.base, artifact, tmp_path / "merged"), prompt, 12)
    assert answer["usage"]["completion_tokens"] == len(tokens)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(tokens)
    # The first token of a prompt has no log-probability.
    own, scored = (one["choices"][0]["logprobs"]["token_logprobs"] for one in (answer, echoed))
    assert len(scored) == len(prompt) + len(tokens)
    assert [value is None for value in scored] == [True] + [False] * (len(scored) - 1)
    assert scored[len(prompt) :] == pytest.approx(own, abs=1e-4)


def test_a_python_without_vllm_is_named_with_the_way_out(tmp_path: Path) -> None:
    base = make_pair("llama", tmp_path, seed=0, changes=(), **SIZES).base
    options = ("--base", base, "--registry", tmp_path / "registry", "--port", 0, "--backend", "vllm")
    command = serve_command(*options, "--engine-python", sys.executable)
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), timeout=WAIT_S, check=False
    )
    assert done.returncode == 1
    assert "serve with --backend native" in done.stderr
    assert "Traceback" not in done.stderr
