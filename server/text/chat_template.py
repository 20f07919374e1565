"""Chat templates: brings a conversation, as its client wrote it, into the form that a template reads, and renders it.

The sandbox of a template keeps it from reading the host; it bounds neither its time nor its memory. So templates run in
worker processes only. Facts of a template are found once per process, by rendering short conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jinja2 import meta, nodes
from msgspec import DecodeError
from msgspec.json import decode
from transformers.utils import chat_template_utils

from deltastore.errors import shown
from server.errors import InvalidRequest
from server.text.failures import failures_as

Message = dict[str, Any]
Scalar = str | int | float | bool | None
# Names of transformers' templates: of the one that is taken, and of the one that is taken where there are tools.
DEFAULT, TOOL_USE = "default", "tool_use"
# Roles of OpenAI's messages.
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
# Names of a message's reasoning; the first that has a value is taken.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
MAX_CHARACTERS = 8 << 20
# Names of templates that one error tells.
MAX_TOLD = 8


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a chat template.

    Args:
        messages: as the client wrote them; each has a role that is a string.
        add_generation_prompt: the template opens the assistant's turn behind them.
        add_special_tokens: the tokenizer adds its own, too; most templates write them.
        tools: functions that the template tells the model of, as a JSON array in OpenAI's form; empty for none.
        template: the name of the template; None takes the one that transformers takes.
        variables: further variables of the template.
        reasoning_effort: a variable that is refused where the template does not read it, but for ``none``.
        continue_final_message: the last message stays open: its content, or the field of this name.
    """

    messages: list[Message]
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    tools: bytes = b""
    template: str | None = None
    variables: Mapping[str, Scalar] = field(default_factory=dict)
    reasoning_effort: str | None = None
    continue_final_message: bool | str = False


def choose(templates: Mapping[str, str], conversation: Conversation, none: str) -> str:
    """Return the template that transformers' `get_chat_template` takes.

    Args:
        templates: by name; a single one has the name ``default``.
        none: the error's message if there are none.

    Raises:
        InvalidRequest: there is none of this name.
    """
    if not templates:
        raise InvalidRequest(none, "messages")
    name = conversation.template
    if name is None:
        name = TOOL_USE if conversation.tools and TOOL_USE in templates else DEFAULT
    if name not in templates:
        known = ", ".join(map(shown, sorted(templates)[:MAX_TOLD]))
        raise InvalidRequest(
            f"chat_template: there is no template with the name {shown(name)}, and the source of one is not taken: "
            f"name one of {known}",
            "chat_template",
        )
    return templates[name]


def render(template: str, conversation: Conversation, variables: Mapping[str, Any]) -> str:
    """Render a conversation with `template`.

    Args:
        variables: further variables of the template, such as special tokens.

    Raises:
        InvalidRequest: the template refuses the messages, fails, or makes no Unicode or too much text; or a message has
            a role or arguments of a call that the template cannot render.
    """
    facts = _facts_of(template, tuple(sorted(variables.items())))
    given = {**variables, **conversation.variables, **_effort(facts, conversation.reasoning_effort)}
    messages = [_as_read(facts, index, message) for index, message in enumerate(conversation.messages)]
    if facts.names_by_id:
        messages = _with_names_in_ids(messages)

    def rendered() -> str:
        try:
            return _rendered(template, messages, conversation, given)
        except InvalidRequest as error:
            refused = error
        # Some templates read the content of every message, which one with calls lacks, join arguments to text, or take
        # one text beside calls.
        filled = [{"content": "", **message} for message in messages]
        others = (
            filled,
            *(list(map(_with_text_arguments, some)) for some in (messages, filled)),
            list(map(_with_one_text, messages)),
        )
        for number, other in enumerate(others):
            if other != messages and other not in others[:number]:
                with suppress(InvalidRequest):
                    return _rendered(template, other, conversation, given)
        raise refused

    _write_texts(messages, "arguments" in facts.words, rendered)
    return rendered()


def _with_text_arguments(message: Message) -> Message:
    """Return a message whose calls have their arguments as JSON text."""
    if "tool_calls" not in message:
        return message

    def as_text(call: Message) -> Message:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return {**message, "tool_calls": list(map(as_text, message["tool_calls"]))}


def _with_one_text(message: Message) -> Message:
    """Return a message whose content stands behind its reasoning, if it has both beside calls."""
    content, reasoning = message.get("content"), message.get("reasoning_content")
    if "tool_calls" not in message or not (isinstance(content, str) and isinstance(reasoning, str)):
        return message
    others = {name: value for name, value in message.items() if name != "content"}
    return {**others, **dict.fromkeys(REASONING_FIELDS, f"{reasoning}\n\n{content}".rstrip())}


def _rendered(
    template: str, messages: Sequence[Message], conversation: Conversation, variables: Mapping[str, Any]
) -> str:
    with failures_as(
        lambda reason: InvalidRequest(f"the chat template refuses these messages: {reason}", "messages")
    ):
        # Its annotation says that it returns a string.
        render_all: Any = chat_template_utils.render_jinja_template
        texts, _ = render_all(
            [messages],
            tools=json.loads(conversation.tools) if conversation.tools else None,
            chat_template=template,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **variables,
        )
    text = str(texts[0])
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"the chat template makes {len(text)} characters, more than {MAX_CHARACTERS}", "messages"
        )
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequest("the chat template makes text that is no Unicode", "messages")
    return text


def _effort(facts: _Facts, effort: str | None) -> Mapping[str, str]:
    if effort is None:
        return {}
    if "reasoning_effort" in facts.variables:
        return {"reasoning_effort": effort}
    if effort == "none":
        return {}
    raise InvalidRequest(
        "reasoning_effort is not supported by this model's chat template: leave it out", "reasoning_effort"
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of a template.

    Args:
        words: names of attributes, and strings, in its code.
        variables: names that it reads and does not set.
        takes_text: roles whose content it shows if it is a string.
        takes_parts: roles whose content it shows if it is a list of parts.
        needs_no_content: it shows the calls of a message only where the content is null.
        names_by_id: it shows the id of a call, as ``functions.NAME:NUMBER``, and no other name.
    """

    words: frozenset[str]
    variables: frozenset[str]
    takes_text: frozenset[str]
    takes_parts: frozenset[str]
    needs_no_content: bool
    names_by_id: bool


# A template may change the case of a text.
TEXT, KEY, NAME, CALL_ID = "730194826517", "518264930772", "548213906", "call12345"
PARTS = [{"type": "text", "text": TEXT, "note": KEY}]
CALL = {"id": CALL_ID, "type": "function", "function": {"name": NAME, "arguments": {}}}


@lru_cache(maxsize=64)
def _facts_of(template: str, variables: tuple[tuple[str, Any], ...]) -> _Facts:
    with failures_as(
        lambda reason: InvalidRequest(f"the chat template refuses these messages: {reason}", "messages")
    ):
        # The environment has the tags that transformers adds; Jinja caches none of it.
        compiled: Any = chat_template_utils._compile_jinja_template
        tree = compiled(template).environment.parse(template)
        words = {node.attr for node in tree.find_all(nodes.Getattr)}
        words |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        names = frozenset(meta.find_undeclared_variables(tree))

    def shows(before: Sequence[Message], role: str, content: object, after: Sequence[Message] = ()) -> bool:
        messages = [*before, {"role": role, "content": content}, *after]
        try:
            text = _rendered(template, messages, Conversation([]), dict(variables))
        except InvalidRequest:
            return False
        # One that shows the key shows the list as it is written.
        return TEXT in text and KEY not in text

    by_user = shows((), "user", TEXT), shows((), "user", PARTS)
    other = [{"type": "text", "text": "1"}] if by_user == (False, True) else "1"
    user: Message = {"role": "user", "content": other}
    calling: Message = {"role": "assistant", "content": other, "tool_calls": [CALL]}
    forms = {
        "user": by_user,
        "system": tuple(shows((), "system", content, [user]) for content in (TEXT, PARTS)),
        "assistant": tuple(shows([user], "assistant", content) for content in (TEXT, PARTS)),
        "tool": tuple(shows([user, calling], "tool", content) for content in (TEXT, PARTS)),
    }

    def called(content: str | None) -> str:
        """Return the text of a message with a call."""
        for given in (CALL, {**CALL, "function": {"name": NAME, "arguments": "{}"}}):
            message = {"role": "assistant", "content": content, "tool_calls": [given]}
            with suppress(InvalidRequest):
                return _rendered(template, [user, message], Conversation([]), dict(variables))
        return ""

    with_content, without = called(""), called(None)
    takes_text = frozenset(role for role, (text, _) in forms.items() if text)
    takes_parts = frozenset(role for role, (_, parts) in forms.items() if parts)
    return _Facts(
        *(frozenset(words), names, takes_text, takes_parts),
        needs_no_content=NAME in without and NAME not in with_content,
        names_by_id=CALL_ID in with_content and NAME not in with_content,
    )


def _as_read(facts: _Facts, index: int, message: Message) -> Message:
    """Return a message in the form that the template reads; fields that are null are left out, as in transformers."""
    message = {name: value for name, value in message.items() if value is not None}
    message["role"] = role = _role(facts, index, message["role"])
    if "content" not in message and isinstance(message.get("refusal"), str) and "refusal" not in facts.words:
        message["content"] = message["refusal"]
    if "content" in message:
        message["content"] = _content(facts, role, message["content"])
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, "reasoning": reasoning, **message, "reasoning_content": reasoning}
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        if facts.needs_no_content and not message.get("content"):
            message["content"] = None
    else:
        # Templates take an empty list for calls.
        message.pop("tool_calls", None)
    return message


def _with_names_in_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls, and their answers, have the function's name and the call's number as id."""
    ids, num_calls, found = dict[str, str](), 0, list[Message]()
    for message in messages:
        calls = list[Message]()
        for call in message.get("tool_calls", ()):
            ids[call["id"]] = f"functions.{call['function']['name']}:{num_calls}"
            calls.append({**call, "id": ids[call["id"]]})
            num_calls += 1
        answered = message.get("tool_call_id", "")
        own = {"tool_calls": calls, "tool_call_id": ids.get(answered, answered)}
        found.append({**message, **{name: value for name, value in own.items() if name in message}})
    return found


def _role(facts: _Facts, index: int, role: str) -> str:
    if role in facts.words:
        return role
    if role not in ROLES:
        raise InvalidRequest(
            f"messages[{index}].role: neither the chat template nor OpenAI has the role {shown(role)}: "
            f"use one of {', '.join(sorted(ROLES))}",
            "messages",
        )
    return "system" if role == "developer" else role


def _content(facts: _Facts, role: str, content: str | list[Any]) -> str | list[Any]:
    """Return content as text or as parts; those that a client sent stay parts where the template takes them."""
    form = {"developer": "system", "function": "tool"}.get(role, role)
    form = form if form in ("system", "assistant", "tool") else "user"
    if isinstance(content, str):
        if form in facts.takes_parts and form not in facts.takes_text:
            return [{"type": "text", "text": content}]
        return content
    if form not in facts.takes_parts:
        # Parts are lines, as in vLLM.
        return "\n".join(part["text"] if part["type"] == "text" else part["refusal"] for part in content)
    if "refusal" in facts.words:
        return content
    return [part if part["type"] == "text" else {"type": "text", "text": part["refusal"]} for part in content]


def _call(call: Message) -> Message:
    """Return a call of an earlier answer; its arguments are an object, or text that is none."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: str | Message | None) -> str | Message:
    if not isinstance(arguments, str):
        return arguments or {}
    if arguments.strip() in ("", "null"):
        return {}
    try:
        parsed: Any = decode(arguments)
    except (DecodeError, RecursionError, UnicodeEncodeError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


MARK = "615093748201"
FOUND_MARK = re.compile(rf'((?<!")")?{MARK}-(\d+)-(\\""(?!"))?')


def _write_texts(messages: Sequence[Message], reads_arguments: bool, rendered: Callable[[], str]) -> None:
    """Write arguments of calls that are no objects so that the template renders each as a JSON string.

    Args:
        reads_arguments: the template names them.
        rendered: renders the messages as they are.

    Raises:
        InvalidRequest: it renders them in another way; names the first such message.
    """
    functions = [
        (index, call["function"])
        for index, message in enumerate(messages)
        for call in message.get("tool_calls", ())
        if isinstance(call["function"]["arguments"], str)
    ]
    texts = [function["arguments"] for _, function in functions]
    wrong = [index for index, _ in functions]
    # Templates write a string as JSON or as it is.
    writings: tuple[Callable[[str], str], ...] = (str, json.dumps)
    for write in writings:
        if not wrong:
            return
        for number, (_, function) in enumerate(functions):
            function["arguments"] = write(f'{MARK}-{number}-"')
        found: dict[int, bool] = {}
        try:
            for before, number, behind in FOUND_MARK.findall(rendered()):
                found[int(number)] = found.get(int(number), True) and bool(before and behind)
        except InvalidRequest:
            continue
        wrong = [index for n, (index, _) in enumerate(functions) if not found.get(n, not reads_arguments)]
        for (_, function), text in zip(functions, texts, strict=True):
            function["arguments"] = write(text)
    if wrong:
        raise InvalidRequest(
            f"messages[{wrong[0]}]: the arguments of a call are no JSON object, and the chat template cannot render "
            "them as a string: repair them or leave the call out",
            "messages",
        )
