"""Metrics of requests and steps, and prompt log-probabilities."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from server.engine.model_runner import Batch
from server.protocol.messages import DoneEvent, PromptEvent, TokenEvent
from tests.server.helpers.live_server import eventually
from tests.server.helpers.served import (
    PAGE_TOKENS,
    WAIT_S,
    Family,
    Mode,
    Served,
    generate,
    make_family,
    merged,
    on_forward,
    serving,
)

PROMPT = list(range(40, 75))
NEW = 6


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), seed=9, num_variants=2)


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, ids: list[int]) -> Tensor:  # [tokens - 1, vocab]
    """Return the model's log-probabilities of each next token."""
    logits: Tensor = model(torch.tensor([ids])).logits
    return logits[0, :-1].log_softmax(-1)


@pytest.fixture
def served(family: Family, tmp_path: Path, mode: Mode) -> Iterator[Served]:
    with serving(family.base, tmp_path / "registry", mode, max_num_seqs=4) as running:
        yield running


def test_steps_count_their_requests_and_variants(served: Served, family: Family) -> None:
    record = served.publish(family.artifacts[0], "v")
    served.ask(record, PROMPT, max_new_tokens=NEW)
    assert eventually(lambda: served.metric("step_seconds_count") == NEW)  # counted when its tokens are out
    assert served.metric("batch_requests_sum") == NEW
    assert served.metric("batch_distinct_variants_sum") == NEW
    served.ask(None, PROMPT, max_new_tokens=NEW)
    assert eventually(lambda: served.metric("step_seconds_count") == 2 * NEW)
    assert served.metric("batch_distinct_variants_sum") == NEW  # the base is none


def test_sequences_of_one_request_count_once_in_a_step(served: Served) -> None:
    served.ask(None, PROMPT, max_new_tokens=NEW, n=3)
    assert eventually(lambda: served.metric("step_seconds_count") == NEW + 1)  # the first is one token ahead
    assert served.metric("batch_requests_sum") == NEW + 1


def test_the_wait_for_the_engine_thread_counts_as_queue_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing, may_end = threading.Event(), threading.Event()

    def hold(batch: Batch, forward: Callable[[], Tensor]) -> Tensor:
        computing.set()
        assert may_end.wait(WAIT_S)
        return forward()

    on_forward(monkeypatch, hold)
    first = served.start(None, PROMPT, max_new_tokens=1)
    assert computing.wait(WAIT_S)
    second = served.start(None, PROMPT, max_new_tokens=1)
    time.sleep(0.3)
    may_end.set()
    first.answer()
    end = second.answer().end
    assert isinstance(end, DoneEvent)
    assert end.timings.queue_s >= 0.3


def test_tokens_gaps_and_latencies_are_counted_once_each(served: Served) -> None:
    served.ask(None, PROMPT, max_new_tokens=NEW, temperature=1.0, n=2, seed=1)
    assert served.metric("prompt_tokens_total") == len(PROMPT)
    assert served.metric("generation_tokens_total") == 2 * NEW
    assert served.metric("variant_tokens_total", variant="base", kind="generation") == 2 * NEW
    assert served.metric("inter_token_latency_seconds_count") == 2 * (NEW - 1)
    for name in ("request_queue_seconds", "time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert served.metric(f"{name}_count") == 1


def test_a_known_prefix_counts_as_hits_in_tokens(served: Served, family: Family, mode: Mode) -> None:
    record = served.publish(family.artifacts[0], "v")
    prompt = list(range(20, 23 + PAGE_TOKENS[mode]))
    served.ask(record, prompt, max_new_tokens=1)
    # They are counted after the step whose tokens have been sent.
    assert eventually(lambda: served.metric("prefix_cache_queries_total") == len(prompt))
    assert served.metric("prefix_cache_hits_total") == 0
    served.ask(None, prompt, max_new_tokens=1)
    assert eventually(lambda: served.metric("prefix_cache_queries_total") == 2 * len(prompt))
    assert served.metric("prefix_cache_hits_total") == 0  # of another delta
    served.ask(record, prompt, max_new_tokens=1)
    assert eventually(lambda: served.metric("prefix_cache_queries_total") == 3 * len(prompt))
    assert served.metric("prefix_cache_hits_total") == PAGE_TOKENS[mode]


def test_sequences_of_one_request_share_its_prompt(served: Served, mode: Mode) -> None:
    prompt = list(range(30, 33 + PAGE_TOKENS[mode]))
    served.ask(None, prompt, max_new_tokens=2, n=3)
    assert eventually(lambda: served.metric("prefix_cache_hits_total") == 2 * PAGE_TOKENS[mode])


def test_the_kv_cache_is_empty_when_no_request_runs(served: Served) -> None:
    served.ask(None, PROMPT, max_new_tokens=NEW)
    assert eventually(lambda: served.metric("kv_cache_usage_ratio") == 0)


def test_where_a_request_found_its_delta_is_counted(served: Served, family: Family) -> None:
    record = served.publish(family.artifacts[0], "v")
    ends = [served.ask(record, PROMPT, max_new_tokens=1).end]
    ends.append(served.ask(record, PROMPT, max_new_tokens=1).end)
    served.engine.load(record, "unload").result(WAIT_S)
    ends.append(served.ask(record, PROMPT, max_new_tokens=1).end)
    assert [isinstance(end, DoneEvent) and end.timings.cold for end in ends] == [True, False, True]
    # An unloaded delta leaves host memory, too.
    assert served.metric("variant_lookups_total", result="disk") == 2
    assert served.metric("variant_lookups_total", result="device") == 1
    assert served.metric("cold_start_seconds_count", source="disk") == 2


def test_prompt_logprobs_are_those_of_the_merged_model(
    served: Served, family: Family, tmp_path: Path
) -> None:
    record = served.publish(family.artifacts[1], "v")
    plain = served.ask(record, PROMPT, max_new_tokens=2).token_ids
    answer = served.ask(record, PROMPT, max_new_tokens=2, prompt_logprobs=2, n=2)
    scored = [event for event in answer.events if isinstance(event, PromptEvent)]
    assert len(scored) == 1
    assert [token.token_id for token in scored[0].tokens] == PROMPT[1:]
    reference = merged(family.base, family.artifacts[1], tmp_path / "merged")
    expected = log_probabilities(reference, PROMPT)
    for token, row in zip(scored[0].tokens, expected, strict=True):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-3)
        best = row.topk(2).indices.tolist()
        assert [found for found, _ in token.top] == best
    sequences = [
        [e.token_id for e in answer.events if isinstance(e, TokenEvent) and e.index == i] for i in (0, 1)
    ]
    assert sequences == [plain, plain]
    assert generate(reference, PROMPT, 2)[0] == plain
