"""A billion weights in bfloat16 and a vocabulary of 128,256 tokens, served by vLLM to OpenAI's own client."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from openai import OpenAI
from transformers import AutoTokenizer

from bench import real_models as models
from bench.real_models import RealModel
from tests.server.helpers import live_server as live
from tests.server.helpers.live_server import WAIT_S, live_server
from tests.server.helpers.served import make_delta, merged
from tests.vllm.helpers.environment import NEEDS_VLLM, PYTHON

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(1500)]
PROMPT = list(range(1000, 1040))
TEXT = "The river runs past the old mill and under the bridge, and in spring it carries ice."
# Error of a token's log-probability in nats, from rounding to bfloat16 over 16 layers.
TOLERANCE = 0.1


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory for gigabytes, deleted afterwards."""
    monkeypatch.setattr(models, "MAX_TEXT_BYTES", 1 << 20)
    # vLLM compiles the model at its first start.
    monkeypatch.setattr(live, "START_S", 900)
    directory = tmp_path / "large"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def test_a_variant_of_a_billion_weights_streams_at_temperature_1(large: Path) -> None:
    model = RealModel.of("llama-3.2-1b")
    base = model.write_base(large / "base")
    artifact = make_delta(
        base, model.write_finetune(base, large / "tuned", seed=1), large / "delta.safetensors"
    )
    shutil.rmtree(large / "tuned")
    sizes = ("--max-gpu-deltas", 2, "--kv-cache-gb", 0.3, "--max-host-cache-gb", 0, "--max-num-seqs", 16)
    options = ("--backend", "vllm", "--engine-python", PYTHON, "--dtype", "bfloat16", *sizes)
    with live_server(base, large / "registry", *options) as server:
        with artifact.open("rb") as content:
            published = httpx.post(f"{server.url}/variants?name=tuned", content=content, timeout=WAIT_S)
        assert published.status_code == 201, published.text
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT_S)
        chunks = list(
            client.completions.create(
                model="tuned",
                prompt=PROMPT,
                max_tokens=16,
                temperature=1,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )
        reply = server.generate("tuned", prompt=TEXT, max_new_tokens=8, logprobs=0)
        assert reply.status_code == 200, reply.text
        scored = reply.json()["outputs"][0]
    assert chunks[-1].choices[0].finish_reason == "length"
    answered = torch.tensor([scored["token_ids"]])
    ids = AutoTokenizer.from_pretrained(base)(TEXT, return_tensors="pt").input_ids
    own = merged(base, artifact, large / "merged")
    with torch.inference_mode():
        logits = own(torch.cat([ids, answered], 1)).logits[0, ids.shape[1] - 1 : -1]
    expected = logits.float().log_softmax(-1).gather(1, answered.T)[:, 0]
    found = torch.tensor([entry["logprob"] for entry in scored["logprobs"]])
    assert (found - expected).abs().max() < TOLERANCE
