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
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, Literal

from msgspec import DecodeError, Meta, Struct, convert
from msgspec.json import decode, encode

from server.errors import InvalidRequest
from server.grammar.field_values import ANY, BESIDE_PROPERTIES, FieldReader, FieldValue
from server.text.answer_form import MAX_MARKER_CHARS, AnswerForm, CallSyntax

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
    return _checked(f"start: {_json({'type': 'object'})}\n", "response_format")


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
    return _checked(f"start: {_json(schema if is_strict else without_annotations(schema))}\n", param)


def matching_regex(regex: str, param: str) -> Grammar:
    """Return the grammar of texts that a regular expression matches as a whole, in the syntax of Rust's regex."""
    return _checked(f"start: /{_literal(regex)}/\n", param)


def _literal(regex: str) -> str:
    """Return a regular expression as it stands between slashes."""
    return REGEX_PART.sub(lambda part: IN_LITERAL.get(part[0], part[0]), regex)


def one_of(choices: Sequence[str], param: str) -> Grammar:
    """Return the grammar of a choice of texts."""
    return _checked(f"start: {' | '.join(map(_text, choices))}\n", param)


def of_lark(text: str, param: str) -> Grammar:
    """Return a client's grammar, in llguidance's form of Lark.

    Raises:
        InvalidRequest: it is too large, or sets options of llguidance.
    """
    if OPTIONS_DIRECTIVE in text:
        raise InvalidRequest(f"{param}: a grammar cannot set {OPTIONS_DIRECTIVE}: leave it out", param)
    return _checked(text, param)


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
    return _checked(f"start: {_json(tool.parameters)}\n", "tools")


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
        f"{name}: {_text(CALL_BEGIN + json.dumps(tool.name) + CALL_MIDDLE)} {_json(tool.parameters)} {_text(CALL_END)}"
        for name, tool in zip(names, tools, strict=True)
    ]
    lines = [f'start: "[" call{more} "]"', f"call: {' | '.join(names)}", *rules]
    return _checked("\n".join(lines) + "\n", "tools")


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
    _check_size(len(text), param)
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


def _json(schema: Mapping[str, Any]) -> str:
    own = {key: value for key, value in schema.items() if key != OPTIONS_KEY}
    return f"%json {json.dumps({OPTIONS_KEY: OPTIONS, **own})}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _check_size(num_bytes: int, param: str) -> None:
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(
            f"{param}: its schemas have {num_bytes} bytes, more than {MAX_BYTES}: make them shorter", param
        )


def _checked(text: str, param: str) -> Grammar:
    _check_size(len(text), param)
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


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """The form that an answer must have, as vLLM's clients say it: one of the fields."""

    json: dict[str, Any] | str | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None

    def made(self, param: str) -> Grammar | None:
        """Return the grammar of answers; None if no field is given.

        Args:
            param: the request's field, for error messages.

        Raises:
            InvalidRequest: several fields are given, or as `matching_schema` and `of_lark` do.
        """
        names = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
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
        grammar = arguments_of(_schema(tools[names.index(name)]))
        return Requested(grammar, shown, known, "arguments", name)
    grammar = calls_of([_schema(tool) for tool in tools], parallel_tool_calls is not False)
    return Requested(grammar, shown, known, "array")


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as templates are shown it: without fields of its function that are null."""
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {**tool, "function": function}


def _schema(tool: Tool) -> ToolSchema:
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


# Special tokens that one form's markup may have.
MAX_MARKUP_TOKENS = 64
# White space that may follow reasoning and calls.
SPACE = r"/[ \t\n]{1,4}/"


def in_form(requested: Requested, form: AnswerForm) -> Requested:
    """Return what a request asks for, with the grammar of answers as the prompt's template writes them.

    Reasoning may come before what the grammar constrains. Where calls may be made instead, they match their schemas.

    Raises:
        InvalidRequest: a grammar of the template's calls cannot be made.
    """
    grammar = requested.grammar
    if grammar is None:
        return requested
    markup = _markup_of(form)
    if requested.tools and requested.form == "free":
        grammar, tools = _or_calls(grammar, requested, form.calls or COMPACT_CALL, markup)
        requested = replace(requested, tools=tools)
    if form.reasoning is not None:
        opening, closing = form.reasoning
        begin = "" if form.is_reasoning else markup.lark(opening)
        lines = [
            f"start: thought{'' if form.is_reasoning else '?'} answer",
            f"thought: {begin} thought_text {SPACE}?",
            markup.text_up_to("thought_text", closing),
            _nested("answer", grammar),
        ]
        grammar = _checked("\n".join(lines), grammar.param)
    return replace(requested, grammar=grammar)


@dataclass(frozen=True, slots=True)
class _Markup:
    """Writes a form's markup in llguidance's form of Lark, where special tokens are named by id.

    Args:
        ids: of the special tokens that are parts of the markup, by text.
        pattern: finds them, in a group; None if there are none.
    """

    ids: Mapping[str, int]
    pattern: re.Pattern[str] | None

    def lark(self, text: str) -> str:
        """Return markup as a sequence of texts and special tokens."""
        if self.pattern is None:
            return _text(text)
        parts = self.pattern.split(text)
        return " ".join(
            f"<[{self.ids[part]}]>" if part in self.ids else _text(part) for part in parts if part
        )

    def text_up_to(self, rule: str, end: str) -> str:
        """Return a rule for any text up to the first occurrence of a marker, which is a part of it."""
        if end not in self.ids:
            return f"{rule}[suffix={_text(end)}]: /{ANY}/"
        # A special token's text can be written with other tokens, too, and parsers end at either.
        return f"{rule}: {rule.upper()} <[{self.ids[end]}]>\n{rule.upper()}: /{ANY}/ & {_without(end)}"

    def value_up_to(self, rule: str, value: FieldValue, end: str) -> list[str]:
        """Return rules for the text of a value and a marker, with the line breaks that parsers take off."""
        # One terminal, as llguidance does not go back where a marker begins like the text before it.
        whole, text = f"{rule.upper()}_WHOLE", f"{rule.upper()}_TEXT"
        # Parsers would read others as another text.
        listed = [_text(each) for each in value.choices or () if end not in each and each == each.strip("\n")]
        if not listed and not value.regexes:
            raise InvalidRequest("tools: an enum has no value without markup of this model's calls", "tools")
        lacking = [_without(end), r"~/\n(.|\n)*/", r"~/(.|\n)*\n/"]
        rules = []
        if value.regexes:
            rules.append(f"{text}: {' & '.join([f'/{_literal(each)}/' for each in value.regexes] + lacking)}")
            listed.append(text)
        last = f"<[{self.ids[end]}]>" if end in self.ids else ""
        own = f'"\\n"? ({" | ".join(listed)}) "\\n"?'
        return [*rules, f"{whole}: {own if last else f'{own} {_text(end)}'}", f"{rule}: {whole} {last}"]


def _markup_of(form: AnswerForm) -> _Markup:
    """Return the markup of a form, whose special tokens may be many more than those in its markup."""
    text = "\n".join((*(form.reasoning or ()), *(form.calls.texts() if form.calls else ())))
    found = ((token, id_) for id_, token in form.special.items() if 0 < len(token) <= MAX_MARKER_CHARS)
    ids = dict(islice(((token, id_) for token, id_ in found if token in text), MAX_MARKUP_TOKENS))
    longest_first = sorted(ids, key=len, reverse=True)
    return _Markup(ids, re.compile(f"({'|'.join(map(re.escape, longest_first))})") if ids else None)


def _without(text: str) -> str:
    """Return the terminal of texts that lack a text."""
    return f"~/{ANY}{_literal(re.escape(text))}{ANY}/"


def _or_calls(
    grammar: Grammar, requested: Requested, syntax: CallSyntax, markup: _Markup
) -> tuple[Grammar, bytes]:
    """Return the grammar of an answer that matches one, or that consists of calls; and the tools with all types."""
    if (syntax.tag and not syntax.middle) or syntax.kind == "channels":
        raise InvalidRequest(
            f"{grammar.param} with tools that may be called is not supported by this model's chat template: set "
            "tool_choice to none or required",
            grammar.param,
        )
    tools = decode(requested.tools)
    schemas = [_schema(tool) for tool in convert(tools, list[Tool])]
    names = [f"call_{number}" for number in range(len(schemas))]
    rules, reader = list[str](), FieldReader()
    for name, schema, tool in zip(names, schemas, tools, strict=True):
        begin = markup.lark(syntax.begin.lstrip() + schema.name + syntax.middle.rstrip("\n"))
        arguments, end = _json(schema.parameters), markup.lark(syntax.end.strip())
        if syntax.kind == "fields":
            values = _values(schema, reader, grammar.param)
            arguments, own_rules = _fields(name, schema, values, syntax, markup)
            rules += own_rules
            for key, value in values.items():
                if value.types:
                    tool["function"]["parameters"]["properties"][key]["type"] = value.types
        elif not syntax.tag:
            # In the tokens that llguidance makes of schemas: it does not go back where one is the beginning of another.
            parts = (
                "{",
                _quoted(syntax.name_key),
                ":",
                _quoted(schema.name),
                ",",
                _quoted(syntax.arguments_key),
                ":",
            )
            begin, end = " ".join(map(_text, parts)), _text("}")
        rules.append(f"{name}: {begin} {arguments} {end}")
    # Only a tag tells where the next one begins.
    more = f" ({SPACE}? call){{0,{MAX_CALLS - 1}}}" if syntax.tag and not requested.is_single else ""
    lines = [
        f"start: answer | call{more}",
        f"call: {' | '.join(names)}",
        *rules,
        _nested("answer", grammar),
    ]
    return _checked("\n".join(lines), grammar.param), encode(tools)


def _values(schema: ToolSchema, reader: FieldReader, param: str) -> dict[str, FieldValue]:
    """Return how arguments that are written one by one are, by key."""
    hint = f"change {schema.name}, or set tool_choice to none or required"
    properties, required = schema.parameters.get("properties", {}), schema.parameters.get("required", ())
    if (
        BESIDE_PROPERTIES & schema.parameters.keys()
        or not all(isinstance(each, dict) for each in properties.values())
        or not properties.keys() >= {*required}
    ):
        raise InvalidRequest(
            f"{param} with tools that may be called needs parameters that are plain properties: {hint}", param
        )
    values = {key: reader.value(own, schema.parameters) for key, own in properties.items()}
    for key, value in values.items():
        if value is None:
            raise InvalidRequest(
                f"{param} with tools that may be called: {key} of {schema.name} may be a string, which this model "
                f"writes without quotes, and cannot be held to its schema: {hint}",
                param,
            )
    return {key: value for key, value in values.items() if value is not None}


def _fields(
    name: str, schema: ToolSchema, values: Mapping[str, FieldValue], syntax: CallSyntax, markup: _Markup
) -> tuple[str, list[str]]:
    """Return the grammar of arguments that are written one by one, in the schema's order, and its rules."""
    field, key_end, value_end = syntax.field
    end = value_end.strip()
    shared = {key: schema.parameters[key] for key in ("$defs", "definitions") if key in schema.parameters}
    required = schema.parameters.get("required", ())
    terms, rules, size = list[str](), list[str](), 0
    for number, (key, value) in enumerate(values.items()):
        rule = f"{name}_{number}"
        text, num_before = f"{rule}_value", len(rules)
        if value.is_json:
            own = schema.parameters["properties"][key]
            rules.append(f"{text}: {SPACE}? {_json({**shared, **own})} {SPACE}? {markup.lark(end)}")
        elif value.choices or value.regexes:
            rules += markup.value_up_to(text, value, end)
        else:
            rules.append(markup.text_up_to(text, end))
        begin = markup.lark(field + key + key_end.rstrip("\n"))
        rules.append(f"{rule}: {begin} {text} {SPACE}?")
        terms.append(rule if key in required else f"{rule}?")
        # References repeat what they name.
        size += sum(map(len, rules[num_before:]))
        _check_size(size, "tools")
    return f"{SPACE}? {' '.join(terms)}", rules


def _quoted(text: str) -> str:
    return f'"{text}"'


def _nested(rule: str, grammar: Grammar) -> str:
    """Return a rule for texts of a grammar, whose rules keep their names."""
    return f"{rule}: %lark {{\n{grammar.text}}}\n"
