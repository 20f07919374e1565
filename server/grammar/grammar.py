"""The output that a client asks for, and its grammar in llguidance's form of Lark. Compiles nothing.

All JSON is compact: a model cannot fill its answer with white space, and tokens of keys and punctuation are forced.

Fields that the API documents and that change nothing here are taken in; unknown ones are ignored, as OpenAI's clients
expect.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import DecodeError, Meta, Struct, convert
from msgspec.json import decode, encode

from server.errors import InvalidRequest
from server.text.answer_form import CallSyntax

# Bound on all schemas of one request, and on its tools. llguidance compiles larger ones, but each step would have to
# carry them.
MAX_BYTES = 256 << 10
# serde_json, which llguidance reads schemas with, refuses deeper documents.
MAX_DEPTH = 100
# llguidance clamps the bounds of numbers to 64-bit integers, and then breaks the schema.
BOUND_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_BOUND = 2**63 - 1
# Calls in one answer with `tool_choice` "required".
MAX_CALLS = 32
# llguidance's options of a schema. Clients must not set them: they could make it ignore keywords.
OPTIONS_KEY = "x-guidance"
OPTIONS = {"whitespace_flexible": False}
OPTIONS_DIRECTIVE = "%llguidance"
# Parts of a regular expression that stand otherwise between slashes: escaped characters are taken as they are.
REGEX_PART = re.compile(r"\\.|[/\n\r]", re.DOTALL)
IN_LITERAL = {"/": "\\/", "\n": "\\n", "\r": "\\r", "\\\n": "\\n", "\\\r": "\\r"}
CALL_BEGIN, CALL_MIDDLE, CALL_END = '{"name":', ',"arguments":', "}"
# Of a free answer, where the chat template shows no calls.
COMPACT_CALL = CallSyntax("json")


@dataclass(frozen=True)
class Grammar:
    """A grammar that one request's output must match.

    Args:
        text: in llguidance's form of Lark.
        param: the request's field that it comes from, for error messages.
    """

    text: str
    param: str

    @cached_property
    def key(self) -> str:
        """A name for the content."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A function that a model may call, and the JSON schema of its arguments, which are an object."""

    name: str
    parameters: Mapping[str, Any]


def any_object() -> Grammar:
    """Return the grammar of any JSON object."""
    return checked(f"start: {lark_json({'type': 'object'})}\n", "response_format")


def matching_schema(
    schema: Mapping[str, Any], param: str = "response_format", is_strict: bool = False
) -> Grammar:
    """Return the grammar of JSON that matches a schema.

    Args:
        is_strict: annotations count, too, and are refused where they cannot be enforced.

    Raises:
        InvalidRequest: the schema is too large or too deep, or bounds a number beyond 64 bits.
    """
    check_schema(schema, param)
    return checked(f"start: {lark_json(schema if is_strict else without_annotations(schema))}\n", param)


def matching_regex(regex: str, param: str) -> Grammar:
    """Return the grammar of texts that a regular expression matches as a whole, in the syntax of Rust's regex."""
    # Before it is rewritten.
    check_size(len(regex), param)
    return checked(f"start: /{lark_regex(regex)}/\n", param)


def lark_regex(regex: str) -> str:
    """Return a regular expression as it stands between slashes in Lark."""
    return REGEX_PART.sub(lambda part: IN_LITERAL.get(part[0], part[0]), regex)


def one_of(choices: Sequence[str], param: str) -> Grammar:
    """Return the grammar of a choice of texts."""
    return checked(f"start: {' | '.join(map(lark_text, choices))}\n", param)


def of_lark(text: str, param: str) -> Grammar:
    """Return a client's grammar, in llguidance's form of Lark.

    Raises:
        InvalidRequest: it is too large, or sets options of llguidance.
    """
    if OPTIONS_DIRECTIVE in text:
        raise InvalidRequest(f"{param}: a grammar cannot set {OPTIONS_DIRECTIVE}: leave it out", param)
    return checked(text, param)


# Keywords that say nothing of a value, or nothing that validators must enforce.
ANNOTATIONS = frozenset(("title", "examples", "format", "uniqueItems"))
# Keywords whose value is a schema or a list of such, and whose value has schemas by name.
OF_SCHEMAS = frozenset(
    (
        "items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf", "not", "if",
        "then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
    )
)  # fmt: skip
OF_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


def without_annotations(schema: Any) -> Any:
    """Return a schema without annotations, those of its parts included; it is at most `MAX_DEPTH` deep."""
    if isinstance(schema, list):
        return [without_annotations(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in OF_SCHEMAS:
            value = without_annotations(value)
            if key == "propertyNames" and value == {"type": "string"}:
                continue
        elif key in OF_NAMED_SCHEMAS and isinstance(value, dict):
            value = {name: without_annotations(each) for name, each in value.items()}
        if key not in ANNOTATIONS:
            found[key] = value
    return found


def arguments_of(tool: ToolSchema) -> Grammar:
    """Return the grammar of the arguments of one call of `tool`; raises as `matching_schema`."""
    check_schema(tool.parameters, "tools")
    return checked(f"start: {lark_json(tool.parameters)}\n", "tools")


def calls_of(tools: Sequence[ToolSchema], may_repeat: bool) -> Grammar:
    """Return the grammar of a JSON array of calls, each ``{"name":...,"arguments":{...}}``.

    Args:
        may_repeat: the array may have several calls.

    Raises:
        InvalidRequest: a schema is too deep or bounds a number beyond 64 bits, or all together are too large.
    """
    for tool in tools:
        check_schema(tool.parameters, "tools")
    more = f' ("," call){{0,{MAX_CALLS - 1}}}' if may_repeat else ""
    names = [f"call_{number}" for number in range(len(tools))]
    rules = [
        # Each schema is a document of its own, so that its `$ref` finds its own definitions.
        f"{name}: {lark_text(CALL_BEGIN + json.dumps(tool.name) + CALL_MIDDLE)} {lark_json(tool.parameters)} "
        + lark_text(CALL_END)
        for name, tool in zip(names, tools, strict=True)
    ]
    lines = [f'start: "[" call{more} "]"', f"call: {' | '.join(names)}", *rules]
    return checked("\n".join(lines) + "\n", "tools")


def check_schema(document: object, param: str) -> None:
    """Refuse JSON that is too large, nested more than `MAX_DEPTH` deep, or that bounds a number beyond 64 bits.

    Raises:
        InvalidRequest: names `param`.
    """
    # Before it is walked, which takes far longer.
    encoded(document, param)
    level = [document]
    for _ in range(MAX_DEPTH):
        for value in level:
            _check_bounds(value, param)
        children = (child for value in level for child in _children(value))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep(param)


def encoded(document: object, param: str) -> bytes:
    """Return tools or a schema as JSON; InvalidRequest names `param` if there are more than `MAX_BYTES`."""
    try:
        text = encode(document)
    except RecursionError:
        raise _too_deep(param) from None
    check_size(len(text), param)
    return text


def _too_deep(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: a schema is nested more than {MAX_DEPTH} deep: make it flatter", param)


def _check_bounds(value: object, param: str) -> None:
    if not isinstance(value, dict):
        return
    for key in BOUND_KEYS:
        bound = value.get(key)
        if isinstance(bound, int | float) and not -MAX_BOUND <= bound <= MAX_BOUND:
            raise InvalidRequest(
                f"{param}: {key} is out of the range of 64-bit integers: choose a smaller bound", param
            )


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def lark_json(schema: Mapping[str, Any]) -> str:
    """Return compact JSON that matches a schema, in Lark."""
    own = {key: value for key, value in schema.items() if key != OPTIONS_KEY}
    return f"%json {json.dumps({OPTIONS_KEY: OPTIONS, **own})}"


def lark_text(text: str) -> str:
    """Return a text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def check_size(num_bytes: int, param: str) -> None:
    """Refuse more than `MAX_BYTES` of schemas; InvalidRequest names `param`."""
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(
            f"{param}: its schemas have {num_bytes} bytes, more than {MAX_BYTES}: make them shorter", param
        )


def checked(text: str, param: str) -> Grammar:
    """Return a grammar of a request's field; InvalidRequest names it if the grammar is too large."""
    check_size(len(text), param)
    return Grammar(text, param)


MAX_TOOLS = 128
# Arguments of a function that names no parameters, as OpenAI has it.
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class JsonSchema(Struct, frozen=True):
    """The field `json_schema` of a response format."""

    name: Name
    schema: dict[str, Any] | None = None  # of any object
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """The form that an answer must have. With `json_object`, other servers take a schema, too."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with type json_schema, and only then")
        if self.schema is not None and self.type != "json_object":
            raise ValueError("schema is given with type json_object, and only then")

    def grammar(self) -> Grammar | None:
        """Return the grammar of answers; raises as `matching_schema`."""
        if self.type == "text":
            return None
        schema = self.schema if self.json_schema is None else self.json_schema.schema
        is_strict = self.json_schema is not None and self.json_schema.strict is True
        return any_object() if schema is None else matching_schema(schema, is_strict=is_strict)


Pattern = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]


FORMATS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """The form that an answer must have, as vLLM's clients say it: one of `FORMATS`.

    The other fields are options of vLLM's backends, which clients send with values that ask for nothing.
    """

    json: dict[str, Any] | str | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None  # JSON has none either way
    disable_additional_properties: bool | None = None
    whitespace_pattern: None = None
    structural_tag: None = None

    def __post_init__(self) -> None:
        if self.disable_additional_properties:
            raise ValueError("disable_additional_properties is not supported: say so in the schema")

    def made(self, param: str) -> Grammar | None:
        """Return the grammar of answers; None if no field is given.

        Args:
            param: the request's field, for error messages.

        Raises:
            InvalidRequest: several fields are given, or as `matching_schema` and `of_lark` do.
        """
        names = [name for name in FORMATS if getattr(self, name) not in (None, False)]
        if len(names) > 1:
            raise InvalidRequest(f"{param} has {' and '.join(names)}: give one of them", param)
        if self.json is not None:
            return matching_schema(_schema_of(self.json, param), param)
        if self.regex is not None:
            return matching_regex(self.regex, param)
        if self.choice is not None:
            return one_of(self.choice, param)
        if self.grammar is not None:
            return of_lark(self.grammar, param)
        return any_object() if self.json_object else None


def _schema_of(json: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(json, str):
        # The body's bound on values does not count those of a text.
        check_size(len(json), param)
    try:
        schema = decode(json) if isinstance(json, str) else json
    except (DecodeError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: the schema is no JSON object", param)
    return schema


class Function(Struct, frozen=True):
    """A function that the model may call; chat templates are shown its other fields, too."""

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
# Tools as a client wrote them.
GivenTools = Annotated[
    list[dict[str, Any]],
    Meta(
        max_length=MAX_TOOLS,
        extra_json_schema={
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"enum": ["function"]},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                            "description": {"type": ["string", "null"]},
                            "parameters": {"type": ["object", "null"]},
                            "strict": {"type": ["boolean", "null"]},
                        },
                    },
                },
            }
        },
    ),
]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
# How calls stand in the output: in the variant's own form, in a JSON array, as the arguments of one call alone, or as
# one of harmony's messages, behind which nothing follows.
CallForm = Literal["free", "array", "arguments", "message"]


@dataclass(frozen=True, slots=True)
class Requested:
    """The form that a request asks of its output.

    Args:
        grammar: all of the output matches it; None leaves it free.
        tools: as the chat template is given them, in JSON, which is short beside its values; empty if the model may
            call none.
        names: of the tools.
        form: how tool calls stand in the output.
        called: the only tool that is called, with the forms ``arguments`` and ``message``.
        is_single: a free answer has one call at most.
    """

    grammar: Grammar | None = None
    tools: bytes = b""
    names: frozenset[str] = frozenset()
    form: CallForm = "free"
    called: str | None = None
    is_single: bool = False


def requested(
    grammar: Grammar | None,
    given_tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: ToolChoice | None = None,
    parallel_tool_calls: bool | None = None,
) -> Requested:
    """Return what the fields of a request ask for.

    Args:
        grammar: of an answer that calls no tool.
        given_tools: valid ones, as the client wrote them.

    Raises:
        InvalidRequest: they contradict each other, or the tools or a schema are too large.
    """
    given_tools = given_tools or ()
    tools = convert(given_tools, list[Tool])
    if not tools and tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice asks for a call, and there are no tools: give tools", "tool_choice")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two functions have the same name: rename one", "tools")
    if not tools or tool_choice == "none":
        return Requested(grammar)
    shown = encoded(list(map(_shown, given_tools)), "tools")
    known = frozenset(names)
    if tool_choice in (None, "auto"):
        return Requested(grammar, shown, known, is_single=parallel_tool_calls is False)
    if isinstance(tool_choice, NamedTool):
        name = tool_choice.function.name
        if name not in names:
            raise InvalidRequest(f"tool_choice: there is no tool {name}: name one of tools", "tool_choice")
        grammar = arguments_of(arguments_schema(tools[names.index(name)]))
        return Requested(grammar, shown, known, "arguments", name)
    grammar = calls_of([arguments_schema(tool) for tool in tools], parallel_tool_calls is not False)
    return Requested(grammar, shown, known, "array")


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as templates are shown it: without fields of its function that are null."""
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {**tool, "function": function}


def arguments_schema(tool: Tool) -> ToolSchema:
    """Return the schema of a tool's arguments, which are an object whatever the client's schema leaves out."""
    name, given = tool.function.name, tool.function.parameters
    if given is None:
        return ToolSchema(name, NO_PARAMETERS)
    # Before it is walked.
    check_schema(given, "tools")
    _check_shape(name, given)
    declared = given.get("type", "object")
    if "object" not in (declared if isinstance(declared, list) else [declared]):
        raise InvalidRequest(
            f"tools: the parameters of {name} have another type than object: leave type out", "tools"
        )
    parameters = given if tool.function.strict else without_annotations(given)
    return ToolSchema(name, {**parameters, "type": "object"})


def _check_shape(name: str, parameters: Mapping[str, Any]) -> None:
    """Refuse parameters of a tool whose keywords have values of another type than JSON schema says."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict):
        raise _ill_typed(name, "properties", "an object")
    if not (isinstance(required, list) and all(isinstance(key, str) for key in required)):
        raise _ill_typed(name, "required", "a list of names")
    for key in ("$defs", "definitions"):
        if not isinstance(parameters.get(key, {}), dict):
            raise _ill_typed(name, key, "an object")
    for key, own in properties.items():
        if not isinstance(own, dict | bool):
            raise _ill_typed(name, f"properties.{key}", "an object")
        if isinstance(own, dict) and not isinstance(own.get("enum", []), list):
            raise _ill_typed(name, f"properties.{key}.enum", "a list")


def _ill_typed(name: str, key: str, needed: str) -> InvalidRequest:
    return InvalidRequest(
        f"tools: {key} in the parameters of {name} must be {needed}: change or omit it", "tools"
    )
