"""Requests and events are plain values: they can be sent to another process."""

from __future__ import annotations

import pickle

from deltastore.registry.records import VersionRecord
from server.engine.events import (
    DoneEvent,
    ErrorEvent,
    FinishEvent,
    PromptEvent,
    ScoredToken,
    Timings,
    TokenEvent,
)
from server.engine.request import Request
from server.errors import InvalidRequest
from server.sampling_params import SamplingParams

RECORD = VersionRecord(
    tenant="default", name="v", version=3, digest="0" * 64, size_bytes=10, data_start=4, device_bytes=6,
    base_fingerprint="1" * 64, chunk_sha256=("2" * 64,), created_at="2025-01-01T00:00:00+00:00", method="both",
    fidelity={"kl": 0.01}, activate=True,
)  # fmt: skip


def test_a_request_is_equal_after_pickling() -> None:
    params = SamplingParams(
        temperature=0.5, stop=("\n",), stop_token_ids=frozenset({2}), seed=1, logprobs=2, n=2
    )
    for request in (
        Request("a", "default", "v", RECORD, (1, 2, 3), params),
        Request("b", "default", None, None, (1,)),
    ):
        assert pickle.loads(pickle.dumps(request)) == request


def test_events_are_equal_after_pickling_and_errors_keep_their_field() -> None:
    for event in (
        PromptEvent((ScoredToken(1, -0.5, ((1, -0.5),)),)),
        TokenEvent(0, 5, "a"),
        FinishEvent(0, "stop", ""),
        DoneEvent(Timings(0.1, 0.0, False, 0.2, 0.3), 3, 4),
    ):
        assert pickle.loads(pickle.dumps(event)) == event
    error = pickle.loads(pickle.dumps(ErrorEvent(InvalidRequest("too long", "prompt")))).error
    assert isinstance(error, InvalidRequest)
    assert (str(error), error.param) == ("too long", "prompt")


def test_the_digest_is_the_record_s_and_none_for_the_base() -> None:
    assert Request("a", "default", "v", RECORD, (1,)).digest == RECORD.digest
    assert Request("b", "default", None, None, (1,)).digest is None
