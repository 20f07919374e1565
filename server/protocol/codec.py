"""Messages as MessagePack. An error of the tree travels as its class's name, its message and its field."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import msgspec

from deltastore.errors import PeraxisError
from server.errors import EngineFailed, InvalidRequest, RateLimited
from server.protocol.messages import MAX_MESSAGE_BYTES, ClientMessage, EngineMessage


def _to_plain(value: object) -> object:
    if isinstance(value, PeraxisError):
        return type(value).__name__, str(value), value.public, getattr(value, "param", None)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def _from_plain(kind: type, value: Any) -> object:
    if issubclass(kind, PeraxisError):
        name, message, public, param = value
        error = _errors().get(name, PeraxisError)
        if error is InvalidRequest or error is RateLimited:
            return error(message, param)
        return error(message, public=public)
    raise NotImplementedError(f"{kind.__name__} cannot be received")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
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
