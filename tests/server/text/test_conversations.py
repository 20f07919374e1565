"""Conversations reach templates as clients wrote them, and are rendered as transformers renders them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import InvalidRequest
from server.text.chat_template import Conversation, choose, render
from tests.helpers.tiny_models import make_tokenizer

# As Qwen's: reads strings, and writes arguments that are a string as they are.
STRINGS = (
    "{%- if tools %}tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{%- for m in messages %}<{{ m.role }}>"
    "{%- if m.role == 'assistant' and m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{- m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "arguments": '
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{%- else %}{{ call.function.arguments | tojson }}{% endif %}}"
    "{%- endfor %}</s>\n{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% endif %}"
)
# As those of models of images: reads parts alone.
PARTS = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}|{% endif %}{% endfor %}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
USER: dict[str, Any] = {"role": "user", "content": "hi"}


def shown(template: str, *messages: dict[str, Any], **fields: Any) -> str:
    return render(template, Conversation(list(messages), **fields), {"bos_token": "<s>"})


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def calling(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


TEXTS = st.text(alphabet="ab \n\"'{}é<", max_size=6)
ARGUMENTS = st.dictionaries(TEXTS, st.none() | st.booleans() | st.integers(-9, 9) | TEXTS, max_size=2)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {}, "return": {"type": "string"}},
}


@st.composite
def conversations(draw: st.DrawFn, in_parts: bool) -> list[dict[str, Any]]:
    """Draw messages in the form that transformers takes: arguments are objects."""
    messages: list[dict[str, Any]] = []
    content = st.lists(TEXTS, max_size=2).map(lambda texts: parts(*texts)) if in_parts else TEXTS
    for role in draw(
        st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=4)
    ):
        message: dict[str, Any] = {"role": role, "content": draw(content)}
        if role == "assistant":
            if draw(st.booleans()):
                message = {**calling(draw(ARGUMENTS)), "content": draw(st.none() | content)}
            message["reasoning_content"] = draw(st.none() | TEXTS)
        messages.append({**message, "field_of_tomorrow": draw(st.none() | TEXTS)})
    return messages


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with arguments as JSON, as clients of OpenAI's API send them."""
    sent: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


@pytest.mark.parametrize(
    ("template", "in_parts"), [(STRINGS, False), (PARTS, True), (BOTH, False), (BOTH, True)]
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_conversation_is_rendered_as_transformers_renders_it(
    template: str, in_parts: bool, data: st.DataObject
) -> None:
    tokenizer = make_tokenizer(chat_template=template)
    messages = data.draw(conversations(in_parts))
    if template is BOTH:
        # transformers has no content of a message without any, which this template reads as parts.
        messages = [{**message, "content": message["content"] or ""} for message in messages]
    tools: list[Any] | None = data.draw(st.none() | st.just([TOOL]))
    opens = data.draw(st.booleans())
    wanted = tokenizer.apply_chat_template(messages, tools, add_generation_prompt=opens, tokenize=False)
    conversation = Conversation(as_sent(messages), opens, tools=json.dumps(tools).encode() if tools else b"")
    variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    assert render(template, conversation, variables) == wanted


def test_content_has_the_form_that_the_template_reads() -> None:
    assert shown(STRINGS, {"role": "user", "content": parts("a", "b")}) == "<user>a\nb</s>\n<assistant>"
    for role in ("user", "system", "assistant", "tool"):
        assert shown(PARTS, {"role": role, "content": "hi"}) == f"<s><{role}>hi|</s><assistant>"
    assert shown(PARTS, {"role": "user", "content": parts("a", "b")}) == "<s><user>a|b|</s><assistant>"
    assert shown(BOTH, USER, {"role": "assistant", "content": parts("a", "b")}) == "<user>hi<assistant>[a][b]"


def test_each_role_has_a_form_of_its_own() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}"
        "{% else %}{% for part in m.content %}{{ part.text }};{% endfor %}{% endif %}{% endfor %}"
    )
    assert shown(template, {"role": "system", "content": parts("a", "b")}, USER) == "a\nbhi;"


def test_fields_of_a_message_reach_the_template() -> None:
    template = "{{ messages[0] | tojson }}"
    message = {**USER, "name": "n", "tomorrow": {"a": [1, None]}, "none": None}
    assert json.loads(shown(template, message)) == {**USER, "name": "n", "tomorrow": {"a": [1, None]}}


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_each_of_its_names(sent: str, read: str) -> None:
    message = {"role": "assistant", "content": "a", sent: "so"}
    assert shown(f"{{{{ messages[0].{read} }}}}", message) == "so"


def test_a_developer_is_the_system_where_the_template_does_not_name_one() -> None:
    developer = {"role": "developer", "content": "be brief"}
    assert shown(STRINGS, developer) == "<system>be brief</s>\n<assistant>"
    named = "{% for m in messages %}{% if m.role == 'developer' %}dev:{% endif %}{{ m.content }}{% endfor %}"
    assert shown(named, developer) == "dev:be brief"


def test_a_role_that_neither_the_template_nor_openai_has_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\].role: .* 'banana'") as refused:
        shown(STRINGS, USER, {"role": "banana", "content": "lost"})
    assert refused.value.param == "messages"
    named = "{% for m in messages if m.role in ['user', 'banana'] %}{{ m.content }}{% endfor %}"
    assert shown(named, USER, {"role": "banana", "content": "kept"}) == "hikept"
    assert shown(STRINGS, {"role": "function", "content": "1"}) == "<function>1</s>\n<assistant>"


@pytest.mark.parametrize("arguments", ["", " \n", "null", None, "{}", " {} "])
@pytest.mark.parametrize("template", [STRINGS, PARTS])
def test_no_arguments_are_an_empty_object(template: str, arguments: str | None) -> None:
    text = shown(template, calling(arguments), add_generation_prompt=False)
    assert '"arguments": {}}' in text


@pytest.mark.parametrize("arguments", ['{"a": "Par', "[1]", "5", "nul", '"{}"', '}, "role": "system'])
@pytest.mark.parametrize("template", [STRINGS, PARTS])
def test_arguments_that_are_no_object_are_a_json_string(template: str, arguments: str) -> None:
    text = shown(template, calling('{"a": 1}'), calling(arguments), add_generation_prompt=False)
    assert f'"arguments": {json.dumps(arguments)}}}' in text
    assert '"arguments": {"a": 1}}' in text


@pytest.mark.parametrize(
    "template",
    [
        "{% for name in m.arguments %}",
        "{% for name, value in m.arguments.items() %}",
        "{{ m.arguments }}{{ m.arguments | tojson }}{% for name in [] %}",
        '"{{ m.arguments }}"{% for name in [] %}',
    ],
)
def test_arguments_that_no_string_can_be_made_of_are_refused_by_their_message(template: str) -> None:
    loop = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}{% set m = call.function %}"
    )
    whole = loop + template + "{{ name }};{% endfor %}{% endfor %}{% endfor %}"
    assert shown(whole, USER, calling('{"a": 1}'))
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]: the arguments of a call"):
        shown(whole, USER, calling('{"a": "Par'))


@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
@pytest.mark.parametrize("content", ["", "'<' + m.content + '>' + "])
def test_a_template_that_joins_arguments_to_text_is_given_them_as_text(arguments: Any, content: str) -> None:
    template = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{{ " + content + "call.function.name + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert shown(template, USER, calling(arguments)) == ("<>" if content else "") + 'f{"a": "é"}'
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        shown(template.replace("call.function.name", "call.function.name + 1"), USER, calling(arguments))


def test_arguments_that_a_template_does_not_read_may_be_any() -> None:
    assert shown("{{ messages[0].content }}", USER, calling('{"a": "Par')) == "hi"


def test_a_refusal_is_text() -> None:
    refusal = [*parts("a"), {"type": "refusal", "refusal": "no"}]
    assert shown(STRINGS, {"role": "assistant", "content": refusal}).startswith("<assistant>a\nno</s>")
    assert shown(PARTS, {"role": "assistant", "content": refusal}).startswith("<s><assistant>a|no|</s>")
    assert shown(STRINGS, {"role": "assistant", "content": None, "refusal": "no"}).startswith("<assistant>no")
    assert shown("{{ messages[0].refusal }}", {"role": "assistant", "refusal": "no"}) == "no"


def test_a_template_that_reads_every_content_is_given_an_empty_one() -> None:
    template = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"
    assert shown(template, USER, calling("{}")) == "<hi><>"


def calls_of(*names: str, content: str | None = None) -> dict[str, Any]:
    calls = [
        {"id": f"id{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in names
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize("content", [None, ""])
def test_a_template_that_shows_calls_only_without_content_is_given_none(content: str | None) -> None:
    source = (
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ '' + m.content }}{% endif %}"
        "{% endfor %}"
    )
    assert shown(source, USER, calls_of("now", content=content)) == "hinow{}"


def test_a_template_that_shows_ids_in_place_of_names_is_given_ids_with_names() -> None:
    source = (
        "{% for m in messages %}<{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}"
        "{% endfor %}{{ m.tool_call_id }}={{ m.content }}>{% endfor %}"
    )
    answers = [{"role": "tool", "tool_call_id": each, "content": "1"} for each in ("idb", "ida", "other")]
    assert shown(source, calls_of("a", "b", content=""), *answers, calls_of("a", content="")) == (
        "<functions.a:0{}functions.b:1{}=><functions.b:1=1><functions.a:0=1><other=1><functions.a:2{}=>"
    )
    with_names = source.replace("{{ c.id }}", "{{ c.id + c.function.name | upper }}")
    assert shown(with_names, calls_of("a", content="")) == "<idaA{}=>"


def test_a_template_that_takes_one_text_beside_calls_is_given_both_as_reasoning() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% endif %}{{ m.thinking or m.content }}|{{ m.tool_calls[0].function.name }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert shown(source, {**calls_of("now", content="Then"), "reasoning": "So"}) == "So\n\nThen|now"
    assert shown(source, {**calls_of("now", content=""), "reasoning": "So"}) == "So|now"
    assert shown(source, calls_of("now", content="Then")) == "Then|now"


@pytest.mark.parametrize("calls", [[], None])
def test_an_empty_list_of_calls_is_none(calls: list[Any] | None) -> None:
    source = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.name }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert shown(source, {"role": "assistant", "content": "So", "tool_calls": calls}) == "So"


def test_the_effort_of_reasoning_is_a_variable_of_templates_that_read_it() -> None:
    template = (
        "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
        "{{ reasoning_effort }}"
    )
    assert shown(template, USER, reasoning_effort="high") == "high"
    assert shown(template, USER) == "medium"
    assert shown(BOTH, USER, reasoning_effort="none") == "<user>hi"
    with pytest.raises(InvalidRequest) as refused:
        shown(BOTH, USER, reasoning_effort="high")
    assert refused.value.param == "reasoning_effort"


def test_a_client_s_variables_take_the_place_of_special_tokens() -> None:
    template = "{{ bos_token }}{{ enable_thinking }}"
    assert shown(template, USER, variables={"enable_thinking": False}) == "<s>False"
    assert shown(template, USER, variables={"bos_token": "^", "enable_thinking": 1}) == "^1"


@pytest.mark.parametrize("field", [True, "content"])
@pytest.mark.parametrize("template", [STRINGS, PARTS, BOTH])
def test_the_last_message_is_continued_as_in_transformers(template: str, field: bool | str) -> None:
    last = parts("a", "an ") if template is not STRINGS else "an "
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": last}]
    tokenizer = make_tokenizer(chat_template=template)
    wanted = tokenizer.apply_chat_template(
        [{**USER, "content": parts("hi")} if template is PARTS else USER, messages[1]],
        continue_final_message=field,
        tokenize=False,
    )
    found = render(
        template,
        Conversation(messages, add_generation_prompt=False, continue_final_message=field),
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    )
    assert found == wanted


def test_reasoning_is_continued_under_each_of_its_names() -> None:
    message = {"role": "assistant", "content": "", "reasoning": "so"}
    found = shown(STRINGS, message, add_generation_prompt=False, continue_final_message="reasoning")
    assert found == "<assistant>(so"


@pytest.mark.parametrize(
    "templates", [{"default": "D"}, {"default": "D", "tool_use": "T"}, {"default": "D", "other": "O"}]
)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("name", [None, "default", "tool_use", "other"])
def test_a_template_is_chosen_as_transformers_chooses_it(
    templates: dict[str, str], tools: list[dict[str, Any]] | None, name: str | None
) -> None:
    conversation = Conversation([USER], tools=b"[{}]" if tools else b"", template=name)
    if name is not None and name not in templates:
        with pytest.raises(InvalidRequest, match="there is no template with the name") as refused:
            choose(templates, conversation, "none")
        assert refused.value.param == "chat_template"
        return
    tokenizer = make_tokenizer()
    tokenizer.chat_template = templates
    assert choose(templates, conversation, "none") == tokenizer.get_chat_template(name, tools)


@pytest.mark.parametrize("name", ["{{ messages }}", "../default", "/etc/passwd", "", "default.jinja"])
def test_a_source_or_a_path_names_no_template(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        choose({"default": "D"}, Conversation([USER], template=name), "none")
    assert refused.value.param == "chat_template"


def test_of_several_templates_without_a_default_one_must_be_named() -> None:
    with pytest.raises(InvalidRequest, match="name one of 'a', 'b'"):
        choose({"b": "B", "a": "A"}, Conversation([USER]), "none")
