"""How a template writes answers, found by rendering it."""

from __future__ import annotations

import pytest

from server.grammar.answer_parser import AnswerParser
from server.text.answer_form import AnswerForm, render_prompt
from server.text.chat_template import Conversation, Message
from tests.helpers.tiny_models import CHAT_TEMPLATE
from tests.server.helpers.answer_templates import (
    IN_TAGS,
    NAMED,
    REQUESTED,
    SPECIAL,
    TEMPLATES,
    TOOLS_JSON,
    USER,
    WITH_NULL,
    form_of,
    parsed,
    template,
)

THINK = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("name", "kind", "tag", "reasoning"),
    [
        ("json", "json", "<tool_call>", THINK),
        ("fields", "fields", "<tool_call>\n<function=", THINK),
        ("pairs", "fields", "<tool_call>", THINK),
        ("joined", "fields", "<tool_call>", THINK),
        ("list", "json", "[TOOL_CALLS]", None),
        ("spaced", "json", "[TOOL_CALLS]", None),
        ("named", "named", "[TOOL_CALLS]", ("[THINK]", "[/THINK]")),
        ("identified", "named", "[TOOL_CALLS]", ("[THINK]", "[/THINK]")),
        ("section", "fields", '<calls>\n<invoke name="', None),
        ("named section", "named", "<｜calls｜><｜call｜>", None),
        ("numbered", "named", "<|calls|><|call_begin|>functions.", None),
        ("bare", "json", "", None),
        ("channels", "channels", "", None),
    ],
)
def test_the_form_of_calls_and_reasoning_is_found_in_what_a_template_renders(
    name: str, kind: str, tag: str, reasoning: tuple[str, str] | None
) -> None:
    form = form_of(name)
    assert form.calls is not None
    assert (form.calls.kind, form.calls.tag, form.reasoning) == (kind, tag, reasoning)


def test_the_text_around_names_and_arguments_is_the_templates() -> None:
    in_tags, fields, listed, bare = (form_of(name).calls for name in ("json", "fields", "list", "bare"))
    assert in_tags is not None
    assert in_tags.begin.strip() == '<tool_call>\n{"name": "'
    assert in_tags.middle == '", "arguments": '
    assert in_tags.end == "}\n</tool_call>"
    assert fields is not None
    assert fields.middle.strip() == ">"
    assert fields.field == ("<parameter=", ">\n", "\n</parameter>")
    assert fields.closing.split() == ["</function>", "</tool_call>"]
    assert listed is not None
    assert listed.end == "}]"
    assert bare is not None
    assert (bare.arguments_key, bare.more_tags) == ("parameters", ("<|python_tag|>",))


@pytest.mark.parametrize(
    ("name", "end", "again", "section_end"),
    [
        ("section", "\n</invoke>", '<invoke name="', "\n</calls>"),
        ("named section", "<｜end｜>", "<｜call｜>", "<｜ends｜>"),
        ("numbered", "<|call_end|>", "<|call_begin|>functions.", "<|calls_end|>"),
        ("json", "}\n</tool_call>", "", ""),
        ("fields", "\n</function>\n</tool_call>", "", ""),
        ("named", "", "", ""),
    ],
)
def test_the_text_around_calls_of_one_section_is_found(
    name: str, end: str, again: str, section_end: str
) -> None:
    calls = form_of(name).calls
    assert calls is not None
    assert (calls.end, calls.again, calls.section_end) == (end, again, section_end)


def test_calls_of_a_template_that_joins_arguments_to_text_are_found() -> None:
    source = template(NAMED.replace("c.function.arguments | tojson", "'' + c.function.arguments"))
    form = render_prompt(source, Conversation([USER]), {}).form
    assert form.calls == form_of("named").calls


def test_calls_of_a_template_that_writes_them_without_content_are_found() -> None:
    form = render_prompt(template(WITH_NULL), Conversation([USER]), {}).form
    begin, end = "<｜call｜>function<｜sep｜>", "\n```<｜end｜>"
    assert form.calls is not None
    assert (form.calls.begin, form.calls.end) == ("<｜calls｜>" + begin, end)
    assert (form.calls.again, form.calls.section_end) == (begin, "<｜ends｜>")
    one, more = (f'{begin}{name}\n```json\n{{"number": 1}}{end}' for name in ("add", "now"))
    for answer in (f"Hi<｜calls｜>{one}\n{more}<｜ends｜>", f"Hi<｜calls｜>{one}\n{more}"):
        found = parsed(form, list(answer))
        assert [(each.name, each.arguments) for each in found.calls] == [
            ("add", '{"number": 1}'),
            ("now", '{"number": 1}'),
        ]
        assert found.content == "Hi"


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, "{{ messages }}", "{{ 1 }}", "{{ tools | tojson }}"])
def test_a_template_that_shows_no_calls_has_no_form_of_them(source: str) -> None:
    conversation = Conversation([USER], tools=TOOLS_JSON)
    assert render_prompt(source, conversation, {}).form == AnswerForm()


def test_reasoning_that_the_prompt_opens_is_open() -> None:
    source = (
        template(IN_TAGS).removesuffix("{% endif %}") + "{% if think %}<think>{{ nl }}{% endif %}{% endif %}"
    )
    opened = Conversation([USER], variables={"think": True})
    assert render_prompt(source, opened, {}).form.is_reasoning
    for closed in (
        Conversation([USER]),
        Conversation([{"role": "user", "content": "What is <think>"}]),
        Conversation([USER, {"role": "assistant", "content": "No"}], False, continue_final_message=True),
    ):
        assert not render_prompt(source, closed, {}).form.is_reasoning


@pytest.mark.parametrize(("content", "is_open"), [("<think>So", True), ("<think>So</think>No", False)])
def test_reasoning_that_a_continued_message_opens_is_open(content: str, is_open: bool) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    conversation = Conversation(messages, False, continue_final_message=True)
    assert render_prompt(TEMPLATES["json"], conversation, {}).form.is_reasoning == is_open


@pytest.mark.parametrize(
    ("message", "continued", "place"),
    [
        (None, False, (False, False)),
        ({"content": "So"}, True, (False, True)),
        ({"content": "", "reasoning_content": "So"}, "reasoning_content", (True, False)),
    ],
)
def test_the_message_of_harmony_that_a_prompt_leaves_open_is_told(
    message: Message | None, continued: bool | str, place: tuple[bool, bool]
) -> None:
    messages = [{"role": "user", "content": "What is <|channel|>analysis<|message|>"}]
    if message is not None:
        messages.append({"role": "assistant", **message})
    conversation = Conversation(messages, not continued, continue_final_message=continued)
    form = render_prompt(TEMPLATES["channels"], conversation, {}).form
    assert (form.is_reasoning, form.is_content) == place


def test_markers_that_a_template_names_and_does_not_show_are_taken() -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert render_prompt(source, Conversation([USER]), {}).form.reasoning == THINK


def test_only_special_tokens_of_the_markup_are_kept() -> None:
    tokens = dict(enumerate(["<s>", *SPECIAL["named"]]))
    kept = form_of("named").with_special(tokens).special
    assert sorted(kept.values()) == ["[/THINK]", "[ARGS]", "[THINK]", "[TOOL_CALLS]"]
    assert form_of("json").with_special(tokens).special == {}


@pytest.mark.parametrize("closing", ["]]", "}", "]", ""])
def test_fields_that_no_word_closes_are_no_form(closing: str) -> None:
    turn = (
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}[[call {{ c.function.name + nl }}"
        "{% for key, value in c.function.arguments | items %}<k={{ key }}>{{ value }}</v>{{ nl }}{% endfor %}"
        + closing + "{% endfor %}"
    )  # fmt: skip
    form = render_prompt(template(turn), Conversation([USER]), {}).form
    assert form.calls is None
    parser = AnswerParser(form, REQUESTED)
    assert parser.push("I used [[call sign", is_last=True).content == "I used [[call sign"


def test_special_tokens_of_a_form_are_few_and_short() -> None:
    form = AnswerForm(reasoning=("<think>", "</think>"))
    tokens = {number: "<think>"[: 1 + number % 7] for number in range(1000)}
    assert len(form.with_special(tokens).special) == 64
    by_template = AnswerForm(response_prefix="")
    tokens = {number: "x" * number for number in range(2000)}
    assert set(by_template.with_special(tokens).special) == set(range(1, 129))
