"""How answers are written: where a chat template puts reasoning and tool calls, found by rendering a few conversations.

Rendering runs in worker processes only; the forms are values that the HTTP process parses answers by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace
from transformers.utils.chat_parsing.response_templates import load_response_template

from server.errors import InvalidRequest
from server.text.chat_template import REASONING_FIELDS, Conversation, Message, render
from server.text.failures import failures_as

# The probe's call, and words of markup; longer ones are none.
MAX_CALL_CHARS, MAX_MARKER_CHARS = 2048, 128
# Special tokens that a variant's response template may name, and characters of the prompt that it reads.
MAX_SPECIAL_TOKENS, MAX_PREFIX_CHARS = 1024, 1 << 16
# Special tokens that are parts of the markup.
MAX_MARKERS = 64
# Parts of probes. A template may change the case of a text.
TEXT, THOUGHT, NAME = "730194826517", "291847365018", "n548213906"
KEYS, VALUES = ("k917364025", "k382915760"), ("640275193", "158306947")
CALL_ID = "call12345"  # as Mistral's templates take them
USER: Message = {"role": "user", "content": "1"}
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
PYTHON_TAG = "<|python_tag|>"
# Harmony's.
CHANNEL, START, MESSAGE, END, CONSTRAIN = (
    "<|channel|>",
    "<|start|>",
    "<|message|>",
    "<|end|>",
    "<|constrain|>",
)
MESSAGE_ENDS = (START, END, "<|call|>", "<|return|>")
CHANNEL_MARKERS = (CHANNEL, MESSAGE, CONSTRAIN, *MESSAGE_ENDS)
ANALYSIS = "analysis"
CALL_ID_FIELD = re.compile(rf',\s*"\w+":\s*"{CALL_ID}"|"\w+":\s*"{CALL_ID}",\s*')
# The rest of an id that has the function's name, as Kimi's.
NUMBERED = re.compile(r"(:)0(\S.*)", re.DOTALL)
SECTION_OPENING, SECTION_CLOSING = re.compile(r"[<\[].*\Z", re.DOTALL), re.compile(r".*[>\]]", re.DOTALL)
OPENING, CLOSING = re.compile(r"[<\[][^\s<\[]*\s*\Z"), re.compile(r"\s*([<\[][^\s>\]]*[>\]])")


class CallSyntax(Struct, frozen=True):
    """How a template writes one call of a tool.

    Args:
        kind: ``json``, an object with the name and the arguments; ``named``, the name and then the arguments as JSON;
            ``fields``, the name and then each argument with its key; ``channels``, harmony's messages to a recipient.
        tag: text before the call, which begins it wherever it stands; empty if only its place does.
        begin: text before the name, with the tag.
        middle: text between the name and the arguments, or the first key; empty if the name comes last.
        end: text behind the arguments.
        field: with ``fields``, texts before a key, between key and value, and behind a value.
        name_key, arguments_key: with ``json``, of the object.
        more_tags: other markers that the JSON of calls may follow.
        id_end: with ``named``, text between the call's id, which stands behind `middle`, and the arguments; empty if
            there is no id.
        again: with ``named`` and ``fields``, text before the name of a further call where one section has several;
            empty where each has the tag.
        section_end: text behind such a section.
    """

    kind: Literal["json", "named", "fields", "channels"]
    tag: str = ""
    begin: str = ""
    middle: str = ""
    end: str = ""
    field: tuple[str, str, str] = ("", "", "")
    name_key: str = "name"
    arguments_key: str = "arguments"
    more_tags: tuple[str, ...] = ()
    id_end: str = ""
    again: str = ""
    section_end: str = ""

    @property
    def closing(self) -> str:
        """The text behind a call, without the end of its JSON."""
        return self.end.lstrip("}] \n")

    def texts(self) -> tuple[str, ...]:
        """Return all text that special tokens may be parts of."""
        own = (self.begin, self.middle, self.id_end, self.end, self.again, self.section_end)
        return *own, *self.field, *self.more_tags


class AnswerForm(Struct, frozen=True):
    """How an answer to one prompt is written.

    Args:
        reasoning: texts before and behind the reasoning; None if the template knows of none.
        is_reasoning: the prompt ends inside the reasoning.
        calls: None if the template does not show calls.
        special: special tokens that are parts of the markup, by id; the text of an answer lacks them.
        response_prefix: the prompt's part of the answer, for the tokenizer's response template; None without one.
        is_content: the prompt ends inside the content of one of harmony's messages.
    """

    reasoning: tuple[str, str] | None = None
    is_reasoning: bool = False
    calls: CallSyntax | None = None
    special: dict[int, str] = {}
    response_prefix: str | None = None
    is_content: bool = False

    @property
    def has_parts(self) -> bool:
        """An answer without tools may have parts beside its content."""
        return self.reasoning is not None or self.response_prefix is not None or self.has_channels

    @property
    def has_channels(self) -> bool:
        """Answers are harmony's messages."""
        return self.calls is not None and self.calls.kind == "channels"

    def with_special(self, tokens: Mapping[int, str]) -> AnswerForm:
        """Return the form with those of a tokenizer's special tokens that belong to its markup."""
        short = ((token_id, text) for token_id, text in tokens.items() if 0 < len(text) <= MAX_MARKER_CHARS)
        if self.response_prefix is not None:
            return replace(self, special=dict(islice(short, MAX_SPECIAL_TOKENS)))
        markup = "\n".join((*(self.reasoning or ()), *(self.calls.texts() if self.calls else ())))
        own = ((token_id, text) for token_id, text in short if text in markup)
        return replace(self, special=dict(islice(own, MAX_MARKERS)))


class RenderedPrompt(Struct, frozen=True):
    """The text of a conversation, and the form of the answer to it."""

    text: str
    form: AnswerForm


class RenderedChat(Struct, frozen=True):
    """The token ids of a conversation, and the form of the answer to it."""

    ids: list[int]
    form: AnswerForm


def render_prompt(
    template: str,
    conversation: Conversation,
    variables: Mapping[str, Any],
    response_template: Mapping[str, Any] | None = None,
) -> RenderedPrompt:
    """Render a conversation; raises as `render`."""
    text = render(template, conversation, variables)
    form = _form_of(template, tuple(sorted(variables.items())))
    if form.has_channels:
        is_open, is_thought = _open_message(text)
        form = replace(form, is_reasoning=is_open and is_thought, is_content=is_open and not is_thought)
    else:
        form = replace(form, is_reasoning=_ends_in_reasoning(form, conversation, text))
    if response_template is not None:
        form = replace(form, response_prefix=_response_prefix(response_template, text))
    return RenderedPrompt(text, form)


def _ends_in_reasoning(form: AnswerForm, conversation: Conversation, prompt: str) -> bool:
    if form.reasoning is None:
        return False
    opening, closing = form.reasoning
    continued = conversation.continue_final_message
    if isinstance(continued, str):
        return continued in REASONING_FIELDS
    if continued:
        content = conversation.messages[-1].get("content")
        return isinstance(content, str) and content.rfind(opening) > content.rfind(closing)
    return prompt.rstrip().endswith(opening)


def _open_message(prompt: str) -> tuple[bool, bool]:
    """Return whether a prompt ends inside one of harmony's messages, and whether its last message is a thought."""
    header, message, body = prompt.rpartition(START)[2].partition(MESSAGE)
    return bool(message) and not any(end in body for end in MESSAGE_ENDS), is_analysis(header)


def is_analysis(header: str) -> bool:
    """Return whether the header of one of harmony's messages is that of a thought."""
    return header.partition(CHANNEL)[2].split()[:1] == [ANALYSIS]


def _response_prefix(response_template: Mapping[str, Any], prompt: str) -> str:
    """Return the prompt behind the last place where the response template says that an answer begins."""
    try:
        with failures_as(InvalidRequest):
            behind = load_response_template(dict(response_template)).truncate_past_last_anchor(prompt)
    except InvalidRequest:
        return ""
    # All of it is what transformers returns if there is no such place.
    return "" if behind == prompt else behind[-MAX_PREFIX_CHARS:]


@lru_cache(maxsize=64)
def _form_of(template: str, variables: tuple[tuple[str, Any], ...]) -> AnswerForm:
    """Return how a template writes answers."""
    given = dict(variables)

    def turn(**fields: Any) -> str | None:
        """Return the text that an assistant's message adds."""
        return _rendered(template, [USER, {"role": "assistant", **fields}], given)

    plain = turn(content=TEXT)
    before = _rendered(template, [USER], given)
    if plain is None or before is None or TEXT not in plain:
        return AnswerForm(_reasoning_of(None, template))
    begin = len(before) if plain.startswith(before) else 0
    head, _, tail = plain[begin:].rpartition(TEXT)
    thinking = turn(content=TEXT, reasoning_content=THOUGHT)
    reasoning = _reasoning_of(thinking, template)
    for content in (TEXT, ""):
        calling = turn(content=content, tool_calls=[_probe_call()])
        if calling is not None and NAME in calling:
            break
    else:
        return AnswerForm(reasoning)

    def behind_content(text: str) -> str:
        own = text[begin:]
        own = own.rpartition(TEXT)[2] if TEXT in own else own.removeprefix(head).removeprefix(head.rstrip())
        return own.removesuffix(tail)

    calls = _syntax_of(behind_content(calling), template)
    if calls is not None and calls.kind in ("named", "fields"):
        both = turn(content=content, tool_calls=[_probe_call(), _probe_call()])
        calls = _in_section(calls, behind_content(both or ""))
    if calls is not None and any(
        len(word) > MAX_MARKER_CHARS for text in calls.texts() for word in text.split()
    ):
        calls = None
    return AnswerForm(None if calls and calls.kind == "channels" else reasoning, calls=calls)


def _rendered(template: str, messages: list[Message], variables: Mapping[str, Any]) -> str | None:
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in KEYS}}
    function = {"name": NAME, "description": "1", "parameters": parameters}
    tools = json.dumps([{"type": "function", "function": function}]).encode()
    conversation = Conversation(messages, add_generation_prompt=False, tools=tools)
    try:
        return render(template, conversation, variables)
    except InvalidRequest:
        return None


def _probe_call() -> Message:
    function = {"name": NAME, "arguments": dict(zip(KEYS, VALUES, strict=True))}
    return {"id": CALL_ID, "type": "function", "function": function}


def _reasoning_of(thinking: str | None, template: str) -> tuple[str, str] | None:
    """Return the markers around the reasoning: as it is rendered, or else those that the template names."""
    if thinking is not None and THOUGHT in thinking:
        before, _, behind = thinking.partition(THOUGHT)
        opening, closing = (
            OPENING.search(before[-MAX_MARKER_CHARS:]),
            CLOSING.match(behind[:MAX_MARKER_CHARS]),
        )
        if opening is not None and closing is not None:
            return opening[0].strip(), closing[1]
    return next((pair for pair in THINKING if pair[1] in template), None)


def _syntax_of(own: str, template: str) -> CallSyntax | None:
    """Return the syntax of the probe's call; None if it is written in another way.

    Args:
        own: the call as the template writes it.
    """
    if len(own) > MAX_CALL_CHARS:
        return None
    if f"functions.{NAME}" in own and CHANNEL in own:
        return CallSyntax("channels", more_tags=CHANNEL_MARKERS)
    begin, _, behind = own.partition(NAME)
    object_at = own.find("{")
    if 0 <= object_at < len(begin):
        return _json_syntax(own, object_at, PYTHON_TAG in template)
    parts = (KEYS[0], VALUES[0], KEYS[1], VALUES[1])
    at = [behind.find(part) for part in parts]
    if min(at) < 0 or at != sorted(at) or not begin.strip():
        return None
    brace = behind.find("{")
    if 0 <= brace < at[0]:
        found = _decoded(behind, brace)
        if found is None:
            return None
        middle, _, id_end = behind[:brace].partition(CALL_ID)
        if numbered := NUMBERED.fullmatch(middle):
            middle, id_end = numbered.groups()
        return CallSyntax("named", begin.strip(), begin, middle, behind[found[1] :], id_end=id_end)
    gaps = [
        behind[len(part) + start : end] for part, start, end in zip(parts, at, (*at[1:], None), strict=True)
    ]
    before, behind_key, between, last = behind[: at[0]], gaps[0], gaps[1], gaps[3]
    key = before[max(before.rfind("<"), before.rfind("["), 0) :]
    value_end = between.removesuffix(key).rstrip()
    if not key.strip() or not between.endswith(key) or not value_end or not last.startswith(value_end):
        return None
    middle, end = before.removesuffix(key), last.removeprefix(value_end)
    if not behind_key.strip() or not end.strip():
        return None
    syntax = CallSyntax("fields", begin.strip(), begin, middle, end, (key, behind_key, value_end))
    return syntax if syntax.closing else None


def _in_section(syntax: CallSyntax, both: str) -> CallSyntax:
    """Return the syntax with the texts between two calls, if they stand in one section.

    Args:
        both: two of the probe's calls as the template writes them.
    """
    first, name, _ = both.partition(NAME)[2].partition(NAME)
    between = first.rpartition(VALUES[1])[2]
    # The end of the arguments in JSON belongs to none of the texts.
    between = (
        between[between.find("}") + 1 :] if syntax.kind == "named" else between.removeprefix(syntax.field[2])
    )
    if not name or between.strip().endswith(syntax.begin.strip()):
        return syntax
    shared = _shared(syntax.begin[::-1], between[::-1])[::-1]
    opening = SECTION_OPENING.search(shared)
    closing = SECTION_CLOSING.match(_shared(syntax.end, between))
    if opening is None or closing is None:
        return syntax
    section_end = both.rpartition(closing[0])[2]
    return replace(syntax, end=closing[0], again=opening[0], section_end=section_end)


def _shared(text: str, other: str) -> str:
    """Return the beginning that two texts share."""
    pairs = enumerate(zip(text, other, strict=False))
    size = next((size for size, (one, two) in pairs if one != two), min(len(text), len(other)))
    return text[:size]


def _json_syntax(own: str, start: int, has_python_tag: bool) -> CallSyntax | None:
    """Return the syntax of a call that is an object, or one in another, which begins at `start`."""
    tag = own[:start].rstrip().removesuffix("[").strip()
    found = _decoded(own, start)
    while found is not None and NAME not in found[0].values():
        start = own.find("{", start + 1)
        found = _decoded(own, start) if start >= 0 else None
    if found is None:
        return None
    call = found[0]
    name_key = next(key for key, value in call.items() if value == NAME)
    arguments_key = next((key for key, value in call.items() if KEYS[0] in str(value)), None)
    if arguments_key is None:
        return None
    begin, _, behind = own.partition(NAME)
    brace = behind.find("{")
    arguments = _decoded(behind, brace) if brace >= 0 else None
    middle, end = "", own[found[1] :]
    if arguments is not None and KEYS[0] in arguments[0]:
        middle, end = behind[:brace], CALL_ID_FIELD.sub("", behind[arguments[1] :])
    tags = (PYTHON_TAG,) if has_python_tag and not tag else ()
    return CallSyntax(
        *("json", tag, CALL_ID_FIELD.sub("", begin), middle, end),
        name_key=name_key,
        arguments_key=arguments_key,
        more_tags=tags,
    )


def _decoded(text: str, start: int) -> tuple[dict[str, Any], int] | None:
    """Return the JSON object that begins at a place, and where it ends."""
    try:
        document, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return (document, end) if isinstance(document, dict) else None
