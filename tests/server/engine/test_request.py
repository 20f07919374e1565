"""Requests are plain values: another process can be sent one."""

from __future__ import annotations

import pickle

from deltastore.registry.records import VersionRecord
from server.engine.request import Request
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


def test_the_digest_is_the_record_s_and_none_for_the_base() -> None:
    assert Request("a", "default", "v", RECORD, (1,)).digest == RECORD.digest
    assert Request("b", "default", None, None, (1,)).digest is None
