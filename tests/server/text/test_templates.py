"""Chat templates of tenants: rendered, refused, killed; the worker goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.errors import InvalidRequest
from server.text.templates import TemplateWorker

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    worker = TemplateWorker(render_s=2.0)
    yield worker
    worker.close()


def test_a_template_renders_messages_and_the_assistants_opening(worker: TemplateWorker) -> None:
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = "{{ bos }}" + turns + "{% if add_generation_prompt %}>{% endif %}"
    assert worker.render(template, MESSAGES, {"bos": "^"}) == "^[user]hi>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[7].role.x }}",
        "{% for",
        "{{ raise_exception('no system turns') }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
    ],
)
def test_a_template_that_fails_is_one_bad_request(worker: TemplateWorker, template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        worker.render(template, MESSAGES, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_cannot_reach_python(worker: TemplateWorker, template: str) -> None:
    with pytest.raises(InvalidRequest):
        worker.render(template, MESSAGES, {})


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "not done after"),
        ("{{ 'x' * 4000000000 }}", "refuses|too much memory"),
    ],
)
def test_a_template_that_eats_time_or_memory_is_stopped_and_the_next_one_renders(
    worker: TemplateWorker, template: str, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        worker.render(template, MESSAGES, {})
    assert worker.render("{{ messages[0].content }}", MESSAGES, {}) == "hi"


def test_a_template_that_makes_too_much_text_is_refused(worker: TemplateWorker) -> None:
    with pytest.raises(InvalidRequest, match="characters"):
        worker.render("{{ 'x' * 9000000 }}", MESSAGES, {})
