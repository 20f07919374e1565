"""Tool calls in an output: split out of its text as it comes, or parsed by a variant's response template.

A response template in a tenant's tokenizer config holds regular expressions, which bound neither time nor memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import DecodeError, Struct
from msgspec.json import decode
from transformers.utils.chat_parsing import ResponseParser

from deltastore.errors import ArtifactError, PeraxisError
from server.grammar.grammar import CALL_BEGIN, CALL_MIDDLE
from server.text.detokenizer import NewTokens, Window, decode_new
from server.text.failures import failures_as
from server.text.service import VariantText
from server.text.tokenizer import LoadedTokenizer


class ToolCall(Struct, frozen=True):
    """One call of a function; `arguments` is JSON as the model wrote it, incomplete if the output was cut off."""

    name: str
    arguments: str


class ParsedAnswer(Struct, frozen=True):
    """One answer of a model that was told of tools."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


class CallDelta(Struct, frozen=True):
    """An addition to the call with number `index`; its first one has the name."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class CallSplitter:
    """Splits the text of calls in their compact form, as it comes.

    Args:
        called: the only function, whose arguments are all of the text; None for a JSON array of calls.
    """

    called: str | None
    _index: int = 0
    _head: str = ""  # text before the arguments of the next call
    _in_arguments: bool = False
    _in_string: bool = False
    _is_escaped: bool = False
    _depth: int = 0

    def push(self, text: str) -> list[CallDelta]:
        """Add text. Return what it adds to calls, at most one delta per call and kind."""
        if self.called is not None:
            name = None if self._in_arguments else self.called
            self._in_arguments = True
            return [CallDelta(0, name, text)] if text or name else []
        deltas: list[CallDelta] = []
        while text:
            read = self._read_arguments if self._in_arguments else self._read_head
            text = read(text, deltas)
        return deltas

    def _read_head(self, text: str, deltas: list[CallDelta]) -> str:
        """Read up to the arguments of the next call; return the text behind."""
        self._head += text
        before, middle, behind = self._head.partition(CALL_MIDDLE)
        if not middle:
            return ""
        name = before.partition(CALL_BEGIN)[2].strip('"')
        deltas.append(CallDelta(self._index, name, ""))
        self._head, self._in_arguments, self._depth = "", True, 0
        return behind

    def _read_arguments(self, text: str, deltas: list[CallDelta]) -> str:
        """Read up to the end of the arguments; return the text behind."""
        for position, character in enumerate(text):
            if self._ends_with(character):
                self._add(text[:position], deltas)
                self._in_arguments, self._index = False, self._index + 1
                return text[position + 1 :]
        self._add(text, deltas)
        return ""

    def _add(self, arguments: str, deltas: list[CallDelta]) -> None:
        if arguments:
            deltas.append(CallDelta(self._index, None, arguments))

    def _ends_with(self, character: str) -> bool:
        """Return whether a character closes the call, and so is no part of its arguments."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return self._depth < 0


def joined(deltas: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """Return the calls that deltas add up to."""
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta.name is not None:
            names.append(delta.name)
            arguments.append([])
        arguments[delta.index].append(delta.arguments)
    return tuple(ToolCall(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True))


def may_be_calls(text: str) -> bool:
    """Return whether a text may be the beginning of what `parse_plain` takes for calls."""
    return text.lstrip()[:1] in ("", "{", "[")


def parse_plain(text: str, names: Collection[str]) -> ParsedAnswer:
    """Parse an answer of a variant that has no response template of its own.

    The whole text is taken for calls if it is a JSON object ``{"name": ..., "arguments": {...}}``, or an array of such,
    and all name a given tool; otherwise it is content. ``parameters`` is taken for ``arguments``, as Llama writes it.
    """
    try:
        document: Any = decode(text)
    except (DecodeError, UnicodeEncodeError, RecursionError):
        return ParsedAnswer(text)
    calls = [_plain_call(call, names) for call in (document if isinstance(document, list) else [document])]
    found = tuple(call for call in calls if call is not None)
    return ParsedAnswer("", found) if found and len(found) == len(calls) else ParsedAnswer(text)


def _plain_call(call: Any, names: Collection[str]) -> ToolCall | None:
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if isinstance(name, str) and name in names and isinstance(arguments, dict):
        return ToolCall(name, json.dumps(arguments))
    return None


CONTENT_FIELD, CALLS_FIELD = "content", "tool_calls"
# Names that response templates give the text before an answer.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class _Unparsed(PeraxisError):
    """The response template does not fit the answer."""


@dataclass(frozen=True, slots=True)
class DecodedAnswer:
    """The decoded text of an answer's beginning and of its prompt, both with special tokens."""

    prompt: str
    text: str = ""
    window: Window = field(default_factory=Window)


@dataclass(frozen=True, slots=True)
class FreeAnswer:
    """One answer, or its beginning.

    Args:
        prompt: token ids, until the answer is parsed for the first time.
        new_ids: tokens since the answer was last parsed, without end tokens.
        text: as a client sees it without tools.
    """

    prompt: Sequence[int] | DecodedAnswer
    new_ids: tuple[int, ...]
    text: str
    is_whole: bool = True


async def parsed(
    text: VariantText, answers: Sequence[FreeAnswer], tools: bytes
) -> list[tuple[ParsedAnswer, DecodedAnswer]] | None:
    """Split answers into content and tool calls by the variant's response template; return None if it has none.

    Each comes with what has been decoded of it, so that the next time only new tokens are.

    Args:
        tools: a JSON array.

    Raises:
        InvalidRequest: the template needs too much time or memory.
    """
    parse = partial(parse_answers, answers=list(answers), tools=tools)
    return await text.run_in(None, parse, parse)


def parse_answers(
    tokenizer: LoadedTokenizer, answers: list[FreeAnswer], tools: bytes
) -> list[tuple[ParsedAnswer, DecodedAnswer]] | None:
    """Parse answers. A whole one that the variant's response template cannot parse is content.

    Of the beginning of an answer, what may still become another part of it is left out.
    """
    template = tokenizer.response_template
    if template is None:
        return None
    known: list[dict[str, Any]] = json.loads(tools)
    decoded = [_decoded(tokenizer, answer) for answer in answers]
    return [
        (_parsed(dict(template), answer, one, known), one)
        for answer, one in zip(answers, decoded, strict=True)
    ]


def _decoded(tokenizer: LoadedTokenizer, answer: FreeAnswer) -> DecodedAnswer:
    """Decode what is new of an answer; text of an incomplete character waits for the rest of it."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.fast.decode(ids))

    with failures_as(lambda reason: ArtifactError(f"its tokenizer cannot decode tokens: {reason}")):
        before = answer.prompt
        if not isinstance(before, DecodedAnswer):
            before = DecodedAnswer(decode(list(before)), window=Window.behind(before))
        new = decode_new(decode, NewTokens(before.window, answer.new_ids, answer.is_whole))
    return DecodedAnswer(before.prompt, "".join([before.text, *new.texts, new.tail]), new.window)


def _parsed(
    template: dict[str, Any], answer: FreeAnswer, decoded: DecodedAnswer, tools: list[dict[str, Any]]
) -> ParsedAnswer:
    try:
        with failures_as(_Unparsed):
            parser = ResponseParser(template, decoded.prompt, tools=list(tools))
            events = parser.feed(decoded.text)
            if answer.is_whole:
                events += parser.finalize()[1]
            return _joined(events)
    except _Unparsed:
        return ParsedAnswer(answer.text if answer.is_whole else "")


def _joined(events: list[dict[str, Any]]) -> ParsedAnswer:
    """Return the parts of an answer that the parser's events tell of."""
    texts: dict[str, str] = {}
    calls: list[ToolCall] = []
    for event in events:
        if event["type"] == "region_chunk":
            texts[event["field"]] = texts.get(event["field"], "") + event["text"]
        elif event["type"] == "region_close" and event["field"] == CALLS_FIELD:
            values = event["value"] if isinstance(event["value"], list) else [event["value"]]
            calls += [_call(value["function"]) for value in values]
    reasoning = next((texts[name] for name in REASONING_FIELDS if name in texts), "")
    return ParsedAnswer(texts.get(CONTENT_FIELD, "").strip(), tuple(calls), reasoning.strip())


def _call(function: dict[str, Any]) -> ToolCall:
    arguments = function["arguments"]
    return ToolCall(str(function["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))
