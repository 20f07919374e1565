"""vLLM's own server on a registry: variants by name and by version, promotions, and what is refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.engine import publish
from bench.process import free_port
from deltastore.registry import Registry
from tests.helpers.tiny_models import Change, make_pair
from tests.server.engine.test_metrics import log_probabilities
from tests.server.helpers import live_server as live
from tests.server.helpers.live_server import WAIT_S, eventually
from tests.server.helpers.served import generate, make_delta, same_up_to_a_tie
from tests.vllm.helpers.environment import NEEDS_VLLM, PYTHON, SIZES
from tests.vllm.test_exact import MergedFamily, make_family

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(1500)]
# Two ranks on a slow machine.
START_S = 900
NUM_NEW, NUM_REQUESTS = 20, 24


@dataclass(frozen=True, slots=True, eq=False)
class OwnServer:
    """vLLM's server, and the registry that it reads."""

    url: str
    registry: Registry
    family: MergedFamily

    def complete(self, model: str, prompt: list[int], **body: Any) -> httpx.Response:
        asked = {"model": model, "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0, **body}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        return httpx.post(f"{self.url}/v1/completions", json=asked, timeout=WAIT_S)

    def tokens(self, model: str, prompt: list[int]) -> list[int]:
        reply = self.complete(model, prompt)
        assert reply.status_code == 200, reply.text
        found: list[int] = reply.json()["choices"][0]["token_ids"]
        return found

    def expected(self, variant: int, prompt: list[int]) -> tuple[list[int], list[float]]:
        model = self.family.models[variant]
        model.generation_config.eos_token_id = None
        return generate(model, prompt, NUM_NEW)


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    directory = tmp_path_factory.mktemp("own")
    family = make_family(directory / "family", "llama")
    location = directory / "registry"
    registry = Registry(location)
    for number, artifact in enumerate(family.artifacts):
        publish(registry, artifact, f"v{number}")
    port = free_port()
    options = (
        *(
            "--model",
            str(family.base),
            "--served-model-name",
            "base",
            "--port",
            str(port),
            "--dtype",
            "float32",
        ),
        *("--max-model-len", "200", "--max-num-seqs", "16", "--enable-lora", "--max-loras", "3"),
        *("--enforce-eager", "--tensor-parallel-size", str(request.param)),
        # Room for the tokens that variants add.
        *("--load-format", "peraxis", "--hf-overrides", '{"vocab_size": 262}'),
    )
    environment = {
        **os.environ,
        "PERAXIS_VLLM_REGISTRY": str(location),
        "PERAXIS_VLLM_SLOT_HEADROOM": "8",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = (directory / "server.log").open("w")
    command = [str(PYTHON), "-P", "-m", "vllm.entrypoints.openai.api_server", *options]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        with pytest.MonkeyPatch.context() as patient:
            patient.setattr(live, "WAIT_S", START_S)
            assert eventually(lambda: is_healthy(url) or process.poll() is not None)
        assert process.poll() is None, (directory / "server.log").read_text()[-4000:]
        yield OwnServer(url, registry, family)
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


def test_more_variants_than_slots_answer_as_merged_weights(server: OwnServer) -> None:
    models = ["base", "v0", "v1", "v2@1", "v3"]
    asked = [(number % 5, [5 + number] * (1 + 3 * number)) for number in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda each: server.tokens(models[each[0]], each[1]), asked))
    for (variant, prompt), tokens in zip(asked, answers, strict=True):
        assert same_up_to_a_tie(tokens, *server.expected(variant, prompt)), (variant, prompt)


def test_what_is_not_there_is_refused_and_harms_no_other(server: OwnServer, tmp_path: Path) -> None:
    other = make_pair("llama", tmp_path, seed=9, changes=(Change(),), **SIZES)
    foreign = make_delta(other.base, other.finetunes[0], tmp_path / "foreign.safetensors")
    publish(server.registry, foreign, "foreign")
    for model, status in (("unknown", 404), ("v0@7", 404), ("v0@x", 404), ("foreign", 400)):
        assert server.complete(model, [5, 6]).status_code == status, model
    assert server.family.too_many_tokens is not None
    publish(server.registry, server.family.too_many_tokens, "large")
    assert server.complete("large", [5, 6]).status_code == 400
    assert same_up_to_a_tie(server.tokens("v0", [5, 6]), *server.expected(1, [5, 6]))


def test_prompts_are_scored_with_their_own_deltas(server: OwnServer) -> None:
    prompt = [5, 6, 7, 8, 9]
    with ThreadPoolExecutor(5) as pool:
        names = ["base", "v0", "v1", "v2", "v3"]
        replies = list(
            pool.map(lambda name: server.complete(name, prompt, prompt_logprobs=0, temperature=0.0), names)
        )
    for model, reply in zip(server.family.models, replies, strict=True):
        assert reply.status_code == 200, reply.text
        scored = reply.json()["choices"][0]["prompt_logprobs"][1:]
        got = [one[str(token)]["logprob"] for one, token in zip(scored, prompt[1:], strict=True)]
        rows = log_probabilities(model, prompt)
        want = [float(row[token]) for row, token in zip(rows, prompt[1:], strict=True)]
        assert got == pytest.approx(want, abs=1e-3)


def test_a_promotion_is_followed_and_a_pinned_version_stays(server: OwnServer) -> None:
    prompt = [8, 9, 10]
    before = server.tokens("v1", prompt)
    publish(server.registry, server.family.artifacts[3], "v1")
    promoted, margins = server.expected(4, prompt)
    assert eventually(lambda: same_up_to_a_tie(server.tokens("v1", prompt), promoted, margins))
    assert server.tokens("v1@1", prompt) == before
    server.registry.delete("default", "v1")
    assert eventually(lambda: server.complete("v1", prompt).status_code == 404)
