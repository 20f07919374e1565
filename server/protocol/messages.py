"""Messages between the engine and its clients, the events among them, and their bytes (MessagePack).

A client's first message is a Hello; the engine answers it when the base is loaded. An error travels as its class's
name, its message and its field.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cache, partial
from importlib.metadata import version
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from deltastore.base import Base
from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.errors import EngineFailed, InvalidRequest, RateLimited
from server.metrics.instruments import Snapshot
from server.protocol.request import Request, TokenIds, max_model_len_of, token_ids_of

FinishReason = Literal["stop", "length", "cancelled"]


class ScoredToken(Struct, frozen=True, array_like=True):
    """A token, its log-probability given the tokens before it, and the likeliest tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


class PromptEvent(Struct, frozen=True, array_like=True, tag=True):
    """Log-probabilities of the prompt's tokens but the first; precedes the first TokenEvent."""

    tokens: tuple[ScoredToken, ...]


class TokenEvent(Struct, frozen=True, array_like=True, tag=True):
    """One generated token."""

    index: int  # of the sequence
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class FinishEvent(Struct, frozen=True, array_like=True, tag=True):
    """The end of one sequence of a request."""

    index: int
    reason: FinishReason


class Timings(Struct, frozen=True):
    """Durations of a request in seconds, each from its submission."""

    queue_s: float  # to its first step, loading included
    load_s: float  # until its delta was resident, waiting for a slot included; 0 if it was resident at once
    cold: bool  # the delta was not resident when the engine took the request in
    ttft_s: float  # to the first token
    total_s: float


class DoneEvent(Struct, frozen=True, array_like=True, tag=True):
    """The last event of a request that was answered."""

    timings: Timings
    num_cached: int = 0  # tokens of the prompt that were not computed, because the prefix cache had them


class ErrorEvent(Struct, frozen=True, array_like=True, tag=True):
    """The last event of a request that failed."""

    error: PeraxisError


Event = PromptEvent | TokenEvent | FinishEvent | DoneEvent | ErrorEvent


# Processes of different versions do not talk to each other, as after an upgrade beneath a running server.
VERSION = version("peraxis")
# Largest message in either direction. Artifacts never pass here: each process reads them from the registry.
MAX_MESSAGE_BYTES = 64 << 20

Level = Literal["device", "host", "disk"]
LoadAction = Literal["load", "pin", "unpin", "unload"]


class Hello(Struct, frozen=True, tag=True):
    """The first message of a client."""

    version: str = VERSION


class SequenceProgress(Struct, frozen=True, array_like=True):
    """The part of one sequence that has come to its client from an engine that died."""

    token_ids: TokenIds = msgspec.field(default_factory=partial(token_ids_of, ()))
    is_over: bool = False  # it has ended, or the client wants no more of it
    is_free: bool = False  # its constraint has ended
    mask: bytes | None = None  # for its next token, if it has come


class Progress(Struct, frozen=True):
    """The part of a request that has come to its client from an engine that died; another one goes on behind it."""

    sequences: tuple[SequenceProgress, ...]  # all `n`
    has_prompt: bool  # the PromptEvent has come
    first_token_at: float | None  # time.monotonic(); None before the first token
    is_paused: bool = False


class Submit(Struct, frozen=True, tag=True):
    """A request to admit; Outputs of the same client carry its events."""

    request: Request
    submitted_at: float  # time.monotonic(), which all processes of a machine share
    first_mask: bytes | None = None  # for the first token of each sequence, if the request is constrained
    progress: Progress | None = None  # if an engine before this one had the request


class Cancel(Struct, frozen=True, tag=True):
    """End a request whose client is gone; unknown ids are ignored."""

    request_id: str


class StopSequence(Struct, frozen=True, tag=True):
    """End one sequence of a request, whose text holds a stop string; unknown ids are ignored."""

    request_id: str
    index: int


class Pause(Struct, frozen=True, tag=True):
    """Let a request whose events are not read wait without rows and pages, or go on; unknown ids are ignored."""

    request_id: str
    is_paused: bool


class Mask(Struct, frozen=True, tag=True):
    """The tokens that a constrained sequence may generate next; ignored if it has ended or is further already."""

    request_id: str
    index: int  # of the sequence
    position: int  # number of tokens that it has generated
    bits: bytes | None  # as `server/engine/request_state.py` describes; None ends the constraint


class LoadCall(Struct, frozen=True, tag=True):
    """Load a delta into a slot, load and pin it, unpin it, or free its slot. Answered by a CallDone."""

    call_id: int
    action: LoadAction
    record: VersionRecord
    # Versions that the record's tenant may pin. None is any number, for what an engine before this one had pinned.
    max_pinned: int | None = None


class ResidencyQuery(Struct, frozen=True, tag=True):
    """Ask for the states of versions. Answered by a ResidencyAnswer."""

    call_id: int
    versions: tuple[str, ...]  # their labels


class MetricsQuery(Struct, frozen=True, tag=True):
    """Ask for the engine's metrics. Answered by a MetricsAnswer."""

    call_id: int


class ResidentsQuery(Struct, frozen=True, tag=True):
    """Ask for the deltas in memory. Answered by a ResidentsAnswer."""

    call_id: int


class ForgetVariants(Struct, frozen=True, tag=True):
    """Remove the series of deleted variants, so that others can have a label."""

    labels: tuple[str, ...]


class ClientGone(Struct, frozen=True, tag=True):
    """Another client has died: cancel its requests."""

    identity: bytes


ClientMessage = (
    Hello
    | Submit
    | Cancel
    | StopSequence
    | Pause
    | Mask
    | LoadCall
    | ResidencyQuery
    | MetricsQuery
    | ResidentsQuery
    | ForgetVariants
    | ClientGone
)


class Header(Struct, frozen=True, array_like=True):
    """The part of a client's message that the engine reads when it comes; the message itself waits for its turn."""

    # Its messages are read in their order; empty for those of no tenant.
    tenant: str = ""
    # The request that it brings, if it can be refused unread; not one that another engine has admitted.
    refusable: str | None = None


class EngineFacts(Struct, frozen=True):
    """Facts that requests and uploads need, and that do not change while the engine runs."""

    base: Base
    max_model_len: int  # most tokens of prompt and output together, for the base
    slot_bytes: int  # no delta may be larger
    num_slots: int
    # Of the prefix cache, for the hashes that come with requests; None if the engine takes none.
    page_tokens: int | None = None
    # The base's tensors that no layer would read from a delta, which may not change them.
    unread: tuple[str, ...] = ()
    longest: int | None = None  # most tokens of a variant with a longer context; None: as of the base

    def max_model_len_of(self, record: VersionRecord | None) -> int:
        """Return the most tokens of prompt and output together for a version; None is the base."""
        return max_model_len_of(record, self.max_model_len, self.longest)


class Welcome(Struct, frozen=True, tag=True):
    """The answer to a Hello once the base is loaded."""

    facts: EngineFacts


class Refused(Struct, frozen=True, tag=True):
    """The answer to a Hello or to an invalid message: the base could not be loaded, or the versions differ."""

    error: PeraxisError


class Outputs(Struct, frozen=True, tag=True):
    """Events of a client's requests since the message before, in order, each with its request's id."""

    events: tuple[tuple[str, Event], ...]


class CallDone(Struct, frozen=True, tag=True):
    """The answer to a LoadCall, or the error of any call; `error` is None if it was done."""

    call_id: int
    error: PeraxisError | None


class DeltaState(Struct, frozen=True, array_like=True):
    """The level of a version's delta, and the version's pin and requests."""

    level: Level
    is_pinned: bool
    num_requests: int  # admitted and not answered in full


class ResidencyAnswer(Struct, frozen=True, tag=True):
    """The answer to a ResidencyQuery, in the order of its versions."""

    call_id: int
    states: tuple[DeltaState, ...]


class Resident(Struct, frozen=True, array_like=True):
    """A version whose delta is in a slot or in the host cache."""

    tenant: str
    name: str
    version: int
    digest: str
    device_bytes: int
    state: DeltaState

    @property
    def label(self) -> str:
        """The name of the version, as that of a VersionRecord."""
        return f"{self.tenant}/{self.name}@{self.version}"


class ResidentsAnswer(Struct, frozen=True, tag=True):
    """The answer to a ResidentsQuery: the least recently used first, those in slots last."""

    call_id: int
    residents: tuple[Resident, ...]


class MetricsAnswer(Struct, frozen=True, tag=True):
    """The answer to a MetricsQuery."""

    call_id: int
    snapshot: Snapshot


class Beat(Struct, frozen=True, tag=True):
    """Sent at least once a second while steps go on; without one, a step hangs."""


class PinChanged(Struct, frozen=True, tag=True):
    """A version was pinned or unpinned; a Welcome is followed by one for each pin. The supervisor keeps all pins."""

    record: VersionRecord
    is_pinned: bool


EngineMessage = (
    Welcome
    | Refused
    | Outputs
    | CallDone
    | ResidencyAnswer
    | ResidentsAnswer
    | MetricsAnswer
    | Beat
    | PinChanged
)


def _to_plain(value: object) -> object:
    if isinstance(value, PeraxisError):
        return type(value).__name__, str(value), value.public, getattr(value, "param", None)
    if isinstance(value, array):
        return memoryview(value).cast("B")
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def _from_plain(kind: type, value: Any) -> object:
    if issubclass(kind, PeraxisError):
        name, message, public, param = value
        error = _errors().get(name, PeraxisError)
        if issubclass(error, (InvalidRequest, RateLimited)):
            return error(message, param)
        return error(message, public=public)
    if kind is array:
        ids = token_ids_of(())
        ids.frombytes(value)
        return ids
    raise NotImplementedError(f"{kind.__name__} cannot be received")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_headers = msgspec.msgpack.Decoder(Header)
# A decoder of a union has no static type.
_client_messages: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(
    cast(Any, ClientMessage), dec_hook=_from_plain
)
_engine_messages: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(
    cast(Any, EngineMessage), dec_hook=_from_plain
)


def encode(message: ClientMessage | EngineMessage) -> bytes:
    """Encode a message.

    Raises:
        InvalidRequest: it is larger than `MAX_MESSAGE_BYTES`.
    """
    raw = _encoder.encode(message)
    if len(raw) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"the request takes {len(raw)} bytes for the engine, more than {MAX_MESSAGE_BYTES}: send a shorter one"
        )
    return raw


def encode_header(header: Header) -> bytes:
    """Encode the header of a client's message."""
    return _encoder.encode(header)


def decode_header(raw: bytes) -> Header:
    """Decode the header of a client's message; raise EngineFailed if it is none of this version."""
    try:
        return _headers.decode(raw)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"a message to the engine has no header: {error}") from error


def decode_client_message(raw: bytes) -> ClientMessage:
    """Decode what a client sent; raise EngineFailed if it is no message of this version."""
    try:
        return _client_messages.decode(raw)
    except (msgspec.DecodeError, PeraxisError) as error:
        raise EngineFailed(f"a message to the engine cannot be read: {error}") from error


def decode_engine_message(raw: bytes) -> EngineMessage:
    """Decode what the engine sent; raise EngineFailed if it is no message of this version."""
    try:
        return _engine_messages.decode(raw)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"a message of the engine cannot be read: {error}") from error


@cache
def _errors() -> dict[str, type[PeraxisError]]:
    return {kind.__name__: kind for kind in _tree(PeraxisError)}


def _tree(kind: type[PeraxisError]) -> Iterator[type[PeraxisError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)
