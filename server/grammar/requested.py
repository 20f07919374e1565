"""OpenAI's fields `response_format`, `tools` and `tool_choice`, and what they ask of an output.

Fields that the API documents and that change nothing here are taken in; unknown ones are ignored, as OpenAI's clients
expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from server.errors import InvalidRequest
from server.grammar.grammar import (
    Grammar,
    ToolSchema,
    any_object,
    arguments_of,
    calls_of,
    encoded,
    matching_schema,
)

MAX_TOOLS = 128
# Arguments of a function that names no parameters, as OpenAI has it.
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class JsonSchema(Struct, frozen=True):
    """The field `json_schema` of a response format."""

    name: Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with type json_schema, and only then")


class Function(Struct, frozen=True, omit_defaults=True):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    """A tool; only functions are."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, frozen=True):
    name: Name


class NamedTool(Struct, frozen=True):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
# How calls stand in the output: in the variant's own form, in a JSON array, or as the arguments of one call alone.
CallForm = Literal["free", "array", "arguments"]


@dataclass(frozen=True, slots=True)
class Requested:
    """The form that a request asks of its output.

    Args:
        grammar: all of the output matches it; None leaves it free.
        tools: as the chat template is given them, in JSON, which is short beside its values; empty if the model may
            call none.
        names: of the tools.
        form: how tool calls stand in the output.
        called: the only tool that is called, with the form ``arguments``.
    """

    grammar: Grammar | None = None
    tools: bytes = b""
    names: frozenset[str] = frozenset()
    form: CallForm = "free"
    called: str | None = None


def requested(
    response_format: ResponseFormat | None,
    tools: list[Tool] | None = None,
    tool_choice: ToolChoice | None = None,
    parallel_tool_calls: bool | None = None,
) -> Requested:
    """Return what the fields of a request ask for.

    Raises:
        InvalidRequest: they contradict each other, or the tools or a schema are too large.
    """
    tools = tools or []
    if not tools and tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice asks for a call, and there are no tools: give tools", "tool_choice")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two functions have the same name: rename one", "tools")
    grammar = _format_grammar(response_format)
    if not tools or tool_choice == "none":
        return Requested(grammar)
    shown = encoded(tools, "tools")
    known = frozenset(names)
    if tool_choice in (None, "auto"):
        if grammar is not None:
            raise InvalidRequest(
                "response_format with tools that may be called is not supported: set tool_choice to none or required",
                "response_format",
            )
        return Requested(None, shown, known)
    if isinstance(tool_choice, NamedTool):
        name = tool_choice.function.name
        if name not in names:
            raise InvalidRequest(f"tool_choice: there is no tool {name}: name one of tools", "tool_choice")
        grammar = arguments_of(_schema(tools[names.index(name)]))
        return Requested(grammar, shown, known, "arguments", name)
    grammar = calls_of([_schema(tool) for tool in tools], parallel_tool_calls is not False)
    return Requested(grammar, shown, known, "array")


def _format_grammar(response_format: ResponseFormat | None) -> Grammar | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None:
        return any_object()
    return matching_schema(response_format.json_schema.schema)


def _schema(tool: Tool) -> ToolSchema:
    parameters = tool.function.parameters
    return ToolSchema(tool.function.name, NO_PARAMETERS if parameters is None else parameters)
