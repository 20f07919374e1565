"""The forms of records that people have: text, completions, conversations, Alpaca's, ShareGPT's, preference pairs.

Each becomes a text, a completion or a conversation with tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from deltastore.errors import UsageError, shown

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what follows it."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and the tools that its model may call."""

    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """A form of records, as errors show it."""

    shown: str
    keys: Sequence[str]
    alike: Sequence[str]  # keys of other forms that stand for the same


FORMS = (
    Form('{"text"}', ("text",), ("content", "body", "document", "passage", "article", "code")),
    Form(
        '{"prompt", "completion"}',
        ("prompt", "completion"),
        ("question", "answer", "query", "response", "problem", "solution", "source", "target", "reply"),
    ),
    Form('{"messages"}', ("messages", "tools"), ("dialog", "dialogue", "chat", "turns", "role", "content")),
    Form('{"conversations"}', ("conversations", "system", "tools"), ("from", "value")),
    Form(
        '{"instruction", "input", "output"}',
        ("instruction", "input", "output", "system", "history"),
        ("context", "response"),
    ),
    Form('{"prompt", "chosen", "rejected"}', ("prompt", "chosen", "rejected"), ("preferred", "accepted")),
)
FORM_KEYS = frozenset(key for form in FORMS for key in form.keys) | {"functions", "label"}
# ShareGPT's names of roles.
ROLES: Mapping[str, str] = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "ai": "assistant", "observation": "tool", "function_response": "tool", "function": "tool",
}  # fmt: skip
CALL_ROLES = ("function_call", "tool_call")
KNOWN_ROLES = ("user", "assistant", "system", "developer", "tool", "function")
MAX_SHOWN_KEYS = 8


def parse_record(record: Any, where: str) -> str | Completion | Chat | None:
    """Return the text, completion or conversation of a record; None for a completion that is labelled as a bad one.

    Of a preference pair the chosen answer is taken. A conversation wins over text that stands beside it.

    Args:
        where: names the record in errors.

    Raises:
        UsageError: a record of no known form.
    """
    if not isinstance(record, dict):
        raise UsageError(f"{where}: {_known_forms()}; this one is {_type_name(record)}")
    own = {key: _decoded(value) for key, value in record.items() if value is not None}
    tools = _tools(own, where)
    if "chosen" in own:
        return _chosen(own, tools, where)
    for key in ("messages", "conversations"):
        if key in own:
            return Chat(_behind_system(own, _messages(own[key], where)), tools)
    prompt, completion = own.get("prompt"), own.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return None if own.get("label") is False else Completion(prompt, completion)
    if isinstance(prompt, (str, list)) and isinstance(completion, (str, list)):
        turns = [*_turns(prompt, "user", where), *_turns(completion, "assistant", where)]
        return None if own.get("label") is False else Chat(turns, tools)
    if isinstance(own.get("instruction"), str) and isinstance(own.get("output"), str):
        answer = {"role": "assistant", "content": own["output"]}
        return Chat([*_instruction(own, where), answer], tools)
    if isinstance(own.get("text"), str):
        return str(own["text"])
    raise _unknown_form(record, where)


def _chosen(record: Mapping[str, Any], tools: list[Any] | None, where: str) -> str | Completion | Chat:
    """Return the better one of a preference pair, behind the prompt that stands beside it."""
    chosen, prompt = record["chosen"], record.get("prompt")
    is_text = isinstance(chosen, str) and (prompt is None or isinstance(prompt, str))
    if is_text and not record.keys() & {"instruction", "conversations", "messages"}:
        return chosen if prompt is None else Completion(prompt, chosen)
    if not isinstance(chosen, (str, list, dict)):
        raise _unknown_form(record, where)
    answer = _turns(chosen, "assistant", where)
    if answer and answer[0]["role"] in ("user", "system", "developer"):
        return Chat(answer, tools)
    before: list[Message] = []
    if "instruction" in record:
        before = _instruction(record, where)
    elif (turns := record.get("messages", record.get("conversations", prompt))) is not None:
        before = _behind_system(record, _turns(turns, "user", where))
    return Chat([*before, *answer], tools)


def _instruction(record: Mapping[str, Any], where: str) -> list[Message]:
    """Return the turns of an Alpaca record before its answer."""
    turns = _system(record)
    for pair in record.get("history") or ():
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise UsageError(f"{where}: `history` is a list of pairs of strings: a question and its answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    parts = [record["instruction"], record.get("input") or ""]
    if not all(isinstance(part, str) for part in parts):
        raise _unknown_form(record, where)
    return [*turns, {"role": "user", "content": "\n".join(filter(None, parts))}]


def _system(record: Mapping[str, Any]) -> list[Message]:
    system = record.get("system")
    return [{"role": "system", "content": system}] if isinstance(system, str) and system else []


def _behind_system(record: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    has_own = bool(messages) and messages[0]["role"] in ("system", "developer")
    return messages if has_own else [*_system(record), *messages]


def _turns(value: Any, role: str, where: str) -> list[Message]:
    """Return the messages of a list, of one message, or of the text of one."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages([value] if isinstance(value, dict) else value, where)


def _messages(value: Any, where: str) -> list[Message]:
    """Return messages as chat templates read them, from OpenAI's form or from ShareGPT's."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise UsageError(f"{where}: messages are a list of objects with role and content")
    return [_message(message, where) for message in value]


def _message(message: Mapping[str, Any], where: str) -> Message:
    own = {key: value for key, value in message.items() if value is not None}
    if "role" not in own and "from" in own:
        own = {"role": own["from"], "content": own.get("value", "")}
    role = own.get("role")
    if not isinstance(role, str):
        raise UsageError(
            f"{where}: messages are a list of objects with role and content; one has the keys {_keys(message)}"
        )
    if role in CALL_ROLES:
        return _call(own)
    own["role"] = ROLES.get(role, role)
    if own["role"] not in KNOWN_ROLES and message.get("role") is None:
        raise UsageError(
            f"{where}: a turn is from {shown(role)}: name it human, gpt, system, function_call or observation"
        )
    if isinstance(own.get("tool_calls"), list):
        own["tool_calls"] = [_with_arguments(call) for call in own["tool_calls"]]
    # Templates print a content that is none as a word.
    own.setdefault("content", "")
    return own


def _call(message: Mapping[str, Any]) -> Message:
    """Return the message of a call that stands as JSON in ShareGPT's content."""
    calls = parsed(message.get("content"))
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        return {"role": "assistant", "content": message.get("content", "")}
    tool_calls = [_with_arguments({"type": "function", "function": call}) for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _with_arguments(call: Any) -> Any:
    """Return a call whose arguments are an object, which most templates need."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = parsed(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _tools(record: Mapping[str, Any], where: str) -> list[Any] | None:
    """Return a record's tools in OpenAI's form; a column of text has them as JSON."""
    tools = record.get("tools", record.get("functions"))
    if not tools or (isinstance(tools, str) and not tools.strip()):
        return None
    tools = parsed(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError(
            f"{where}: tools are a list of objects, each a function's name, description and parameters"
        )
    return [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
        for tool in tools
    ] or None


def _decoded(value: Any) -> Any:
    """Return the messages that stand as JSON in a text, as columns of CSV have them; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        found = parsed(value)
        if isinstance(found, list) and found and all(isinstance(each, dict) for each in found):
            return found if all("role" in each or "from" in each for each in found) else value
    return value


def parsed(text: Any) -> Any:
    """Return the value of a JSON text; None for any other."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None


def _unknown_form(record: Mapping[Any, Any], where: str) -> UsageError:
    scores = {form.shown: _likeness(form, record) for form in FORMS}
    nearest = max(scores, key=lambda name: scores[name])
    return UsageError(
        f"{where}: {_known_forms()}; this one has the keys {_keys(record)}: name them as in {nearest}, the nearest form"
    )


def _known_forms() -> str:
    return f"a record is {', '.join(form.shown for form in FORMS)}"


def _likeness(form: Form, record: Mapping[Any, Any]) -> float:
    """Return how many keys of a record are a form's or like one of them; a form of fewer keys wins a tie."""
    keys = [str(key).lower()[:64] for key in record]
    known = [*form.keys, *form.alike]
    return (
        sum(1.0 for key in keys if key in known or get_close_matches(key, form.keys, 1, 0.75))
        - len(form.keys) / 1e3
    )


def _keys(record: Mapping[Any, Any]) -> str:
    """Show a record's keys with the types of their values."""
    names = [f"{shown(key)} ({_type_name(value)})" for key, value in list(record.items())[:MAX_SHOWN_KEYS]]
    rest = len(record) - len(names)
    return f"{', '.join(names) or 'none'}{f' and {rest} more' if rest else ''}"


def _type_name(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
