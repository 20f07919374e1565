"""A fault of one request, variant or load never changes the tokens of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from deltastore.errors import VariantQuarantined
from deltastore.registry.records import VersionRecord
from server.deltas.residency import Residency
from server.deltas.resident import ResidentDelta
from server.engine.model_runner import Batch
from server.errors import EngineFailed, InvalidRequest
from server.protocol.messages import ErrorEvent
from tests.helpers.tiny_models import Change, make_pair
from tests.server.helpers.live_server import eventually
from tests.server.helpers.served import (
    PAGE_TOKENS,
    WAIT_S,
    Answer,
    Family,
    Mode,
    Pending,
    Served,
    generate,
    kv_cache_gb,
    make_delta,
    make_family,
    on_forward,
    same_up_to_a_tie,
    serving,
)
from tests.vllm.helpers.environment import SIZES

PROMPTS = [[5, 6, 7, 8], list(range(40, 90)), [9] * 20, [200, 3, 1]]
NUM_NEW = 24


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), seed=5, num_variants=3)


@pytest.fixture
def served(family: Family, tmp_path: Path, mode: Mode) -> Iterator[Served]:
    """An engine with a slot for each of three variants and no host cache, so that each load reads its object."""
    with serving(family.base, tmp_path / "registry", mode, max_gpu_deltas=3, max_host_cache_gb=0) as running:
        yield running


@dataclass(slots=True)
class Others:
    """Requests of the base and of one variant, and their tokens in an undisturbed run."""

    served: Served
    record: VersionRecord
    undisturbed: list[list[int]]

    @classmethod
    def of(cls, served: Served, artifact: Path) -> Others:
        others = cls(served, served.publish(artifact, "others"), [])
        others.undisturbed = [pending.answer().token_ids for pending in others.start()]
        return others

    def start(self) -> list[Pending]:
        records = [None, self.record]
        return [
            self.served.start(record, prompt, max_new_tokens=NUM_NEW)
            for prompt in PROMPTS
            for record in records
        ]

    def undisturbed_by(self, disturb: Callable[[], object]) -> object:
        """Run the requests, call `disturb` meanwhile, and compare their tokens with the undisturbed run."""
        running = self.start()
        result = disturb()
        assert [pending.answer().token_ids for pending in running] == self.undisturbed
        return result


def failed(answer: Answer) -> Exception:
    assert isinstance(answer.end, ErrorEvent)
    return answer.end.error


def touches(batch: Batch, digest: str) -> bool:
    return any(item.sequence.digest == digest for item in batch)


def test_a_step_that_fails_for_one_variant_fails_its_requests_alone(
    served: Served, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, bad = Others.of(served, family.artifacts[0]), served.publish(family.artifacts[1], "bad")

    def fails(batch: Batch, step: Callable[[], Tensor]) -> Tensor:
        if touches(batch, bad.digest):
            raise RuntimeError("as if a kernel had failed")
        return step()

    on_forward(monkeypatch, fails)
    answer = others.undisturbed_by(lambda: served.ask(bad, PROMPTS[1], max_new_tokens=NUM_NEW))
    assert isinstance(answer, Answer)
    assert "as if a kernel had failed" in str(failed(answer))


def test_a_request_whose_delta_is_missing_from_its_step_fails_alone(
    served: Served, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, lost = Others.of(served, family.artifacts[0]), served.publish(family.artifacts[1], "lost")
    find = Residency.find

    def misses(residency: Residency, version: str) -> ResidentDelta | None:
        return None if version == lost.label else find(residency, version)

    monkeypatch.setattr(Residency, "find", misses)
    answer = others.undisturbed_by(lambda: served.ask(lost, PROMPTS[1], max_new_tokens=NUM_NEW))
    assert isinstance(answer, Answer)
    assert "is not resident" in str(failed(answer))


def test_no_memory_in_a_mixed_step_is_no_failure_where_each_alone_has_enough(
    served: Served, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = Others.of(served, family.artifacts[0])
    failures = iter([True] * 5)

    def scarce(batch: Batch, step: Callable[[], Tensor]) -> Tensor:
        if len(batch) > 1 and next(failures, False):
            raise MemoryError
        return step()

    on_forward(monkeypatch, scarce)
    others.undisturbed_by(lambda: None)
    assert next(failures, None) is None


def test_logits_that_are_not_finite_fail_their_own_request_and_leave_no_trace(
    served: Served, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, sick = Others.of(served, family.artifacts[0]), served.publish(family.artifacts[1], "sick")
    want = served.ask(sick, PROMPTS[1], max_new_tokens=NUM_NEW).token_ids

    def poisons(batch: Batch, step: Callable[[], Tensor]) -> Tensor:
        logits, row = step().clone(), 0
        for sequence, num_tokens, _ in batch:
            num_logits = sequence.num_logits(num_tokens)
            if sequence.digest == sick.digest:
                logits[row : row + num_logits] = torch.nan
            row += num_logits
        return logits

    with monkeypatch.context() as patched:
        on_forward(patched, poisons)
        answer = others.undisturbed_by(lambda: served.ask(sick, PROMPTS[1], max_new_tokens=NUM_NEW))
    assert isinstance(answer, Answer)
    assert isinstance(failed(answer), EngineFailed)
    assert "not finite" in str(failed(answer))
    assert served.ask(sick, PROMPTS[1], max_new_tokens=NUM_NEW).token_ids == want


def test_an_object_corrupted_between_two_loads_is_quarantined(served: Served, family: Family) -> None:
    others, bad = Others.of(served, family.artifacts[0]), served.publish(family.artifacts[1], "bad")
    served.ask(bad, PROMPTS[0])
    served.engine.load(bad, "unload").result(WAIT_S)
    path = served.registry.object_path(bad)
    path.chmod(0o644)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    answer = others.undisturbed_by(lambda: served.ask(bad, PROMPTS[0]))
    assert isinstance(answer, Answer)
    assert isinstance(failed(answer), VariantQuarantined)


def test_a_new_version_leaves_the_old_one_s_streams_alone(served: Served, family: Family) -> None:
    old = served.publish(family.artifacts[0], "v")
    want = served.ask(old, PROMPTS[1], max_new_tokens=60).token_ids
    running = served.start(old, PROMPTS[1], max_new_tokens=60)
    new = served.publish(family.artifacts[1], "v")
    assert (old.version, new.version) == (1, 2)
    other = served.ask(new, PROMPTS[1], max_new_tokens=60).token_ids
    assert running.answer().token_ids == want != other


def test_a_variant_deleted_while_it_runs_answers_to_the_end(served: Served, family: Family) -> None:
    others, gone = Others.of(served, family.artifacts[0]), served.publish(family.artifacts[1], "gone")
    want = served.ask(gone, PROMPTS[1], max_new_tokens=60).token_ids
    running = served.start(gone, PROMPTS[1], max_new_tokens=60)

    def delete() -> None:
        served.registry.delete("default", gone.name)
        served.engine.load(gone, "unload").result(WAIT_S)

    others.undisturbed_by(delete)
    assert running.answer().token_ids == want


def test_clients_that_go_leave_the_others_alone(served: Served, family: Family) -> None:
    others = Others.of(served, family.artifacts[0])

    def come_and_go() -> None:
        going = [
            served.start(None, PROMPTS[1], max_new_tokens=150, n=64, stop_token_ids=frozenset())
            for _ in range(4)
        ]
        going[0].events.get(timeout=WAIT_S)  # its first token
        for pending in going:
            served.engine.cancel(pending.request.id)

    others.undisturbed_by(come_and_go)
    assert eventually(lambda: served.num_cancelled() == 4)


def test_the_same_seed_draws_the_same_tokens_in_any_batch(served: Served, family: Family) -> None:
    others = Others.of(served, family.artifacts[0])
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 3, "max_new_tokens": NUM_NEW}
    alone = served.ask(others.record, PROMPTS[0], **sampling).token_ids
    crowded = others.undisturbed_by(lambda: served.ask(others.record, PROMPTS[0], **sampling).token_ids)
    assert crowded == alone


def test_the_same_seed_draws_the_same_beside_a_variant_of_more_tokens(tmp_path: Path, mode: Mode) -> None:
    pair = make_pair("llama", tmp_path, seed=6, changes=(Change(added_tokens=5),), **SIZES)
    wider = make_delta(pair.base, pair.finetunes[0], tmp_path / "wider.safetensors")
    sampling = {"temperature": 1.0, "seed": 3, "max_new_tokens": NUM_NEW}
    with serving(pair.base, tmp_path / "registry", mode) as served:
        record = served.publish(wider, "wider")
        alone = served.ask(None, PROMPTS[0], **sampling).token_ids
        crowd = [served.start(record, prompt, max_new_tokens=60) for prompt in PROMPTS]
        assert served.ask(None, PROMPTS[0], **sampling).token_ids == alone
        for pending in crowd:
            pending.answer()


def test_a_pin_outlives_an_older_call_to_unload(served: Served, family: Family) -> None:
    record = served.publish(family.artifacts[1], "v")
    running = served.start(record, PROMPTS[1], max_new_tokens=150)
    unloaded = served.engine.load(record, "unload")
    served.engine.load(record, "pin").result(WAIT_S)
    unloaded.result(WAIT_S)
    running.answer()
    assert served.level(record) == "device"
    assert served.engine.state_of(record).is_pinned


def test_contexts_of_a_long_rope_end_where_its_factors_would_change(tmp_path: Path, mode: Mode) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
    }
    lengths: dict[str, Any] = {"original_max_position_embeddings": 64, "max_position_embeddings": 256}
    pair = make_pair("phi3", tmp_path, seed=6, changes=(), rope_parameters=rope, **lengths, **SIZES)
    model = AutoModelForCausalLM.from_pretrained(pair.base, dtype=torch.float32)
    with serving(pair.base, tmp_path / "registry", mode) as served:
        assert served.engine.facts.max_model_len == 64
        tokens, margins = generate(model, PROMPTS[1][:40], 20)
        assert same_up_to_a_tie(
            served.ask(None, PROMPTS[1][:40], max_new_tokens=20).token_ids, tokens, margins
        )


def test_odd_but_valid_sampling_is_served(served: Served) -> None:
    # A random token may be an end token.
    sampling: dict[str, Any] = {"max_new_tokens": 8, "stop_token_ids": frozenset()}
    greedy = served.ask(None, PROMPTS[0], temperature=0.0, **sampling).token_ids
    assert served.ask(None, PROMPTS[0], temperature=1.0, top_k=1, **sampling).token_ids == greedy
    assert len(served.ask(None, PROMPTS[0], temperature=1.0, top_k=10**6, **sampling).token_ids) == 8


def test_more_than_the_cache_holds_is_refused_at_once(family: Family, tmp_path: Path, mode: Mode) -> None:
    # One page, and one for padding.
    fits = PAGE_TOKENS[mode]
    with serving(family.base, tmp_path / "registry", mode, kv_cache_gb=kv_cache_gb(mode, 2)) as small:
        assert len(small.ask(None, [5] * (fits - 8), max_new_tokens=8).token_ids) == 8
        refusal = failed(small.ask(None, [5] * (fits - 7), max_new_tokens=8))
        assert isinstance(refusal, InvalidRequest)
        assert f"{fits} that fit" in str(refusal)
