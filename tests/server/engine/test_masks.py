"""Constrained requests among others: each token has its own mask, and a faulty mask harms its request alone."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from deltastore.errors import PeraxisError
from server.engine import core, request_state
from server.engine.model_runner import Batch
from server.engine.request_state import Held, HeldLogits
from server.errors import Draining, EngineFailed, MaskTimeout
from server.protocol.messages import DoneEvent, ErrorEvent, Event, FinishEvent, TokenEvent
from tests.helpers.tiny_models import Change, make_pair
from tests.server.engine.helpers.masks import ByHand, branching, pack, start_constrained
from tests.server.helpers.live_server import eventually
from tests.server.helpers.served import (
    Answer,
    Family,
    Mode,
    Pending,
    Served,
    generate,
    kv_cache_gb,
    make_delta,
    make_family,
    merged,
    on_forward,
    same_up_to_a_tie,
    serving,
)
from tests.vllm.helpers.environment import SIZES

PROMPT = [5, 6, 7, 8]
LONG_PROMPT = list(range(40, 90))
NUM_NEW = 16
END = 257  # the base's end token


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("models"), seed=21, num_variants=2)


@pytest.fixture
def served(family: Family, tmp_path: Path, mode: Mode) -> Iterator[Served]:
    with serving(family.base, tmp_path / "registry", mode) as running:
        yield running


def constrained(served: Served) -> list[int]:
    """Return the tokens of a constrained request that nothing delays."""
    return start_constrained(served, None, PROMPT, max_new_tokens=NUM_NEW).answer().token_ids


def unconstrained(served: Served) -> list[int]:
    return served.ask(None, LONG_PROMPT, max_new_tokens=NUM_NEW).token_ids


def error_of(answer: Answer) -> PeraxisError:
    assert isinstance(answer.end, ErrorEvent)
    return answer.end.error


def tokens_of(answer: Answer, index: int) -> list[int]:
    return [e.token_id for e in answer.events if isinstance(e, TokenEvent) and e.index == index]


def reasons_of(answer: Answer) -> dict[int, str]:
    return {event.index: event.reason for event in answer.events if isinstance(event, FinishEvent)}


def test_constrained_requests_equal_generate_with_the_same_constraint(tmp_path: Path, mode: Mode) -> None:
    pair = make_pair("llama", tmp_path, seed=12, changes=(Change(), Change(added_tokens=3)), **SIZES)
    artifacts = [
        make_delta(pair.base, finetune, tmp_path / f"{number}.safetensors")
        for number, finetune in enumerate(pair.finetunes)
    ]
    models = [merged(pair.base, file, tmp_path / f"merged-{n}") for n, file in enumerate(artifacts)]
    # So that sequences are preempted.
    size = kv_cache_gb(mode, 6 if mode == "vllm" else 20)
    with serving(pair.base, tmp_path / "registry", mode, kv_cache_gb=size) as served:
        records = [served.publish(file, f"v{number}") for number, file in enumerate(artifacts)]
        prompts = [[number + 3, *range(number, number + 3 * number + 4)] for number in range(12)]
        free = [served.start(records[n % 2], prompt, max_new_tokens=40) for n, prompt in enumerate(prompts)]
        masked = [
            start_constrained(served, records[n % 2], prompt, max_new_tokens=40)
            for n, prompt in enumerate(prompts)
        ]
        for number, prompt in enumerate(prompts):
            for pending, allowed in ((free[number], None), (masked[number], branching)):
                tokens, margins = generate(models[number % 2], prompt, 40, allowed)
                assert same_up_to_a_tie(pending.answer().token_ids, tokens, margins)
        assert served.metric("preemptions_total") > 0


def test_a_late_mask_delays_its_own_sequence_alone(served: Served) -> None:
    want, free = constrained(served), unconstrained(served)
    late = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW)
    late.next_token()
    for _ in range(2):
        assert unconstrained(served) == free
        assert constrained(served) == want
    assert late.pending.events.empty()
    assert late.answer().token_ids == want


def test_a_mask_for_an_earlier_position_changes_nothing(served: Served) -> None:
    want = constrained(served)
    repeated = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW)
    tokens = [repeated.next_token()]
    while len(tokens) < NUM_NEW:
        for position in range(len(tokens)):
            repeated.send(position, {1})
        repeated.send(len(tokens), branching(tokens))
        tokens.append(repeated.next_token())
    assert tokens == want


@pytest.mark.parametrize(
    ("position", "bits", "message"),
    [
        (2, pack({1}, 259), "position 2"),
        (10**9, pack({1}, 259), "position 1000000000"),
        (1, b"", "has 0 bytes"),
        (1, pack({1}, 259)[:-1], "has 35 bytes"),
        (1, bytes(1 << 20), "has 1048576 bytes"),
    ],
    ids=["next position", "far position", "empty", "short", "long"],
)
def test_a_faulty_mask_fails_its_request_alone(
    served: Served, position: int, bits: bytes, message: str
) -> None:
    want, free = constrained(served), unconstrained(served)
    faulty = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW, n=2)
    faulty.next_token()
    running = served.start(None, LONG_PROMPT, max_new_tokens=NUM_NEW)
    faulty.send_bits(position, bits)
    error = error_of(faulty.answer())
    assert isinstance(error, EngineFailed)
    assert message in str(error)
    assert running.answer().token_ids == free
    assert constrained(served) == want
    assert eventually(lambda: served.metric("kv_cache_usage_ratio") == 0)


def test_a_mask_for_an_unconstrained_request_fails_it(served: Served) -> None:
    def outcome() -> Event:
        pending = served.start(None, PROMPT, max_new_tokens=200, stop_token_ids=frozenset())
        served.engine.send_mask(pending.request.id, 0, 200, pack({1}, 259))
        return pending.answer().end

    # Again where the request has ended before the mask comes.
    end = eventually(lambda: found if isinstance(found := outcome(), ErrorEvent) else None)
    assert end is not None
    assert "not constrained" in str(end.error)


def test_masks_for_what_has_ended_or_never_was_are_ignored(served: Served) -> None:
    want = constrained(served)
    running = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW)
    running.next_token()
    running.send(1, {1}, index=7)
    served.engine.send_mask("unknown", 0, 0, b"")
    assert running.answer().token_ids == want


@pytest.mark.parametrize("first_mask", [None, bytes(3)])
def test_a_constrained_request_without_a_valid_first_mask_is_refused(
    served: Served, first_mask: bytes | None
) -> None:
    refused = Pending(served.request(None, PROMPT, is_constrained=True), queue.SimpleQueue())
    served.engine.submit(refused.request, refused.events.put, first_mask)
    assert "token mask" in str(error_of(refused.answer()))


def test_a_sequence_that_gets_no_mask_in_time_fails_alone(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.engine.build.MASK_S", 0.3)
    with serving(family.base, tmp_path / "registry") as served:
        free = unconstrained(served)
        late = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW, n=2)
        running = served.start(None, LONG_PROMPT, max_new_tokens=NUM_NEW)
        error = error_of(late.pending.answer())
        assert isinstance(error, MaskTimeout)
        assert "0.3 s" in str(error)
        assert running.answer().token_ids == free
        assert eventually(lambda: served.metric("kv_cache_usage_ratio") == 0)


def test_a_mask_that_allows_nothing_ends_its_sequence(served: Served) -> None:
    one = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW, n=2)
    one.next_token()
    # The bits behind the last token allow nothing.
    one.send_bits(1, pack({259, 287}, 288))
    answer = one.answer()
    assert reasons_of(answer) == {0: "stop", 1: "length"}
    assert (len(tokens_of(answer, 0)), len(tokens_of(answer, 1))) == (1, NUM_NEW)
    assert isinstance(answer.end, DoneEvent)


def test_a_first_mask_that_allows_nothing_ends_every_sequence(served: Served) -> None:
    answer = start_constrained(served, None, PROMPT, lambda _: set(), n=3).answer()
    assert reasons_of(answer) == {0: "stop", 1: "stop", 2: "stop"}
    assert answer.token_ids == []


def test_an_end_token_that_the_mask_allows_ends_the_sequence(served: Served) -> None:
    def three_tokens(tokens: list[int]) -> set[int]:
        return {9, 10} if len(tokens) < 3 else {END}

    answer = start_constrained(served, None, PROMPT, three_tokens, max_new_tokens=NUM_NEW).answer()
    assert set(answer.token_ids[:3]) <= {9, 10}
    assert answer.token_ids[3:] == [END]
    assert reasons_of(answer) == {0: "stop"}


def test_a_constraint_that_ends_leaves_the_rest_free(served: Served, family: Family) -> None:
    def opening(tokens: list[int]) -> set[int]:
        return branching(tokens) if len(tokens) < 4 else set(range(259))

    model = AutoModelForCausalLM.from_pretrained(family.base, dtype=torch.float32)
    want, margins = generate(model, PROMPT, NUM_NEW, opening)
    one = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW, stop_token_ids=frozenset())
    for position in range(1, 4):
        one.next_token()
        one.send(position, branching(one.generated[0]))
    one.next_token()
    one.send(4, None)
    assert same_up_to_a_tie(one.pending.answer().token_ids, want[4:], margins[4:])


def test_sequences_of_one_request_have_masks_of_their_own(served: Served) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": NUM_NEW}
    both = start_constrained(served, None, PROMPT, seed=4, n=2, **sampling).answer()
    for index in (0, 1):
        alone = start_constrained(served, None, PROMPT, seed=4 + index, **sampling).answer().token_ids
        assert tokens_of(both, index) == alone
        assert all(token in branching(alone[:position]) for position, token in enumerate(alone))


def test_log_probabilities_are_renormalized_over_the_allowed_tokens(served: Served, family: Family) -> None:
    allowed = {4, 7, 90}
    answer = start_constrained(
        served, None, PROMPT, lambda _: allowed, max_new_tokens=1, logprobs=5, temperature=0.7, seed=1
    ).answer()
    (event,) = (event for event in answer.events if isinstance(event, TokenEvent))
    model = AutoModelForCausalLM.from_pretrained(family.base, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    want = logits[sorted(allowed)].log_softmax(-1)
    ranked = sorted(zip(sorted(allowed), want.tolist(), strict=True), key=lambda pair: -pair[1])
    assert [token for token, _ in event.top] == [token for token, _ in ranked]
    assert [logprob for _, logprob in event.top] == pytest.approx(
        [logprob for _, logprob in ranked], abs=1e-4
    )
    assert event.logprob == dict(event.top)[event.token_id]


def test_a_request_that_is_cancelled_while_it_waits_gives_everything_back(served: Served) -> None:
    want = constrained(served)
    waiting = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW, n=2)
    waiting.next_token()
    served.engine.cancel(waiting.pending.request.id)
    waiting.send(1, {1})
    assert eventually(lambda: served.num_cancelled() == 1)
    assert eventually(lambda: served.metric("kv_cache_usage_ratio") == 0)
    assert constrained(served) == want


def test_a_sequence_that_is_stopped_while_it_waits_leaves_the_others(served: Served) -> None:
    one = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW, n=2)
    one.next_token()
    served.engine.stop_sequence(one.pending.request.id, 0)
    answer = one.answer()
    assert reasons_of(answer) == {0: "stop", 1: "length"}
    assert len(tokens_of(answer, 1)) == NUM_NEW


def test_an_engine_that_stops_tells_those_that_wait_for_masks(family: Family, tmp_path: Path) -> None:
    with serving(family.base, tmp_path / "registry") as served:
        waiting = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW)
        waiting.next_token()
        served.engine.stop()
        assert isinstance(error_of(waiting.pending.answer()), Draining)


def test_a_sequence_that_is_preempted_while_it_waits_goes_on_with_its_mask(
    family: Family, tmp_path: Path, mode: Mode
) -> None:
    # With one for padding: not enough for two of these sequences.
    num_pages, num_new = (3, 100) if mode == "vllm" else (9, 70)
    with serving(
        family.base, tmp_path / "registry", mode, kv_cache_gb=kv_cache_gb(mode, num_pages)
    ) as served:
        want, free = constrained(served), served.ask(None, LONG_PROMPT, max_new_tokens=num_new).token_ids
        waiting = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW)
        waiting.next_token()
        # The engine would keep the earliest sequence, if it did not wait.
        assert served.ask(None, LONG_PROMPT, max_new_tokens=num_new).token_ids == free
        # vLLM preempts the one that came last before it preempts one that waits.
        assert served.metric("preemptions_total") == (2 if mode == "vllm" else 1)
        assert waiting.answer().token_ids == want


def test_logits_that_are_not_finite_fail_a_constrained_request_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = unconstrained(served)

    def poisons(batch: Batch, step: Callable[[], Tensor]) -> Tensor:
        logits, row = step().clone(), 0
        for sequence, num_tokens, _ in batch:
            num_logits = sequence.num_logits(num_tokens)
            if sequence.num_prompt_tokens == len(PROMPT):
                logits[row : row + num_logits] = torch.nan
            row += num_logits
        return logits

    on_forward(monkeypatch, poisons)
    running = served.start(None, LONG_PROMPT, max_new_tokens=NUM_NEW)
    answer = start_constrained(served, None, PROMPT, max_new_tokens=NUM_NEW).answer()
    assert "not finite" in str(error_of(answer))
    assert running.answer().token_ids == free


@pytest.mark.parametrize("function", ["apply_masks", "pad_sequence"])
def test_masked_logits_that_cannot_be_computed_fail_their_own_request_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    want, free = constrained(served), unconstrained(served)
    faulty = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW, n=2)
    faulty.next_token()
    original = getattr(request_state, function)
    marked = pack({77}, faulty.pending.request.num_embeddings)
    masked = request_state.masked

    def fails_for_marked(ready: list[Held]) -> Tensor:
        def fails(*args: Any, **kwargs: Any) -> Tensor:
            if any(held.mask == marked for held in ready):
                raise RuntimeError("as if the device had no memory")
            result: Tensor = original(*args, **kwargs)
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request_state, function, fails)
            return masked(ready)

    monkeypatch.setattr(core, "masked", fails_for_marked)
    waiting = start_constrained(served, None, PROMPT, max_new_tokens=NUM_NEW)
    running = served.start(None, LONG_PROMPT, max_new_tokens=NUM_NEW)
    faulty.send_bits(1, marked)
    assert "as if the device had no memory" in str(error_of(faulty.pending.answer()))
    assert waiting.answer().token_ids == want
    assert running.answer().token_ids == free
    assert eventually(lambda: served.metric("kv_cache_usage_ratio") == 0)


def test_a_row_that_cannot_be_copied_fails_its_own_request_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, free = constrained(served), unconstrained(served)
    running = served.start(None, LONG_PROMPT, max_new_tokens=NUM_NEW)
    monkeypatch.setattr(HeldLogits, "keep_copy", lambda held, output: 1 // 0)
    faulty = ByHand.start(served, PROMPT, max_new_tokens=NUM_NEW)
    faulty.next_token()
    assert "ZeroDivisionError" in str(error_of(faulty.pending.answer()))
    monkeypatch.undo()
    assert running.answer().token_ids == free
    assert constrained(served) == want
