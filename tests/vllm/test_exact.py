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

from compressor.config import Calibration, FitSettings
from deltastore.registry.records import VersionRecord
from server.errors import InvalidRequest
from server.protocol.messages import DoneEvent, ErrorEvent, PromptEvent
from tests.compressor.helpers.compressing import rewrite_config
from tests.helpers.tiny_models import Change, make_pair
from tests.server.engine.helpers.masks import start_constrained
from tests.server.engine.test_metrics import log_probabilities
from tests.server.helpers.served import Served, generate, make_delta, merged, same_up_to_a_tie, serving
from tests.vllm.helpers.environment import NEEDS_VLLM, NOT_SERVED, PYTHON, SIZES, tables_of

pytestmark = NEEDS_VLLM
NUM_REQUESTS = 40
MAX_ADDED = 3
HEADS_WITH_BIAS = ("phi",)
# Those of the page that vLLM serves.
TYPES = [name.strip("`") for name, (_, vllm) in tables_of("Model types")[0].items() if vllm == "yes"]
SELF = Calibration("self", samples=20, length=16, seed=0)


@dataclass(frozen=True, slots=True, eq=False)
class MergedFamily:
    """A base, the artifacts of its variants, and the merged models, the base first."""

    base: Path
    artifacts: list[Path]
    models: list[Any]
    too_many_tokens: Path | None  # another artifact, which adds more tokens than `MAX_ADDED`


def make_family(directory: Path, architecture: str, **config: Any) -> MergedFamily:
    """Make a base and four variants: with one plane, with two planes, with a whole vocabulary, and with one plane.

    The second and the third have tokens that the base lacks, unless its head has a bias, which takes none. `config`
    overrides the architecture's configuration.
    """
    added = (0,) * 4 if architecture in HEADS_WITH_BIAS else (0, MAX_ADDED, 1, 0, MAX_ADDED + 1)
    changes = tuple(
        Change(noise=0.3 + 0.1 * number, added_tokens=count) for number, count in enumerate(added)
    )
    pair = make_pair(architecture, directory, seed=0, changes=changes, **{**SIZES, **config})
    configs: list[dict[str, Any]] = [
        {},
        {"fit_settings": FitSettings(SELF, distill_epochs=0, budget=2.0)},
        {"embeddings": "whole"},
        {},
        {},
    ]
    artifacts = [
        make_delta(pair.base, finetune, directory / f"{number}.safetensors", **own)
        for number, (finetune, own) in enumerate(zip(pair.finetunes, configs, strict=False))
    ]
    too_many_tokens = artifacts.pop() if len(artifacts) == len(configs) else None
    models = [AutoModelForCausalLM.from_pretrained(pair.base, dtype=torch.float32)]
    models += [
        merged(pair.base, artifact, directory / f"merged-{number}")
        for number, artifact in enumerate(artifacts)
    ]
    return MergedFamily(pair.base, artifacts, models, too_many_tokens)


@pytest.fixture(scope="module", params=TYPES)
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
        max_added_tokens=MAX_ADDED,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def records(family: MergedFamily, served: Served) -> list[VersionRecord | None]:
    return [None, *(served.publish(path, f"v{number}") for number, path in enumerate(family.artifacts))]


def check_mixed_requests(family: MergedFamily, served: Served, records: list[VersionRecord | None]) -> None:
    """Ask many requests of all variants at once, and compare each answer with `generate()`'s."""
    draw = random.Random(1)
    common = [draw.randrange(1, 250) for _ in range(60)]
    asked = []
    for number in range(NUM_REQUESTS):
        variant = draw.randrange(len(records))
        own = drawn(draw, family.models[variant], draw.randrange(1, 60))
        prompt = common[: draw.randrange(20, 60)] + own if number % 2 else own
        asked.append((variant, prompt, draw.randrange(1, 60)))
    pending = [
        served.start(records[variant], prompt, max_new_tokens=num_new) for variant, prompt, num_new in asked
    ]
    for (variant, prompt, num_new), waiting in zip(asked, pending, strict=True):
        tokens, margins = generate(family.models[variant], prompt, num_new)
        answer = waiting.answer()
        assert isinstance(answer.end, DoneEvent), answer.end
        assert same_up_to_a_tie(answer.token_ids, tokens, margins), (variant, prompt, num_new)


def test_mixed_requests_equal_generate_on_merged_weights(
    family: MergedFamily, served: Served, records: list[VersionRecord | None]
) -> None:
    check_mixed_requests(family, served, records)


def check_scored_prompts(family: MergedFamily, served: Served, records: list[VersionRecord | None]) -> None:
    """Ask for the log-probabilities of prompts beside other requests, and compare them with the merged models'."""
    draw = random.Random(2)
    asked = []
    for number in range(15):
        variant = number % len(records)
        # Some are computed in several steps.
        prompt = drawn(draw, family.models[variant], draw.choice([1, 2, 20, 64, 65, 150]))
        asked.append((variant, prompt, number % 4))
    pending = []
    for variant, prompt, num_top in asked:
        pending.append(
            served.start(records[variant], prompt, max_new_tokens=6, prompt_logprobs=num_top, logprobs=2)
        )
        served.start(records[-variant], prompt, max_new_tokens=30)
    for (variant, prompt, num_top), waiting in zip(asked, pending, strict=True):
        answer, model = waiting.answer(), family.models[variant]
        assert isinstance(answer.end, DoneEvent), answer.end
        tokens, margins = generate(model, prompt, 6)
        assert same_up_to_a_tie(answer.token_ids, tokens, margins)
        (scored,) = [event.tokens for event in answer.events if isinstance(event, PromptEvent)]
        assert [token.token_id for token in scored] == prompt[1:]
        for token, row in zip(scored, log_probabilities(model, prompt), strict=True):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-3)
            best = row.topk(num_top)
            assert [logprob for _, logprob in token.top] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_prompts_are_scored_with_their_own_deltas(
    family: MergedFamily, served: Served, records: list[VersionRecord | None]
) -> None:
    check_scored_prompts(family, served, records)


def test_a_prompt_is_scored_beside_masks_seeds_and_preemption(
    family: MergedFamily, served: Served, records: list[VersionRecord | None]
) -> None:
    prompt = drawn(random.Random(3), family.models[2], 150)
    answers = [
        start_constrained(served, records[2], prompt, max_new_tokens=8, prompt_logprobs=1, n=2).answer(),
        served.ask(records[2], prompt, max_new_tokens=8, prompt_logprobs=1, seed=3, temperature=1.0),
        served.ask(records[2], prompt, max_new_tokens=8, prompt_logprobs=1),
    ]
    scored = [
        [token.logprob for event in answer.events if isinstance(event, PromptEvent) for token in event.tokens]
        for answer in answers
    ]
    assert all(isinstance(answer.end, DoneEvent) for answer in answers)
    assert scored[0] == pytest.approx(scored[2], abs=1e-3)
    assert scored[1] == pytest.approx(scored[2], abs=1e-3)


def test_no_row_gets_a_token_that_its_variant_lacks(
    family: MergedFamily, served: Served, records: list[VersionRecord | None]
) -> None:
    """Every token of the vocabulary is likely at these temperatures. vLLM draws up to 2, and our sampler the rest."""
    most = []
    for temperature, seed in ((2.0, None), (50.0, None), (50.0, 5)):
        pending = [
            served.start(
                record,
                [1, 2, 3],
                max_new_tokens=120,
                temperature=temperature,
                seed=seed,
                n=12,
                stop_token_ids=frozenset(),
            )
            for record in records
        ]
        most.append([max(waiting.answer().token_ids) + 1 for waiting in pending])
    sizes = [model.config.vocab_size for model in family.models]
    if family.too_many_tokens is not None:
        assert sizes == [sizes[0], sizes[0], sizes[0] + MAX_ADDED, sizes[0] + 1, sizes[0]]
    # Those of a seed are the same each time.
    assert most[-1] == sizes
    assert all(each <= size for found in most for each, size in zip(found, sizes, strict=True))


def test_a_variant_with_more_tokens_than_there_is_room_for_is_refused_by_name(
    family: MergedFamily, served: Served
) -> None:
    if family.too_many_tokens is None:
        pytest.skip("no artifact adds tokens to a head with a bias")
    end = served.ask(served.publish(family.too_many_tokens, "large"), [1, 2, 3]).end
    assert isinstance(end, ErrorEvent)
    assert isinstance(end.error, InvalidRequest)
    assert NOT_SERVED["variants with more added tokens than `--max-added-tokens` (256)"] in str(end.error)


def drawn(draw: random.Random, model: Any, num_tokens: int) -> list[int]:
    """Draw token ids; one in ten is of the last four of the model's vocabulary."""
    size = model.config.vocab_size
    return [
        draw.randrange(size - 4, size) if draw.random() < 0.1 else draw.randrange(1, 250)
        for _ in range(num_tokens)
    ]


def test_a_longer_variant_and_ends_that_the_configuration_denies_are_served(tmp_path: Path) -> None:
    """The engine is started for the longer context, and the base keeps its own."""
    own, longer = 64, 160
    pair = make_pair("llama", tmp_path, seed=3, **{**SIZES, "max_position_embeddings": own})
    rewrite_config(pair.base, tie_word_embeddings=True)
    rewrite_config(pair.finetunes[0], max_position_embeddings=longer)
    delta = make_delta(pair.base, pair.finetunes[0], tmp_path / "delta.safetensors")
    models = [
        AutoModelForCausalLM.from_pretrained(pair.base, dtype=torch.float32),
        merged(pair.base, delta, tmp_path / "merged"),
    ]
    with serving(
        pair.base,
        tmp_path / "registry",
        "process",
        backend="vllm",
        engine_python=PYTHON,
        max_gpu_deltas=2,
        max_batch_tokens=128,
        max_model_len=longer,
        kv_cache_gb=0.1,
    ) as running:
        record, facts = running.publish(delta, "longer"), running.engine.facts
        assert (facts.max_model_len_of(None), facts.max_model_len_of(record)) == (own, longer)
        for variant, model, length in ((None, models[0], own), (record, models[1], longer)):
            prompt = [7 * number % 250 for number in range(length - 20)]
            tokens, margins = generate(model, prompt, 20)
            answer = running.ask(variant, prompt, max_new_tokens=20)
            assert isinstance(answer.end, DoneEvent), answer.end
            assert same_up_to_a_tie(answer.token_ids, tokens, margins)
            refusal = running.ask(variant, prompt, max_new_tokens=21).end
            assert isinstance(refusal, ErrorEvent)
