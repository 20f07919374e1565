"""Mixed requests of many variants get, token for token, what `generate()` gives on each merged checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deltastore.registry.records import VersionRecord
from tests.helpers.tiny_models import Change, make_pair
from tests.server.helpers.served import (
    WAIT_S,
    Mode,
    Served,
    generate,
    kv_cache_gb,
    make_delta,
    merged,
    same_up_to_a_tie,
    serving,
)
from tests.vllm.helpers.environment import SIZES

NUM_VARIANTS, NUM_REQUESTS = 8, 200


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    variant: int  # 0 is the base
    prompt: tuple[int, ...]
    num_new: int


@dataclass(frozen=True, slots=True, eq=False)
class MergedFamily:
    """A base, the artifacts of its variants, and the merged models: the base first, then one per artifact."""

    base: Path
    artifacts: list[Path]
    models: list[Any]
    _expected: dict[Ask, tuple[list[int], list[float]]] = field(default_factory=dict)

    def expected(self, ask: Ask) -> tuple[list[int], list[float]]:
        """Return what `generate` does on the merged model, computed once for the engines of both modes."""
        if ask not in self._expected:
            self._expected[ask] = generate(self.models[ask.variant], list(ask.prompt), ask.num_new)
        return self._expected[ask]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> MergedFamily:
    directory = tmp_path_factory.mktemp("family")
    changes = tuple(Change(added_tokens=number % 3) for number in range(NUM_VARIANTS))
    pair = make_pair("llama", directory, seed=11, changes=changes, **SIZES)
    artifacts: list[Path] = []
    models = [AutoModelForCausalLM.from_pretrained(pair.base, dtype=torch.float32)]
    for number, finetune in enumerate(pair.finetunes):
        artifacts.append(make_delta(pair.base, finetune, directory / f"{number}.safetensors"))
        models.append(merged(pair.base, artifacts[-1], directory / f"merged-{number}"))
    return MergedFamily(pair.base, artifacts, models)


@pytest.fixture
def served(family: MergedFamily, tmp_path: Path, mode: Mode) -> Iterator[Served]:
    """An engine with few slots and a small KV cache, so that deltas are evicted and sequences preempted."""
    num_pages = 8 if mode == "vllm" else 30
    with serving(
        family.base,
        tmp_path / "registry",
        mode,
        max_gpu_deltas=3,
        kv_cache_gb=kv_cache_gb(mode, num_pages),
        load_timeout=WAIT_S,
        max_num_seqs=24,
        max_queue=400,
    ) as running:
        yield running


def asks(seed: int) -> list[Ask]:
    """Return requests with prompts of many lengths; half of the prompts share a prefix across variants."""
    draw = random.Random(seed)
    common = [draw.randrange(1, 250) for _ in range(60)]
    made = []
    for number in range(NUM_REQUESTS):
        own = [draw.randrange(1, 250) for _ in range(draw.randrange(1, 50))]
        prompt = common[: draw.randrange(20, 60)] + own if number % 2 else own
        made.append(Ask(draw.randrange(NUM_VARIANTS + 1), tuple(prompt), draw.randrange(1, 80)))
    return made


def start_all(served: Served, records: list[VersionRecord | None], requests: list[Ask]) -> list[list[int]]:
    pending = [
        served.start(records[ask.variant], list(ask.prompt), max_new_tokens=ask.num_new, temperature=0.0)
        for ask in requests
    ]
    return [waiting.answer().token_ids for waiting in pending]


def check(family: MergedFamily, ask: Ask, got: list[int]) -> None:
    tokens, margins = family.expected(ask)
    assert same_up_to_a_tie(got, tokens, margins), ask


def test_variants_answer_the_same_prompt_differently(family: MergedFamily) -> None:
    answers = {tuple(generate(model, [5, 6, 7, 8], 12)[0]) for model in family.models}
    assert len(answers) == NUM_VARIANTS + 1


def test_mixed_requests_equal_generate_on_merged_weights(served: Served, family: MergedFamily) -> None:
    records = [None, *(served.publish(file, f"v{i}") for i, file in enumerate(family.artifacts))]
    requests = asks(seed=1)
    for ask, got in zip(requests, start_all(served, records, requests), strict=True):
        check(family, ask, got)
    assert served.metric("preemptions_total") > 0
    assert served.metric("variant_evictions_total", level="device", reason="capacity") > 0


def test_a_prefix_cache_warm_from_one_variant_changes_nothing_for_another(
    served: Served, family: MergedFamily
) -> None:
    records = [None, *(served.publish(file, f"v{i}") for i, file in enumerate(family.artifacts))]
    draw = random.Random(7)
    prompt = tuple(draw.randrange(1, 250) for _ in range(140))
    for variant in [*range(NUM_VARIANTS + 1), *reversed(range(NUM_VARIANTS + 1))]:
        ask = Ask(variant, prompt, 12)
        check(family, ask, start_all(served, records, [ask])[0])
    assert served.metric("prefix_cache_hits_total") > 0
