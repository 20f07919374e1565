"""Splits answers by a response template of transformers, which a variant's tokenizer config may have.

It holds regular expressions, which bound neither time nor memory, so it is applied in a worker.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from transformers.utils.chat_parsing import ResponseParser

from deltastore.errors import PeraxisError
from server.grammar.answer_parser import CallDelta, Parts, ToolCall, object_text
from server.text.chat_template import REASONING_FIELDS
from server.text.failures import failures_as
from server.text.service import VariantText
from server.text.tokenizer import LoadedTokenizer

CONTENT_FIELD, CALLS_FIELD = "content", "tool_calls"


class _Unparsed(PeraxisError):
    """The response template, or a region of an answer, cannot be read."""


class TemplateAnswer(Struct, frozen=True):
    """An answer, or its beginning, for a response template.

    Args:
        prefix: the prompt's part of the answer.
        text: of the answer, with special tokens.
        visible: the text without special tokens.
        is_single: what follows the first call is left out.
        is_cut: the answer ended by its length or a stop string, so that a call without its closing is content.
    """

    prefix: str
    text: str
    visible: str
    is_whole: bool
    is_single: bool
    is_cut: bool = False


class ParsedAnswer(Struct, frozen=True):
    """The parts of an answer as far as it goes."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def over(self, shown: ParsedAnswer) -> ParsedAnswer:
        """Return `shown` with each part of this answer that continues one; what was shown stays."""
        return ParsedAnswer(
            self.content if self.content.startswith(shown.content) else shown.content,
            self.reasoning if self.reasoning.startswith(shown.reasoning) else shown.reasoning,
            shown.calls + self.calls[len(shown.calls) :],
        )

    def behind(self, shown: ParsedAnswer) -> Parts:
        """Return the parts that are not in `shown`, an answer of which this one is a continuation."""
        new = enumerate(self.calls[len(shown.calls) :], len(shown.calls))
        calls = tuple(CallDelta(index, call.name, call.arguments) for index, call in new)
        content = self.content.removeprefix(shown.content)
        return Parts(content, self.reasoning.removeprefix(shown.reasoning), calls)


async def parsed_by_template(
    text: VariantText, answers: Sequence[TemplateAnswer], tools: bytes
) -> list[ParsedAnswer]:
    """Split answers into their parts by the response template of the variant's tokenizer.

    Args:
        tools: a JSON array.

    Raises:
        InvalidRequest: the template needs too much time or memory.
    """
    parse = partial(parse_answers, answers=list(answers), tools=tools)
    return await text.run_in(None, parse, parse)


def parse_answers(
    tokenizer: LoadedTokenizer, answers: list[TemplateAnswer], tools: bytes
) -> list[ParsedAnswer]:
    """Parse answers in a worker. One of a template that cannot be used is content when it is whole.

    Of the beginning of an answer, what may still become another part of it is left out.
    """
    template = dict(tokenizer.response_template or {})
    known = json.loads(tools) if tools else []
    return [_parsed(template, answer, known) for answer in answers]


def _parsed(template: dict[str, Any], answer: TemplateAnswer, tools: list[dict[str, Any]]) -> ParsedAnswer:
    try:
        with failures_as(_Unparsed):
            parser = _TemplateParser(template, answer.prefix, tools=list(tools))
            events = parser.read(answer)
    except _Unparsed:
        return ParsedAnswer(answer.visible if answer.is_whole else "")
    regions: dict[str, list[str]] = {}
    calls: list[ToolCall] = []
    is_behind_unread = False
    for event in events:
        kind = event["type"]
        if kind == "calls":
            calls += event["calls"]
            if answer.is_single and calls:
                calls = calls[:1]
                break
        elif kind == "region_open" and not is_behind_unread:
            regions.setdefault(event["field"], []).append("")
        elif kind in ("region_chunk", "unread"):
            regions.setdefault(event["field"], [""])[-1] += event["text"]
        # Content goes on behind a region that cannot be read.
        is_behind_unread = kind == "unread"
    # The field that came first, so that a later one does not replace what a stream has shown.
    reasoning = next((name for name in regions if name in REASONING_FIELDS), REASONING_FIELDS[0])
    content, thought = (parser.joined(name, regions.get(name, [])) for name in (CONTENT_FIELD, reasoning))
    return ParsedAnswer(content, thought, tuple(calls))


class _TemplateParser(ResponseParser):
    """transformers' parser, for which regions that cannot be read are content.

    The text of thoughts and content is shown before it is read, so that theirs stays where it is.
    """

    _begin = 0  # of the region that is open, its opening included
    _inside = 0  # where the text of that region begins
    _num_prefix = 0  # characters of the prompt, which are in no part
    _is_cut = False

    def read(self, answer: TemplateAnswer) -> list[dict[str, Any]]:
        """Return the events of an answer; ``calls`` and ``unread`` are the types of those that transformers has not."""
        events: list[dict[str, Any]] = []
        self._is_cut, self._num_prefix = answer.is_cut, len(self._buffer)
        self._buffer += answer.text
        self._process(events, eos=False)
        if answer.is_whole:
            self._process(events, eos=True)
        return events

    def joined(self, name: str, regions: list[str]) -> str:
        """Return the text of a field's regions."""
        field = self._spec.fields.get(name)
        if field is None or field.join is None:
            return "".join(regions).strip()
        return field.join.join(region.strip() for region in regions).strip()

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        if not self._opened:
            self._begin = self._inside = self._pos
        num_events = len(events)
        super()._accumulate(events, text)
        if len(events) > num_events:
            # The end of the prompt was held back if markup may begin with it.
            events[-1]["text"] = text[max(self._num_prefix - self._pos, 0) :]

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, match: Any) -> None:
        super()._open_explicit(events, field, match)
        self._begin, self._inside = match.span()

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        name, num_events = self._current, len(events)
        # The opening of another region may have ended an implicit one.
        end = self._inside + len(self._body) if name == self._implicit_name else self._pos
        is_call = name == CALLS_FIELD and self._opened
        try:
            with failures_as(_Unparsed):
                # A closing that matches no text, as ``$`` does, is none of an answer that was cut.
                if is_call and self._is_cut and self._inside + len(self._body) == len(self._buffer):
                    raise _Unparsed("the call is cut off")
                super()._close_current(events)
                if is_call:
                    value = events[-1]["value"]
                    values = value if isinstance(value, list) else [value]
                    events[-1] = {"type": "calls", "calls": [_call(each["function"]) for each in values]}
        except _Unparsed:
            if name not in (CONTENT_FIELD, *REASONING_FIELDS):
                raw = self._buffer[max(self._begin, self._num_prefix) : end]
                events[num_events:] = [{"type": "unread", "field": CONTENT_FIELD, "text": raw}]
            self._reset_to_implicit()


def _call(function: dict[str, Any]) -> ToolCall:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(str(function["name"]), object_text(text))
