"""Parses free answers of variants that were told of tools. `parse_answers` runs in workers only.

A response template in a tenant's tokenizer config holds regular expressions, which bound neither time nor memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from deltastore.errors import PeraxisError
from server.grammar.tool_calls import ParsedAnswer, ToolCall
from server.text.decoding.incremental import INCOMPLETE
from server.text.failures import failures_as
from server.text.loaded_tokenizer import LoadedTokenizer
from server.text.variant_text import VariantText

CONTENT_FIELD, CALLS_FIELD = "content", "tool_calls"
# Names that response templates give the text before an answer.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class _Unparsed(PeraxisError):
    """The response template does not fit the answer."""


@dataclass(frozen=True, slots=True)
class FreeAnswer:
    """One answer, or its beginning.

    Args:
        token_ids: without end tokens.
        text: as a client sees it without tools.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    is_whole: bool = True


async def parsed(text: VariantText, answers: Sequence[FreeAnswer], tools: bytes) -> list[ParsedAnswer] | None:
    """Split answers into content and tool calls by the variant's response template; return None if it has none.

    Args:
        tools: a JSON array.

    Raises:
        InvalidRequest: the template needs too much time or memory.
    """
    parse = partial(parse_answers, answers=list(answers), tools=tools)
    return await text.run_in(None, parse, parse)


def parse_answers(
    tokenizer: LoadedTokenizer, answers: list[FreeAnswer], tools: bytes
) -> list[ParsedAnswer] | None:
    """Parse answers. A whole one that the variant's response template cannot parse is content.

    Of the beginning of an answer, what may still become another part of it is left out.
    """
    template = tokenizer.response_template
    if template is None:
        return None
    known: list[dict[str, Any]] = json.loads(tools)
    return [_parsed(tokenizer, dict(template), answer, known) for answer in answers]


def _parsed(
    tokenizer: LoadedTokenizer, template: dict[str, Any], answer: FreeAnswer, tools: list[dict[str, Any]]
) -> ParsedAnswer:
    try:
        with failures_as(_Unparsed):
            raw, prefix = (
                str(tokenizer.fast.decode(list(ids))) for ids in (answer.token_ids, answer.prompt_ids)
            )
            parser = ResponseParser(template, prefix, tools=list(tools))
            events = parser.feed(raw if answer.is_whole else raw.rstrip(INCOMPLETE))
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
