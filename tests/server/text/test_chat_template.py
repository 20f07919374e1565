"""Chat templates render, fail as one bad request, and cannot reach Python."""

from __future__ import annotations

import pytest

from server.errors import InvalidRequest
from server.text.chat_template import Conversation, render

CONVERSATION = Conversation([{"role": "user", "content": "hi"}])


def test_a_template_renders_messages_and_the_assistants_opening() -> None:
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = "{{ bos }}" + turns + "{% if add_generation_prompt %}>{% endif %}"
    assert render(template, CONVERSATION, {"bos": "^"}) == "^[user]hi>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[7].role.x }}",
        "{% for",
        "{{ raise_exception('no system turns') }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'x' | no_such_filter }}",
        "{% include 'other' %}",
        "{{ strftime_now(5) }}",
        "{{ messages | tojson(indent='x' * 3, separators=1) }}",
        "{{ '%d' % 'x' }}",
        "{{ range(10 ** 30) | list }}",
    ],
)
def test_a_template_that_fails_is_one_bad_request(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses") as refused:
        render(template, CONVERSATION, {})
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_cannot_reach_python(template: str) -> None:
    with pytest.raises(InvalidRequest):
        render(template, CONVERSATION, {})


def test_a_template_that_makes_too_much_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="makes 9000000 characters"):
        render("{{ 'x' * 9000000 }}", CONVERSATION, {})


def test_a_special_token_cannot_take_the_place_of_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        render("{{ messages }}", CONVERSATION, {"add_generation_prompt": "x"})
