"""vLLM as the backend: mixed requests get, token for token, what `generate()` gives on merged checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compressor.fit.calibration import Calibration
from compressor.fit.fit_settings import FitSettings
from deltastore.registry.records import VersionRecord
from server.errors import InvalidRequest
from server.protocol.messages import DoneEvent, ErrorEvent
from tests.helpers.tiny_models import Change, make_pair
from tests.server.helpers.served import Served, generate, make_delta, merged, same_up_to_a_tie, serving
from tests.vllm.helpers.environment import NEEDS_VLLM, PYTHON, SIZES

pytestmark = NEEDS_VLLM
NUM_REQUESTS = 40
SELF = Calibration("self", samples=20, length=16, seed=0)


@dataclass(frozen=True, slots=True, eq=False)
class MergedFamily:
    """A base, the artifacts of its variants, and the merged models, the base first."""

    base: Path
    artifacts: list[Path]
    models: list[Any]


def make_family(directory: Path, architecture: str) -> MergedFamily:
    """Make a base and four variants: with one plane, with two planes, with a whole vocabulary, and with one plane."""
    changes = tuple(Change(noise=0.3 + 0.1 * number) for number in range(4))
    pair = make_pair(architecture, directory, seed=0, changes=changes, **SIZES)
    configs: list[dict[str, Any]] = [
        {},
        {"fit_settings": FitSettings(SELF, distill_epochs=0, budget=2.0)},
        {"embeddings": "whole"},
        {},
    ]
    artifacts = [
        make_delta(pair.base, finetune, directory / f"{number}.safetensors", **config)
        for number, (finetune, config) in enumerate(zip(pair.finetunes, configs, strict=True))
    ]
    models = [AutoModelForCausalLM.from_pretrained(pair.base, dtype=torch.float32)]
    models += [
        merged(pair.base, artifact, directory / f"merged-{number}")
        for number, artifact in enumerate(artifacts)
    ]
    return MergedFamily(pair.base, artifacts, models)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "gemma3_text"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MergedFamily:
    return make_family(tmp_path_factory.mktemp("family"), request.param)


@pytest.fixture(scope="module")
def served(family: MergedFamily, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine with fewer slots than variants, so that deltas are loaded and evicted while requests run."""
    with serving(
        family.base,
        tmp_path_factory.mktemp("registry"),
        "process",
        backend="vllm",
        engine_python=PYTHON,
        max_gpu_deltas=3,
        slot_headroom=8.0,
        max_queue=400,
        max_batch_tokens=128,
        max_model_len=200,
        kv_cache_gb=0.1,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def records(family: MergedFamily, served: Served) -> list[VersionRecord | None]:
    return [None, *(served.publish(path, f"v{number}") for number, path in enumerate(family.artifacts))]


def test_mixed_requests_equal_generate_on_merged_weights(
    family: MergedFamily, served: Served, records: list[VersionRecord | None]
) -> None:
    draw = random.Random(1)
    common = [draw.randrange(1, 250) for _ in range(60)]
    asked = []
    for number in range(NUM_REQUESTS):
        own = [draw.randrange(1, 250) for _ in range(draw.randrange(1, 60))]
        prompt = common[: draw.randrange(20, 60)] + own if number % 2 else own
        asked.append((draw.randrange(len(records)), prompt, draw.randrange(1, 60)))
    pending = [
        served.start(records[variant], prompt, max_new_tokens=num_new) for variant, prompt, num_new in asked
    ]
    for (variant, prompt, num_new), waiting in zip(asked, pending, strict=True):
        tokens, margins = generate(family.models[variant], prompt, num_new)
        answer = waiting.answer()
        assert isinstance(answer.end, DoneEvent), answer.end
        assert same_up_to_a_tie(answer.token_ids, tokens, margins), (variant, prompt, num_new)


def test_what_vllm_does_not_serve_is_refused_by_name(
    served: Served, records: list[VersionRecord | None]
) -> None:
    end = served.ask(records[1], [1, 2, 3], prompt_logprobs=1).end
    assert isinstance(end, ErrorEvent)
    assert isinstance(end.error, InvalidRequest)
    assert "log-probabilities of the prompt" in str(end.error)
