"""Messages are equal after a way through the codec; invalid ones are refused with one error."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from deltastore.base import Base
from deltastore.errors import PeraxisError, StorageFull, VariantQuarantined
from deltastore.registry.records import VersionRecord
from server.errors import EngineFailed, EngineRestarted, InvalidRequest
from server.metrics.instruments import Snapshot
from server.protocol.messages import (
    MAX_MESSAGE_BYTES,
    Beat,
    CallDone,
    Cancel,
    ClientGone,
    ClientMessage,
    DeltaState,
    DoneEvent,
    EngineFacts,
    EngineMessage,
    ErrorEvent,
    FinishEvent,
    ForgetVariants,
    Header,
    Hello,
    LoadCall,
    Mask,
    MetricsAnswer,
    MetricsQuery,
    Outputs,
    Pause,
    PinChanged,
    Progress,
    PromptEvent,
    ResidencyAnswer,
    ResidencyQuery,
    ScoredToken,
    SequenceProgress,
    StopSequence,
    Submit,
    Timings,
    TokenEvent,
    Welcome,
    decode_client_message,
    decode_engine_message,
    decode_header,
    encode,
    encode_header,
)
from server.protocol.request import PageHashes, Request, SamplingParams, token_ids_of

RECORD = VersionRecord(
    tenant="default", name="v", version=3, digest="0" * 64, size_bytes=10, data_start=4, device_bytes=6,
    base_fingerprint="1" * 64, chunk_sha256=("2" * 64,), created_at="2025-01-01T00:00:00+00:00", method="both",
    report="3" * 32, activate=True, agreement=0.9, kl=0.01,
)  # fmt: skip
PARAMS = SamplingParams(temperature=0.5, stop=("\n",), stop_token_ids=frozenset({2}), seed=1, logprobs=2, n=2)
REQUEST = Request("a", "default", "v", RECORD, token_ids_of([1, 2, 3]), 10, PARAMS)
BASE = Base(
    "org/base", "3" * 64, {"wte": (10, 4)}, {"model_type": "llama", "rope": {"base": 1e4}}, "wte", None
)
EVENTS = (
    PromptEvent((ScoredToken(1, -0.5, ((1, -0.5),)),)),
    TokenEvent(0, 5),
    TokenEvent(1, 6, -0.1, ((6, -0.1), (7, -2.5))),
    FinishEvent(0, "stop"),
    DoneEvent(Timings(0.1, 0.0, False, 0.2, 0.3)),
)


@pytest.mark.parametrize(
    "message",
    [
        Hello(),
        Submit(REQUEST, 1.5),
        Submit(replace(REQUEST, page_hashes=PageHashes.of(REQUEST.prompt_ids, 2)), 1.5),
        Submit(Request("b", "default", None, None, token_ids_of([1]), 10), 2.0),
        Cancel("a"),
        StopSequence("a", 1),
        Submit(
            Request("c", "default", None, None, token_ids_of([1]), 10, SamplingParams(is_constrained=True)),
            2.0,
            b"\x07\0\0\0",
        ),
        Mask("a", 1, 2, b"\x01\0\0\0"),
        Mask("a", 0, 3, None),
        Pause("a", is_paused=True),
        LoadCall(1, "pin", RECORD),
        ResidencyQuery(2, ("acme/math@1",)),
        MetricsQuery(3),
        ForgetVariants(("default/v",)),
        ClientGone(b"http-1"),
    ],
)
def test_a_client_s_message_is_equal_after_the_codec(message: ClientMessage) -> None:
    assert decode_client_message(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Welcome(EngineFacts(BASE, 4096, 1 << 20, 8)),
        Welcome(EngineFacts(BASE, 4096, 1 << 20, 8, 16)),
        Outputs(tuple(("a", event) for event in EVENTS)),
        CallDone(1, None),
        ResidencyAnswer(2, (DeltaState("host", True, 3),)),
        MetricsAnswer(3, Snapshot(())),
        Beat(),
        PinChanged(RECORD, is_pinned=True),
    ],
)
def test_an_engine_s_message_is_equal_after_the_codec(message: EngineMessage) -> None:
    assert decode_engine_message(encode(message)) == message


@pytest.mark.parametrize(
    "error",
    [
        VariantQuarantined("corrupt"),
        EngineRestarted("again"),
        InvalidRequest("too long", "prompt"),
        StorageFull("/data is full", public="the disk is full"),
    ],
)
def test_an_error_keeps_its_class_message_and_field(error: PeraxisError) -> None:
    message = decode_engine_message(encode(Outputs((("a", ErrorEvent(error)),))))
    assert isinstance(message, Outputs)
    event = message.events[0][1]
    assert isinstance(event, ErrorEvent)
    assert type(event.error) is type(error)
    assert str(event.error) == str(error)
    assert event.error.public == error.public
    assert getattr(event.error, "param", None) == getattr(error, "param", None)


def test_token_ids_travel_as_four_bytes_each() -> None:
    ids = token_ids_of([200_000]) * 10_000
    progress = Progress((SequenceProgress(ids),), has_prompt=False, first_token_at=None)
    message = Submit(Request("a", "default", None, None, ids, 300_000), 0.0, progress=progress)
    raw = encode(message)
    assert len(raw) < 2 * 4 * len(ids) + 1000
    assert decode_client_message(raw) == message


@pytest.mark.parametrize("ids", [b"abc", [1, 2], None])
def test_token_ids_of_another_form_are_refused(ids: object) -> None:
    plain = msgspec.msgpack.decode(encode(Submit(REQUEST, 1.5)))
    plain["request"]["prompt_ids"] = ids
    with pytest.raises(EngineFailed, match="cannot be read"):
        decode_client_message(msgspec.msgpack.encode(plain))


@pytest.mark.parametrize("header", [Header(), Header("acme"), Header("acme", "r")])
def test_a_header_is_equal_after_the_codec(header: Header) -> None:
    assert decode_header(encode_header(header)) == header
    with pytest.raises(EngineFailed, match="no header"):
        decode_header(encode_header(header)[:-1])


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x01", encode(Cancel("a"))[:-1], encode(Beat())])
def test_bytes_that_are_no_client_message_are_refused(raw: bytes) -> None:
    with pytest.raises(EngineFailed, match="cannot be read"):
        decode_client_message(raw)


def test_sampling_out_of_range_is_refused_by_the_receiver_too() -> None:
    plain = msgspec.msgpack.decode(encode(Submit(REQUEST, 1.5)))
    plain["request"]["sampling_params"]["n"] = 0
    with pytest.raises(EngineFailed, match="n must be from 1 to 128"):
        decode_client_message(msgspec.msgpack.encode(plain))


def test_a_message_beyond_the_limit_is_refused_by_its_sender() -> None:
    ids = token_ids_of([1]) * (1 + MAX_MESSAGE_BYTES // 4)
    with pytest.raises(InvalidRequest, match="send a shorter one"):
        encode(Submit(Request("a", "default", None, None, ids, 10), 0.0))


def test_the_digest_is_the_record_s_and_none_for_the_base() -> None:
    assert REQUEST.digest == RECORD.digest
    assert Request("b", "default", None, None, token_ids_of([1]), 10).digest is None
