"""Masks, seeds and rules with vLLM: the tokens are those of the native engine, and of `generate()` under a mask."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltastore.registry.records import VersionRecord
from server.protocol.messages import DoneEvent, TokenEvent
from server.text.generation_config import sampling_defaults
from tests.server.engine.helpers.masks import ByHand, branching, start_constrained
from tests.server.engine.test_generation_rules import CONFIGS
from tests.server.helpers.served import Pending, Served, generate, same_up_to_a_tie, serving
from tests.vllm.helpers.environment import NEEDS_VLLM, PYTHON
from tests.vllm.test_exact import MAX_ADDED, MergedFamily, make_family

pytestmark = NEEDS_VLLM
NUM_NEW = 24
SETTINGS: dict[str, Any] = {
    "max_gpu_deltas": 3,
    "slot_headroom": 8.0,
    "max_queue": 400,
    "max_batch_tokens": 128,
}


@dataclass(frozen=True, slots=True, eq=False)
class Both:
    """The two engines with the same variants, the base first."""

    native: Served
    vllm: Served
    native_records: list[VersionRecord | None]
    vllm_records: list[VersionRecord | None]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> MergedFamily:
    return make_family(tmp_path_factory.mktemp("family"), "llama")


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def both(
    request: pytest.FixtureRequest, family: MergedFamily, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    directory = tmp_path_factory.mktemp("registries")
    vllm: dict[str, Any] = {
        **SETTINGS,
        "backend": "vllm",
        "engine_python": PYTHON,
        "kv_cache_gb": 0.1 * request.param,
        "max_model_len": 200,
        "tensor_parallel_size": request.param,
        # A rank has more than its part of a vocabulary that is stored whole.
        "slot_headroom": 8.0 * request.param,
        "max_added_tokens": MAX_ADDED,
    }
    with (
        serving(family.base, directory / "native", "process", **SETTINGS) as native_engine,
        serving(family.base, directory / "vllm", "process", **vllm) as vllm_engine,
    ):
        native, other = ([None, *published(each, family)] for each in (native_engine, vllm_engine))
        yield Both(native_engine, vllm_engine, native, other)


def published(served: Served, family: MergedFamily) -> list[VersionRecord]:
    return [served.publish(path, f"v{number}") for number, path in enumerate(family.artifacts)]


def tokens_of(pending: Pending) -> dict[int, list[int]]:
    """Return the tokens of each sequence of a request that must succeed."""
    answer, found = pending.answer(), dict[int, list[int]]()
    assert isinstance(answer.end, DoneEvent), answer.end
    for event in answer.events:
        if isinstance(event, TokenEvent):
            found.setdefault(event.index, []).append(event.token_id)
    return found


def test_draws_of_a_seed_and_rules_are_those_of_the_native_engine(both: Both) -> None:
    draw = random.Random(3)
    asked: list[tuple[int, list[int], dict[str, Any]]] = []
    for number in range(30):
        prompt = [draw.randrange(1, 250) for _ in range(draw.randrange(1, 150))]
        config = CONFIGS[number % len(CONFIGS)] if number % 2 else {}
        sampling = {"temperature": 1.2, "top_k": 50, "top_p": 0.9, **sampling_defaults(config)}
        sampling |= {"seed": number, "n": 1 + number % 3, "max_new_tokens": draw.randrange(4, 40)}
        if number % 3 == 0:
            biases = {draw.randrange(250): draw.uniform(-100, 5) for _ in range(40)}
            sampling |= {"frequency_penalty": 0.7, "presence_penalty": -0.3, "min_tokens": 4}
            sampling |= {"logit_bias": tuple(biases.items()), "stop_token_ids": frozenset(range(0, 250, 9))}
        asked.append((draw.randrange(5), prompt, sampling))
    answers = []
    for served, records in ((both.native, both.native_records), (both.vllm, both.vllm_records)):
        pending = [served.start(records[variant], prompt, **sampling) for variant, prompt, sampling in asked]
        answers.append([tokens_of(each) for each in pending])
    assert answers[1] == answers[0]


def test_masked_requests_among_others_equal_generate_with_the_same_masks(
    both: Both, family: MergedFamily
) -> None:
    draw = random.Random(5)
    asked = [
        (draw.randrange(5), [draw.randrange(1, 250) for _ in range(draw.randrange(1, 150))], number % 3 > 0)
        for number in range(24)
    ]
    pending = []
    for variant, prompt, is_masked in asked:
        record = both.vllm_records[variant]
        if is_masked:
            pending.append(start_constrained(both.vllm, record, prompt, max_new_tokens=NUM_NEW))
        else:
            pending.append(both.vllm.start(record, prompt, max_new_tokens=NUM_NEW))
    for (variant, prompt, is_masked), waiting in zip(asked, pending, strict=True):
        allowed = branching if is_masked else None
        tokens, margins = generate(family.models[variant], prompt, NUM_NEW, allowed)
        answer = waiting.answer()
        assert isinstance(answer.end, DoneEvent), answer.end
        assert same_up_to_a_tie(answer.token_ids, tokens, margins), (variant, prompt, is_masked)


def test_others_go_on_while_a_sequence_waits_for_its_mask_and_a_constraint_may_end(both: Both) -> None:
    by_hand = ByHand.start(both.vllm, [5, 6, 7, 8], max_new_tokens=NUM_NEW)
    first = by_hand.next_token()
    # Its next mask is not there yet.
    assert len(both.vllm.ask(None, [9, 9], max_new_tokens=NUM_NEW).token_ids) > 1
    by_hand.send(1, {first, 17})
    assert by_hand.next_token() in {first, 17}
    by_hand.send(2, None)
    free = [by_hand.next_token() for _ in range(4)]
    assert len(free) == 4
    both.vllm.engine.cancel(by_hand.pending.request.id)


def test_sequences_of_a_request_have_masks_of_their_own(both: Both) -> None:
    answers = [
        tokens_of(
            start_constrained(served, records[1], [3, 4, 5], n=3, seed=9, temperature=1.0, max_new_tokens=12)
        )
        for served, records in ((both.native, both.native_records), (both.vllm, both.vllm_records))
    ]
    assert answers[1] == answers[0]
    assert len(answers[0]) == 3


def test_more_masked_sequences_than_there_are_pages_end_all(family: MergedFamily, tmp_path: Path) -> None:
    """Sequences that wait for masks hold pages; those that could run take them."""
    settings: dict[str, Any] = {**SETTINGS, "max_num_seqs": 12, "max_model_len": 400, "kv_cache_gb": 0.002}
    with serving(
        family.base, tmp_path / "registry", "process", backend="vllm", engine_python=PYTHON, **settings
    ) as served:
        prompts = [[number + 1] * 150 for number in range(12)]
        waiting = [ByHand.start(served, prompt, max_new_tokens=NUM_NEW) for prompt in prompts[:6]]
        free = [served.start(None, prompt, max_new_tokens=NUM_NEW) for prompt in prompts]
        for pending, prompt in zip(free, prompts, strict=True):
            tokens, margins = generate(family.models[0], prompt, NUM_NEW)
            assert same_up_to_a_tie(pending.answer().token_ids, tokens, margins)
        for by_hand, prompt in zip(waiting, prompts, strict=False):
            tokens, margins = generate(family.models[0], prompt, NUM_NEW, branching)
            assert same_up_to_a_tie(by_hand.answer().token_ids, tokens, margins)
