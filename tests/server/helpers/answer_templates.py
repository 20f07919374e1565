"""Chat templates that write reasoning and tool calls as models of today do, and answers in their form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from server.grammar.answer_parser import AnswerParser, CallDelta, Parts, joined
from server.grammar.grammar import Requested
from server.text.answer_form import AnswerForm, render_prompt
from server.text.chat_template import Conversation, Message

PROPERTIES = {
    "text": {"type": "string"},
    "number": {"type": "integer"},
    "flag": {"type": ["boolean", "null"]},
    "list": {"type": "array", "items": {"type": "number"}},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
TOOLS_JSON = json.dumps(TOOLS).encode()
REQUESTED = Requested(None, TOOLS_JSON, frozenset(["add", "now"]))
USER: Message = {"role": "user", "content": "hi"}


def template(
    turn: str, begin: str = "<|im_start|>{{ m.role }}{{ nl }}", end: str = "<|im_end|>{{ nl }}"
) -> str:
    """Return a chat template.

    Args:
        turn: writes the assistant's message `m`.
    """
    return (
        "{% set nl = '\n' %}{% for m in messages %}" + begin
        + "{% if m.role == 'assistant' %}" + turn + "{% else %}{{ m.content }}{% endif %}" + end
        + "{% endfor %}{% if add_generation_prompt %}{% set m = {'role': 'assistant'} %}" + begin + "{% endif %}"
    )  # fmt: skip


THOUGHT = (
    "{% if m.reasoning_content %}<think>{{ nl + m.reasoning_content + nl }}</think>{{ nl + nl }}{% endif %}"
)
CALLS = "{% for c in m.tool_calls or [] %}"
IN_TAGS = (
    THOUGHT + "{{ m.content or '' }}" + CALLS + "{{ nl }}<tool_call>{{ nl }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ nl }}'
    "</tool_call>{% endfor %}"
)
FIELDS = (
    THOUGHT
    + "{{ m.content or '' }}"
    + CALLS
    + "{{ nl }}<tool_call>{{ nl }}<function={{ c.function.name }}>{{ nl }}"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>{{ nl }}"
    "{{ value if value is string else value | tojson }}{{ nl }}</parameter>{{ nl }}{% endfor %}"
    "</function>{{ nl }}</tool_call>{% endfor %}"
)
PAIRS = (
    THOUGHT + "{{ m.content or '' }}" + CALLS + "{{ nl }}<tool_call>{{ c.function.name + nl }}"
    "{% for key, value in c.function.arguments | items %}<arg_key>{{ key }}</arg_key>{{ nl }}<arg_value>"
    "{{ value if value is string else value | tojson }}</arg_value>{{ nl }}{% endfor %}</tool_call>{% endfor %}"
)
JOINED = PAIRS.replace("c.function.name + nl", "c.function.name").replace("</arg_key>{{ nl }}", "</arg_key>")
LISTED = (
    "{% if m.tool_calls %}[TOOL_CALLS][" + CALLS + '{"name": "{{ c.function.name }}", "arguments": '
    '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]'
    "{% else %}{{ m.content }}{% endif %}"
)
SPACED = LISTED.replace("[TOOL_CALLS][", " [TOOL_CALLS] [").replace("{{ m.content }}", " {{ m.content }}")
NAMED = (
    "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content or '' }}" + CALLS
    + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
)  # fmt: skip
IDENTIFIED = NAMED.replace("[ARGS]", "[CALL_ID]{{ c.id }}[ARGS]")
SECTION = (
    "{{ m.content or '' }}{% if m.tool_calls %}<calls>{{ nl }}{% endif %}" + CALLS
    + '<invoke name="{{ c.function.name }}">{{ nl }}{% for key, value in c.function.arguments | items %}'
    '<parameter name="{{ key }}">{{ value if value is string else value | tojson }}</parameter>{{ nl }}{% endfor %}'
    "</invoke>{{ nl }}{% endfor %}{% if m.tool_calls %}</calls>{% endif %}"
)  # fmt: skip
NAMED_SECTION = (
    "{{ m.content or '' }}{% if m.tool_calls %}<｜calls｜>{% endif %}" + CALLS
    + "<｜call｜>{{ c.function.name }}<｜sep｜>{{ c.function.arguments | tojson }}<｜end｜>{% endfor %}"
    "{% if m.tool_calls %}<｜ends｜>{% endif %}"
)  # fmt: skip
NUMBERED = (
    "{{ m.content or '' }}{% if m.tool_calls %}<|calls|>{% endif %}" + CALLS
    + "<|call_begin|>{{ c.id }}<|argument|>{{ c.function.arguments | tojson }}<|call_end|>{% endfor %}"
    "{% if m.tool_calls %}<|calls_end|>{% endif %}"
)  # fmt: skip
# Writes calls only of messages whose content is null, and the section's end behind the second one.
WITH_NULL = (
    "{% if m.content is none %}" + CALLS
    + "{{ '<｜calls｜>' if loop.first else nl }}<｜call｜>{{ c.type }}<｜sep｜>{{ c.function.name + nl }}"
    "{{ '```json' + nl + c.function.arguments + nl + '```' }}<｜end｜>{{ '' if loop.first else '<｜ends｜>' }}"
    "{% endfor %}{% else %}{{ '' + m.content }}{% endif %}"
)  # fmt: skip
BARE = (
    "{% if m.tool_calls %}{% set c = m.tool_calls[0] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}{# <|python_tag|> #}"
)
CHANNELS = (
    "{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>assistant"
    "{% endif %}{% if m.tool_calls %}{% set c = m.tool_calls[0] %}{% if m.content %}<|channel|>commentary<|message|>"
    "{{ m.content }}<|end|><|start|>assistant{% endif %} to=functions.{{ c.function.name }}<|channel|>commentary json"
    "<|message|>{{ c.function.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
)
IN_INST = ("{% if m.role == 'user' %}[INST]{% endif %}", "{{ '[/INST]' if m.role == 'user' else '</s>' }}")
IN_HEADERS = ("<|start_header_id|>{{ m.role }}<|end_header_id|>{{ nl + nl }}", "<|eot_id|>")
IN_MESSAGES = (
    "<|start|>{{ m.role }}{{ '<|message|>' if m.role == 'user' else '' }}",
    "{{ '<|end|>' if m.role == 'user' else '' }}",
)
TEMPLATES = {
    "json": template(IN_TAGS),
    "fields": template(FIELDS),
    "pairs": template(PAIRS),
    "joined": template(JOINED),
    "list": template(LISTED, *IN_INST),
    "spaced": template(SPACED, *IN_INST),
    "named": template(NAMED, *IN_INST),
    "identified": template(IDENTIFIED, *IN_INST),
    "section": template(SECTION),
    "named section": template(NAMED_SECTION),
    "numbered": template(NUMBERED),
    "bare": template(BARE, *IN_HEADERS),
    "channels": template(CHANNELS, *IN_MESSAGES),
}
# Special tokens of models with these templates; the others' markup is plain text.
SPECIAL = {
    "list": ("[INST]", "[/INST]", "[TOOL_CALLS]"),
    "spaced": ("[INST]", "[/INST]", "[TOOL_CALLS]"),
    "named": ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    "identified": ("[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
    "named section": ("<｜calls｜>", "<｜call｜>", "<｜sep｜>", "<｜end｜>", "<｜ends｜>"),
    "numbered": ("<|calls|>", "<|call_begin|>", "<|argument|>", "<|call_end|>", "<|calls_end|>"),
    "bare": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    "channels": (
        "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>",
    ),
}  # fmt: skip


def tokenizer_of(name: str, backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one of the templates and the special tokens of models that have it."""
    special = SPECIAL.get(name, ())
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", additional_special_tokens=list(special)
    )
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


# Those that do not write content beside calls, and those that do not write reasoning.
WITHOUT_CONTENT = ("list", "spaced", "bare")
WITHOUT_REASONING = (*WITHOUT_CONTENT, "section", "named section", "numbered")


def form_of(name: str) -> AnswerForm:
    """Return how one of the templates writes answers."""
    return render_prompt(TEMPLATES[name], Conversation([USER], tools=TOOLS_JSON), {}).form


def written(name: str, message: Message) -> str:
    """Return an answer as one of the templates writes it behind its prompt."""
    prompt, whole = (
        render_prompt(TEMPLATES[name], Conversation(messages, adds), {}).text
        for messages, adds in (([USER], True), ([USER, {"role": "assistant", **message}], False))
    )
    answer = whole.removeprefix(prompt)
    assert answer != whole
    for end in ("<|im_end|>\n", "</s>", "<|eot_id|>", "<|call|>", "<|end|>"):
        answer = answer.removesuffix(end)
    return answer


def call(name: str, arguments: dict[str, Any]) -> Message:
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


# Text that may look like the beginning of markup and is none.
WORDS = st.text(st.sampled_from('ab{}[]"\\ \n<>/é漢🙂|=:,;'), max_size=12)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(st.sampled_from('ab{}[]"\\ <é漢🙂;'), max_size=8).map(str.strip),
        "number": st.integers(-99, 99),
        "flag": st.sampled_from([True, False, None]),
        "list": st.lists(st.integers(0, 9), max_size=2),
    },
)
CALL = st.just(call("now", {})) | st.builds(call, st.just("add"), ARGUMENTS)


@st.composite
def messages(draw: st.DrawFn, name: str) -> Message:
    """Draw an assistant's message that one of the templates can write."""
    message: Message = {"content": draw(WORDS)}
    num_calls = 1 if name in ("bare", "channels") else 3
    if calls := draw(st.lists(CALL, max_size=num_calls)):
        message["tool_calls"] = calls
    if name not in WITHOUT_REASONING and draw(st.booleans()):
        message["reasoning_content"] = "so " + draw(WORDS)
    return message


def parsed(form: AnswerForm, pieces: Sequence[str], requested: Requested = REQUESTED) -> Parts:
    """Return the parts of an answer that comes in pieces; nothing follows the last one."""
    parser = AnswerParser(form, requested)
    found = [parser.push(piece) for piece in pieces] + [parser.push("", is_last=True)]
    calls: tuple[CallDelta, ...] = tuple(
        CallDelta(number, each.name, each.arguments)
        for number, each in enumerate(joined(delta for parts in found for delta in parts.calls))
    )
    return Parts(
        "".join(parts.content for parts in found), "".join(parts.reasoning for parts in found), calls
    )
