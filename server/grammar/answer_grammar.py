"""Grammars of answers as a prompt's chat template has them written: reasoning, then what is asked for, or calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from msgspec.json import decode

from server.errors import InvalidRequest
from server.grammar.field_values import ANY, BESIDE_PROPERTIES, FieldReader, FieldValue
from server.grammar.grammar import (
    COMPACT_CALL,
    MAX_CALLS,
    Grammar,
    Requested,
    Tool,
    ToolSchema,
    arguments_schema,
    check_size,
    checked,
    lark_json,
    lark_regex,
    lark_text,
)
from server.text.answer_form import (
    ANALYSIS,
    CHANNEL,
    CONSTRAIN,
    END,
    MAX_MARKER_CHARS,
    MESSAGE,
    MESSAGE_ENDS,
    START,
    AnswerForm,
    CallSyntax,
)

# Special tokens that one form's markup may have.
MAX_MARKUP_TOKENS = 64
# White space that may follow reasoning and calls.
SPACE = r"/[ \t\n]{1,4}/"
# The id of a call as Mistral's templates take it, or its number, as Kimi's.
CALL_ID = "/[A-Za-z0-9]{1,9}/"


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
    if form.has_channels:
        # Inside a message nothing but its own text can come.
        return requested if form.is_content else _in_messages(requested, grammar, form, markup)
    if requested.tools and requested.form == "free":
        grammar = _or_calls(grammar, requested, form.calls or COMPACT_CALL, markup)
    if form.reasoning is not None:
        opening, closing = form.reasoning
        begin = "" if form.is_reasoning else markup.lark(opening)
        lines = [
            f"start: thought{'' if form.is_reasoning else '?'} answer",
            f"thought: {begin} thought_text {SPACE}?",
            markup.text_up_to("thought_text", closing),
            _nested("answer", grammar),
        ]
        grammar = checked("\n".join(lines), grammar.param)
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
            return lark_text(text)
        parts = self.pattern.split(text)
        return " ".join(
            f"<[{self.ids[part]}]>" if part in self.ids else lark_text(part) for part in parts if part
        )

    def text_up_to(self, rule: str, end: str, lacking: Sequence[str] = ()) -> str:
        """Return a rule for any text up to the first occurrence of a marker, which is a part of it.

        Args:
            lacking: other texts that are not in it.
        """
        if end not in self.ids and not lacking:
            return f"{rule}[suffix={lark_text(end)}]: /{ANY}/"
        # A special token's text can be written with other tokens, too, and parsers end at either.
        text = f"{rule.upper()}: {' & '.join([f'/{ANY}/', *map(_without, dict.fromkeys((end, *lacking)))])}"
        if end in self.ids:
            return f"{rule}: {rule.upper()} <[{self.ids[end]}]>\n{text}"
        whole = f"{rule.upper()}_WHOLE"
        return f"{rule}: {whole}\n{whole}: {rule.upper()} {lark_text(end)}\n{text}"

    def value_up_to(self, rule: str, value: FieldValue, end: str) -> list[str]:
        """Return rules for the text of a value and a marker, with the line breaks that parsers take off."""
        # One terminal, as llguidance does not go back where a marker begins like the text before it.
        whole, text = f"{rule.upper()}_WHOLE", f"{rule.upper()}_TEXT"
        # Parsers would read others as another text.
        listed = [
            lark_text(each) for each in value.choices or () if end not in each and each == each.strip("\n")
        ]
        if not listed and not value.regexes:
            raise InvalidRequest("tools: an enum has no value without markup of this model's calls", "tools")
        lacking = [_without(end), r"~/\n(.|\n)*/", r"~/(.|\n)*\n/"]
        rules = []
        if value.regexes:
            rules.append(
                f"{text}: {' & '.join([f'/{lark_regex(each)}/' for each in value.regexes] + lacking)}"
            )
            listed.append(text)
        last = f"<[{self.ids[end]}]>" if end in self.ids else ""
        own = f'"\\n"? ({" | ".join(listed)}) "\\n"?'
        return [*rules, f"{whole}: {own if last else f'{own} {lark_text(end)}'}", f"{rule}: {whole} {last}"]


def _markup_of(form: AnswerForm) -> _Markup:
    """Return the markup of a form, whose special tokens may be many more than those in its markup."""
    text = "\n".join((*(form.reasoning or ()), *(form.calls.texts() if form.calls else ())))
    found = ((token, id_) for id_, token in form.special.items() if 0 < len(token) <= MAX_MARKER_CHARS)
    ids = dict(islice(((token, id_) for token, id_ in found if token in text), MAX_MARKUP_TOKENS))
    longest_first = sorted(ids, key=len, reverse=True)
    return _Markup(ids, re.compile(f"({'|'.join(map(re.escape, longest_first))})") if ids else None)


def _without(text: str) -> str:
    """Return the terminal of texts that lack a text."""
    return f"~/{ANY}{lark_regex(re.escape(text))}{ANY}/"


def _in_messages(requested: Requested, grammar: Grammar, form: AnswerForm, markup: _Markup) -> Requested:
    """Return what a request asks for, with the grammar of harmony's messages: thoughts, then the answer or a call."""
    schemas = _schemas(requested) if requested.tools else []
    names = [f"call_{number}" for number in range(len(schemas))]
    channel, message = markup.lark(CHANNEL), markup.lark(MESSAGE)
    endings = names if requested.form != "free" else ["final", *names]
    lines = [
        f"start: {'thought_text next' if form.is_reasoning else ''} thought* ({' | '.join(endings)})",
        f"thought: {channel} {lark_text(ANALYSIS)} {message} thought_text next",
        # A parser ends messages at each of these.
        markup.text_up_to("thought_text", END, MESSAGE_ENDS),
        f"next: {markup.lark(START)} {lark_text('assistant')}",
    ]
    if requested.form == "free":
        lines += [f"final: {channel} {lark_text('final')} {message} answer", _nested("answer", grammar)]
    if names:
        lines.append(f'kind: " json" | " "? {markup.lark(CONSTRAIN)} "json"')
    for name, schema in zip(names, schemas, strict=True):
        recipient = f"to=functions.{schema.name}"
        # As models write it, and as the template does.
        headers = (
            f"{channel} {lark_text(f'commentary {recipient}')}",
            f"{lark_text(f' {recipient}')} {channel} {lark_text('commentary')}",
        )
        lines.append(f"{name}: ({' | '.join(headers)}) kind? {message} {lark_json(schema.parameters)}")
    grammar = checked("\n".join(lines) + "\n", grammar.param)
    return replace(requested, grammar=grammar, form="free" if requested.form == "free" else "message")


def _or_calls(grammar: Grammar, requested: Requested, syntax: CallSyntax, markup: _Markup) -> Grammar:
    """Return the grammar of an answer that matches one, or that consists of calls."""
    if syntax.kind == "json" and syntax.tag and not syntax.middle:
        raise InvalidRequest(
            f"{grammar.param} with tools that may be called is not supported by this model's chat template: set "
            "tool_choice to none or required",
            grammar.param,
        )
    schemas = _schemas(requested)
    names = [f"call_{number}" for number in range(len(schemas))]
    rules, reader = list[str](), FieldReader()
    for name, schema in zip(names, schemas, strict=True):
        head = schema.name + syntax.middle.rstrip("\n")
        begin, further = markup.lark(syntax.begin.lstrip() + head), markup.lark(syntax.again.lstrip() + head)
        arguments, end = lark_json(schema.parameters), markup.lark(syntax.end.strip())
        if syntax.id_end:
            arguments = f"{CALL_ID} {markup.lark(syntax.id_end)} {arguments}"
        if syntax.kind == "fields":
            values = _values(schema, reader, grammar.param)
            arguments, own_rules = _fields(name, schema, values, syntax, markup)
            rules += own_rules
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
            begin, end = " ".join(map(lark_text, parts)), lark_text("}")
        rules += [f"{name}: {begin} {name}_rest", f"{name}_rest: {arguments} {end}"]
        if syntax.again:
            rules.append(f"{name}_again: {further} {name}_rest")
    further_calls = [f"{name}_again" for name in names] if syntax.again else ["call"]
    # Only a tag tells where the next one begins.
    more = f"({SPACE}? further){{0,{MAX_CALLS - 1}}}" if syntax.tag and not requested.is_single else ""
    section_end = f"{SPACE}? {markup.lark(syntax.section_end.strip())}" if syntax.section_end.strip() else ""
    lines = [
        f"start: answer | call {more} {section_end}",
        f"call: {' | '.join(names)}",
        f"further: {' | '.join(further_calls)}",
        *rules,
        _nested("answer", grammar),
    ]
    return checked("\n".join(lines), grammar.param)


def _schemas(requested: Requested) -> list[ToolSchema]:
    """Return the arguments' schemas of the tools that may be called."""
    tools = decode(requested.tools, type=list[Tool])
    return [arguments_schema(tool) for tool in tools if requested.called in (None, tool.function.name)]


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
            rules.append(f"{text}: {SPACE}? {lark_json({**shared, **own})} {SPACE}? {markup.lark(end)}")
        elif value.choices or value.regexes:
            rules += markup.value_up_to(text, value, end)
        else:
            rules.append(markup.text_up_to(text, end))
        begin = markup.lark(field + key + key_end.rstrip("\n"))
        rules.append(f"{rule}: {begin} {text} {SPACE}?")
        terms.append(rule if key in required else f"{rule}?")
        # References repeat what they name.
        size += sum(map(len, rules[num_before:]))
        check_size(size, "tools")
    return f"{SPACE}? {' '.join(terms)}", rules


def _quoted(text: str) -> str:
    return f'"{text}"'


def _nested(rule: str, grammar: Grammar) -> str:
    """Return a rule for texts of a grammar, whose rules keep their names."""
    return f"{rule}: %lark {{\n{grammar.text}}}\n"
