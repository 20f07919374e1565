"""Messages and tools of conversations in bodies: their form and bounds. Chat templates are given them as they came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, convert

from deltastore.errors import shown
from server.errors import InvalidRequest
from server.grammar.grammar import MAX_DEPTH, Tools

MAX_MESSAGES = 4096
# Arrays, objects and strings of one JSON body, names of fields included: some 30 for each of 4096 messages.
MAX_VALUES = 1 << 17
# Of JSON that is looked at at once.
PIECE_BYTES = 1 << 17
Role = Annotated[str, Meta(min_length=1, max_length=64)]


def num_values(text: bytes | bytearray) -> int:
    """Return the number of arrays, objects and strings in JSON, those without an end included.

    Takes the time of a few copies. What follows is not counted when there are more than `MAX_VALUES`.
    """
    num_quotes = num_brackets = 0
    for piece in _pieces(text):
        num_quotes += piece.count(b'"')
        if (num_quotes + 1) // 2 + num_brackets > MAX_VALUES:
            break
        outside = _outside_strings(piece, num_quotes)
        num_brackets += outside.count(b"[") + outside.count(b"{")
    return (num_quotes + 1) // 2 + num_brackets


def has_many_members(text: bytes | bytearray) -> bool:
    """True if JSON has more than `MAX_VALUES` commas between members of arrays and objects, whatever they are."""
    num_quotes = num_commas = 0
    for piece in _pieces(text):
        num_quotes += piece.count(b'"')
        num_commas += _outside_strings(piece, num_quotes).count(b",")
        if num_commas > MAX_VALUES:
            return True
    return False


def _pieces(text: bytes | bytearray) -> Iterator[bytes]:
    """Yield JSON in pieces without escapes, so that each quote begins or ends a string."""
    end = 0
    while end < len(text):
        begin, end = end, end + PIECE_BYTES
        piece = bytes(text[begin:end])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # It ends within an escape.
            piece, end = bytes(text[begin : end + 1]), end + 1
        yield piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece


def _outside_strings(piece: bytes, num_quotes: int) -> bytes:
    """Return what is outside the strings of a piece, up to whose end JSON has so many quotes."""
    parts = piece.split(b'"')
    return b"".join(parts[(num_quotes - len(parts) + 1) % 2 :: 2])


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """One part of a message's content."""

    text: str


class RefusalPart(Struct, frozen=True, tag_field="type", tag="refusal"):
    """One part of an assistant's message."""

    refusal: str


READ_PARTS = frozenset(str(each.__struct_config__.tag) for each in (TextPart, RefusalPart))


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class MessageCall(Struct, frozen=True):
    """A call of a tool in an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Struct, frozen=True):
    """The fields of a message that have a form; chat templates are given the others as they are."""

    role: Role
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None

    def __post_init__(self) -> None:
        if self.function_call:
            raise InvalidRequest(
                "function_call in messages is not supported by this server: use tool_calls", "messages"
            )


class _Given(Struct, frozen=True):
    """The parts of a conversation in the body of a call."""

    messages: list[ChatMessage] | None
    tools: Tools | None


TEXT_OR_NULL: dict[str, Any] = {"type": ["string", "null"]}
MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1, "maxLength": 64},
        "content": {
            "anyOf": [
                TEXT_OR_NULL,
                {"type": "array", "items": {"type": "object", "required": ["type"]}},
            ]
        },
        "name": TEXT_OR_NULL,
        "refusal": TEXT_OR_NULL,
        "tool_calls": {
            "type": ["array", "null"],
            "items": {"type": "object", "required": ["id", "type", "function"]},
        },
        "tool_call_id": TEXT_OR_NULL,
    },
}
# Checked when the body is parsed, and given to chat templates as the client wrote them.
Messages = Annotated[
    list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES, extra_json_schema={"items": MESSAGE})
]
# Fields of vLLM's chats that chat templates are rendered by.
TemplateVariables = Annotated[
    dict[
        Annotated[str, Meta(min_length=1, max_length=64)],
        Annotated[str, Meta(max_length=4096)] | int | float | bool | None,
    ],
    Meta(max_length=16),
]
Effort = Annotated[str, Meta(min_length=1, max_length=64)]
ContinuedField = Annotated[str, Meta(min_length=1, max_length=64)]
# Names that transformers renders templates by.
RESERVED_VARIABLES = frozenset(
    (
        "add_generation_prompt", "chat_template", "continue_final_message", "conversations", "documents", "messages",
        "return_assistant_tokens_mask", "tools",
    )
)  # fmt: skip


def check_conversation(messages: list[dict[str, Any]] | None, tools: list[dict[str, Any]] | None) -> None:
    """Refuse messages and tools of another form.

    Raises:
        InvalidRequest: messages have too many values or too deep ones, a field that is not supported, or images, sound
            or files.
        ValidationError: a message or a tool has a field of another type.
    """
    _check_nesting(messages or ())
    _check_parts(messages or ())
    parsed = convert({"messages": messages, "tools": tools}, _Given)
    _check_arguments(parsed.messages or ())


def too_many_values() -> InvalidRequest:
    """Return the error of messages with more than `MAX_VALUES` values."""
    return InvalidRequest(
        f"messages: they have more than {MAX_VALUES} values: leave messages out", "messages"
    )


def _check_nesting(messages: Sequence[dict[str, Any]]) -> None:
    """Refuse messages with more than `MAX_VALUES` values, numbers included, or nested more than `MAX_DEPTH` deep."""
    num_values, level = 0, list[Any](messages)
    for _ in range(MAX_DEPTH):
        num_values += sum(map(len, level))
        if num_values > MAX_VALUES:
            raise too_many_values()
        children = (
            child for value in level for child in (value.values() if isinstance(value, dict) else value)
        )
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise InvalidRequest(
        f"messages: they are nested more than {MAX_DEPTH} deep: make them flatter", "messages"
    )


def _check_parts(messages: Sequence[dict[str, Any]]) -> None:
    """Refuse parts of a message that are not text, such as images and sound, which OpenAI's API has."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in READ_PARTS:
                raise InvalidRequest(
                    f"messages.{number}.content: a part of type {shown(kind)}: only text is read here, and no images, "
                    "sound or files: leave the part out",
                    "messages",
                )


def _check_arguments(messages: Sequence[ChatMessage]) -> None:
    """Refuse arguments of calls, which are JSON in JSON, of too many values."""
    arguments = (call.function.arguments for message in messages for call in message.tool_calls or ())
    if sum(num_values(each.encode()) for each in arguments if isinstance(each, str)) > MAX_VALUES:
        raise InvalidRequest(
            f"messages: the arguments of tool calls have more than {MAX_VALUES} arrays, objects and strings: "
            "leave messages out",
            "messages",
        )
