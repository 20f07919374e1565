"""Answers of models that think and call tools, token by token: streamed, whole, and cut at every token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_parsing import parse_response

from deltastore.registry.records import VersionRecord
from server.api import outputs as outputs_module
from server.api.outputs import AnswerOutputs, RequestEvents, SequenceEnd, TextToken
from server.errors import QueueFull
from server.fairness import FairBudget
from server.grammar.answer_parser import AnswerParser, CallDelta, ToolCall, joined
from server.grammar.grammar import Requested
from server.inline import LocalMetrics
from server.protocol.engine_client import EngineClient
from server.protocol.messages import DoneEvent, Event, FinishEvent, FinishReason, Timings, TokenEvent
from server.protocol.request import Request, SamplingParams, token_ids_of
from server.text.answer_form import RenderedChat
from server.text.chat_template import Conversation
from server.text.detokenizer import IncrementalDetokenizer
from server.text.service import TextService, VariantText
from server.workers.pool import WorkerPool
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_tokenizer
from tests.server.helpers.answer_templates import (
    REQUESTED,
    SPECIAL,
    TEMPLATES,
    TOOLS_JSON,
    USER,
    call,
    parsed,
    tokenizer_of,
    written,
)
from tests.server.helpers.texts import RESPONSE_TEMPLATE, Texts, files_of, make_texts
from tests.server.helpers.tokenizer_kinds import byte_level, llama, mistral

EOS = 257
RESPONSE = '<think>Sum.</think>Here <b>: <call>{"name": "add", "arguments": {"a": 1}}</call>'
DONE = DoneEvent(Timings(0.0, 0.0, False, 0.0, 0.0))


class GivenEvents(RequestEvents):
    """Events that come one by one, or all at once."""

    def __init__(self, events: list[Event], at_once: bool = False, num_bytes: int = 1 << 20) -> None:
        metrics = LocalMetrics(EngineClient("test")).frontend
        self.unsent = FairBudget(num_bytes, "bytes")
        super().__init__(EngineClient("test"), metrics, "request", "default", self.unsent)
        own = [(0, event) for event in events]
        self._given: Iterator[list[tuple[int, Event]]] = iter([own] if at_once else [[each] for each in own])
        self.stopped: list[tuple[int, int]] = []

    async def take(self) -> list[tuple[int, Event]]:
        return next(self._given)

    def stop_sequence(self, number: int, index: int) -> None:
        self.stopped.append((number, index))


def events_of(ids: list[int], reason: FinishReason) -> list[Event]:
    """Return the events of a sequence that ends for a reason; without one the stop string is to be found."""
    return [*(TokenEvent(0, token) for token in ids), FinishEvent(0, reason), DONE]


async def prompted(
    service: TextService, record: VersionRecord | None = None, requested: Requested = REQUESTED
) -> tuple[VariantText, RenderedChat]:
    """Return the text of a variant and a rendered prompt."""
    text = await service.of(record, "default")
    return text, await text.render_chat(Conversation([USER], tools=requested.tools), 4096)


async def outputs_of(
    prompt: tuple[VariantText, RenderedChat],
    ids: list[int],
    reason: FinishReason,
    requested: Requested = REQUESTED,
    stop: tuple[str, ...] = (),
    at_once: bool = False,
    end: int = EOS,
) -> list[TextToken | SequenceEnd]:
    """Return the outputs of one sequence.

    Args:
        end: the token that ends answers.
    """
    text, chat = prompt
    params = SamplingParams(stop_token_ids=frozenset([end]), stop=stop)
    request = Request("r", "default", None, None, token_ids_of(chat.ids), 100_000, params)
    events = GivenEvents(events_of(ids, reason), at_once)
    outputs = AnswerOutputs(events, [request], text, chat.form, requested, as_it_comes=not at_once)
    found: list[TextToken | SequenceEnd] = []
    while taken := await outputs.take():
        found.extend(taken)
    assert outputs.num_tokens == sum(isinstance(each, TextToken) for each in found)
    return found


async def held_by(
    prompt: tuple[VariantText, RenderedChat],
    ids: list[int],
    num_bytes: int = 1 << 20,
    as_it_comes: bool = True,
) -> list[int]:
    """Return the bytes that the budget counts after each output of one sequence, and after the call."""
    text, chat = prompt
    request = Request("r", "default", None, None, token_ids_of(chat.ids), 100_000, SamplingParams())
    events = GivenEvents(events_of(ids, "length"), num_bytes=num_bytes)
    outputs = AnswerOutputs(events, [request], text, chat.form, REQUESTED, as_it_comes)
    found = []
    while await outputs.take():
        found.append(events.unsent.held("default"))
    events.cancel()
    return [*found, events.unsent.held("default")]


def parts_of(outputs: list[TextToken | SequenceEnd]) -> tuple[str, str, tuple[ToolCall, ...]]:
    calls = joined(delta for output in outputs for delta in output.calls)
    text = "".join(output.text for output in outputs)
    return text, "".join(output.reasoning for output in outputs), calls


def loaded(kind: str, name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a kind whose special tokens are those of models with the template."""
    makers = {"byte level": byte_level, "llama": llama, "mistral": mistral}
    if kind in makers:
        return tokenizer_of(name, makers[kind]())
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL.get(name, ()))})
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def decoded(tokenizer: PreTrainedTokenizerFast, prompt: list[int], ids: list[int]) -> str:
    """Return what transformers' `decode` adds for an answer, with special tokens."""
    before, whole = (str(tokenizer.decode(each)) for each in (prompt, prompt + ids))
    assert whole.startswith(before)
    return whole[len(before) :]


MESSAGES: dict[str, dict[str, Any]] = {
    name: {
        "content": "Hi \U0001f642",
        "reasoning_content": "So \u6f22",
        "tool_calls": [call("add", {"number": 3})] * (1 if name in ("bare", "channels") else 2),
    }
    for name in TEMPLATES
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *itertools.product(("byte level", "llama"), sorted(TEMPLATES)),
        *itertools.product(("mistral",), ("list", "spaced", "named", "identified")),
    ],
)
def test_a_stream_and_a_whole_reply_have_the_same_parts_wherever_the_answer_is_cut(
    kind: str, name: str, tmp_path: Path
) -> None:
    texts = make_texts(tmp_path, loaded(kind, name))

    async def test(service: TextService, pool: WorkerPool) -> None:
        tokenizer = loaded(kind, name)
        answer = written(name, MESSAGES[name])
        ids = tokenizer.encode(answer, add_special_tokens=False)
        prompt, end = await prompted(service), tokenizer.eos_token_id
        for cut in range(len(ids) + 1):
            streamed = await outputs_of(prompt, ids[:cut], "length", end=end)
            whole = await outputs_of(prompt, ids[:cut], "length", at_once=True, end=end)
            assert parts_of(streamed) == parts_of(whole)
        expected = parsed(prompt[1].form, [decoded(tokenizer, prompt[1].ids, ids)])
        text, reasoning, calls = parts_of(streamed)
        assert calls == joined(expected.calls)
        assert [json.loads(each.arguments) for each in calls] == [{"number": 3}] * len(
            MESSAGES[name]["tool_calls"]
        )
        assert text.strip() == expected.content.strip()
        assert reasoning == expected.reasoning

    texts.run(test)


def test_sequences_that_wait_have_no_text_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has up to 128 of them, of which most wait for a row, and hundreds of requests may wait."""
    texts = make_texts(tmp_path, loaded("tiny", "json"))
    made = [Mock(wraps=IncrementalDetokenizer), Mock(wraps=AnswerParser)]
    monkeypatch.setattr(outputs_module, "IncrementalDetokenizer", made[0])
    monkeypatch.setattr(outputs_module, "AnswerParser", made[1])

    async def test(service: TextService, pool: WorkerPool) -> None:
        text, chat = await prompted(service)
        request = Request("r", "default", None, None, token_ids_of(chat.ids), 1000, SamplingParams(n=128))
        begun: list[Event] = [
            TokenEvent(5, 97),
            TokenEvent(90, 97),
            FinishEvent(5, "length"),
            FinishEvent(90, "length"),
        ]
        outputs = AnswerOutputs(GivenEvents([*begun, DONE]), [request], text, chat.form, REQUESTED, True)
        assert [each.call_count for each in made] == [0, 0]
        while await outputs.take():
            pass
        assert [each.call_count for each in made] == [2, 2]

    texts.run(test)


@pytest.mark.parametrize("name", ["json", "named"])
def test_a_stop_string_inside_a_call_leaves_what_was_finished(name: str, tmp_path: Path) -> None:
    texts = make_texts(tmp_path, loaded("tiny", name))
    first = written(name, {"content": "", "tool_calls": [call("now", {})]})
    second = written(name, {"content": "", "tool_calls": [call("add", {"text": "enough"})]})

    async def test(service: TextService, pool: WorkerPool) -> None:
        ids = loaded("tiny", name).encode(first + second)
        for at_once in (False, True):
            outputs = await outputs_of(
                await prompted(service), ids, "stop", stop=("enough",), at_once=at_once
            )
            text, _, calls = parts_of(outputs)
            assert calls == (ToolCall("now", "{}"),)
            assert text.strip() == second.partition("enough")[0].strip()

    texts.run(test)


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["a", "<tool_call>", "b"], ("<tool_call>",), ("a", "", ())),
        (["<think>", "w", "a", "</think>", "e"], ("a</think>b",), ("e", "wa", ())),
        (["<think>", "w", "a", "</think>", "b", "e"], ("a</think>b",), ("", "w", ())),
        (["<think>", "w\U0001f642", "</think>", "e"], (), ("e", "w\U0001f642", ())),
    ],
)
def test_special_tokens_of_the_markup_stand_between_the_texts_beside_them(
    pieces: list[str], stop: tuple[str, ...], expected: tuple[str, str, tuple[ToolCall, ...]], tmp_path: Path
) -> None:
    tokenizer = loaded("tiny", "json")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<tool_call>"]})
    texts = make_texts(tmp_path, tokenizer)

    async def test(service: TextService, pool: WorkerPool) -> None:
        ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
        for at_once in (False, True):
            outputs = await outputs_of(await prompted(service), ids, "stop", stop=stop, at_once=at_once)
            assert parts_of(outputs) == expected

    texts.run(test)


def test_with_one_call_at_most_the_sequence_ends_behind_it(tmp_path: Path) -> None:
    texts = make_texts(tmp_path, loaded("tiny", "json"))
    answer = written("json", {"content": "Hi", "tool_calls": [call("now", {}), call("add", {})]})
    single = Requested(None, TOOLS_JSON, REQUESTED.names, is_single=True)

    async def test(service: TextService, pool: WorkerPool) -> None:
        ids = loaded("tiny", "json").encode(answer)
        prompt = await prompted(service)
        for at_once in (False, True):
            outputs = await outputs_of(prompt, ids, "length", single, at_once=at_once)
            assert parts_of(outputs) == ("Hi", "", (ToolCall("now", "{}"),))
            assert [each.reason for each in outputs if isinstance(each, SequenceEnd)] == ["stop"]

    texts.run(test)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts"))


def by_template(
    texts: Texts,
    directory: Path,
    template: dict[str, Any] | None,
    answer: str,
    at_once: bool,
    reason: FinishReason = "stop",
    stop: tuple[str, ...] = (),
) -> list[TextToken | SequenceEnd]:
    """Return the outputs of a variant with a response template, without a stop token where a stop string ends them."""
    files = files_of(make_tokenizer(1, CHAT_TEMPLATE), directory)
    config = {**json.loads(files["tokenizer_config.json"]), "response_template": template}
    record = texts.publish({**files, "tokenizer_config.json": json.dumps(config).encode()})
    found: list[TextToken | SequenceEnd] = []

    async def test(service: TextService, pool: WorkerPool) -> None:
        ids = make_tokenizer(1).encode(answer)
        if reason == "stop" and not stop:
            ids.append(EOS)
        prompt = await prompted(service, record)
        found.extend(await outputs_of(prompt, ids, reason, stop=stop, at_once=at_once))

    texts.run(test)
    return found


@pytest.mark.parametrize("at_once", [False, True])
def test_an_answer_is_split_by_a_response_template(at_once: bool, texts: Texts, tmp_path: Path) -> None:
    outputs = by_template(texts, tmp_path, RESPONSE_TEMPLATE, RESPONSE, at_once)
    assert parts_of(outputs) == ("Here <b>:", "Sum.", (ToolCall("add", '{"a": 1}'),))
    assert sum(isinstance(output, SequenceEnd) for output in outputs) == 1


@pytest.mark.parametrize(
    "answer", [RESPONSE, RESPONSE + '<call>{"name": "a', "<think>So", "A <call>no</call> b"]
)
def test_by_a_response_template_a_stream_has_the_parts_of_the_whole(
    answer: str, texts: Texts, tmp_path: Path
) -> None:
    streamed, whole = (
        by_template(texts, tmp_path, RESPONSE_TEMPLATE, answer, at_once) for at_once in (False, True)
    )
    assert parts_of(streamed) == parts_of(whole)


NAMED_CALLS: dict[str, Any] = {
    "start_anchor": "[/INST]",
    "fields": {
        "reasoning_content": {"open": "[THINK]", "close": "[/THINK]"},
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[a-z]+)\[ARGS\]", "close_pattern": r"(?=\[TOOL_CALLS\])|$",
            "repeats": True, "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}  # fmt: skip


def test_a_response_template_finds_what_transformers_finds_between_special_tokens(tmp_path: Path) -> None:
    tokenizer = loaded("mistral", "named")
    tokenizer.response_template = NAMED_CALLS
    texts, end = make_texts(tmp_path, tokenizer), tokenizer.eos_token_id

    async def test(service: TextService, pool: WorkerPool) -> None:
        ids = tokenizer.encode(written("named", MESSAGES["named"]), add_special_tokens=False)
        prompt = await prompted(service)
        theirs = parse_response(decoded(tokenizer, prompt[1].ids, ids), NAMED_CALLS, prefix="")
        for cut in range(len(ids), 0, -16):
            streamed, whole = [
                parts_of(await outputs_of(prompt, ids[:cut], "length", at_once=at_once, end=end))
                for at_once in (False, True)
            ]
            assert streamed == whole
        for at_once in (False, True):
            text, reasoning, calls = parts_of(
                await outputs_of(prompt, [*ids, end], "stop", at_once=at_once, end=end)
            )
            assert (text, reasoning) == (theirs["content"], theirs["reasoning_content"])
            assert [(each.name, json.loads(each.arguments)) for each in calls] == [
                (each["function"]["name"], each["function"]["arguments"]) for each in theirs["tool_calls"]
            ]

    texts.run(test)


@pytest.mark.parametrize("answer", ["Hello <cite>{bad</cite> there", "<think>t</think>Hello <cite>{bad"])
def test_a_region_that_cannot_be_read_is_streamed_once(answer: str, texts: Texts, tmp_path: Path) -> None:
    cite = {"open": "<cite>", "close": "</cite>", "content": "json"}
    template = {**RESPONSE_TEMPLATE, "fields": {**RESPONSE_TEMPLATE["fields"], "cite": cite}}
    streamed, whole = (
        parts_of(by_template(texts, tmp_path, template, answer, at_once)) for at_once in (False, True)
    )
    assert streamed == whole
    thought, _, content = answer.rpartition("</think>")
    assert whole == (content, thought.removeprefix("<think>"), ())


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("reason", "stop", "is_call"), [("length", (), False), ("stop", ("END",), False), ("stop", (), True)]
)
def test_a_call_without_closing_is_one_where_a_token_ended_the_answer(
    reason: FinishReason, stop: tuple[str, ...], is_call: bool, at_once: bool, texts: Texts, tmp_path: Path
) -> None:
    calls = {key: value for key, value in RESPONSE_TEMPLATE["fields"]["tool_calls"].items() if key != "close"}
    template = {**RESPONSE_TEMPLATE, "fields": {"tool_calls": calls, "content": {}}}
    written_call = '<call>{"name": "add", "arguments": {"a": 1}}'
    answer = written_call + "".join(stop)
    found = parts_of(by_template(texts, tmp_path, template, answer, at_once, reason, stop))
    assert found == (("", "", (ToolCall("add", '{"a": 1}'),)) if is_call else (written_call, "", ()))


@pytest.mark.parametrize("as_it_comes", [False, True])
def test_the_text_that_a_response_template_parses_is_counted_until_the_call_ends(
    as_it_comes: bool, texts: Texts, tmp_path: Path
) -> None:
    files = files_of(make_tokenizer(1, CHAT_TEMPLATE), tmp_path)
    config = {**json.loads(files["tokenizer_config.json"]), "response_template": RESPONSE_TEMPLATE}
    record = texts.publish({**files, "tokenizer_config.json": json.dumps(config).encode()})
    ids = make_tokenizer(1).encode(RESPONSE)

    async def test(service: TextService, pool: WorkerPool) -> None:
        prompt = await prompted(service, record)
        *held, last = await held_by(prompt, ids, as_it_comes=as_it_comes)
        assert held == sorted(held)
        assert held[-1] > 2 * len(RESPONSE)
        assert last == 0
        with pytest.raises(QueueFull):
            await held_by(prompt, ids, num_bytes=held[-1], as_it_comes=as_it_comes)

    texts.run(test)


def test_the_text_of_a_call_is_counted_until_it_is_sent(tmp_path: Path) -> None:
    texts = make_texts(tmp_path, loaded("tiny", "json"))
    answer = written("json", {"content": "Hi", "tool_calls": [call("add", {"text": "long " * 20})]})
    ids = loaded("tiny", "json").encode(answer + " more")

    async def test(service: TextService, pool: WorkerPool) -> None:
        prompt = await prompted(service)
        held = await held_by(prompt, ids)
        assert held[0] == held[-1] == held[-len(" more")] == 0
        assert max(held) > len("long " * 20)
        with pytest.raises(QueueFull):
            await held_by(prompt, ids, num_bytes=max(held))

    texts.run(test)


def test_a_stream_shows_parts_before_the_answer_has_ended(texts: Texts, tmp_path: Path) -> None:
    outputs = by_template(texts, tmp_path, RESPONSE_TEMPLATE, RESPONSE, at_once=False)
    with_text = [position for position, output in enumerate(outputs) if output.text]
    assert with_text[0] < RESPONSE.index("<call>") < with_text[0] + len(outputs) // 2
    assert len(with_text) > 1


@pytest.mark.parametrize("answer", ["Hello there.", '{"name": "unknown"}'])
def test_where_a_template_shows_no_calls_text_that_is_no_call_is_content(
    answer: str, texts: Texts, tmp_path: Path
) -> None:
    outputs = by_template(texts, tmp_path, None, answer, at_once=False)
    assert "".join(output.text for output in outputs) == answer
    assert not any(output.calls for output in outputs)
    # Text that begins as a call does is held back until its end.
    assert bool(outputs[0].text) == (answer[0] != "{")


def test_where_a_template_shows_no_calls_a_call_is_json(texts: Texts, tmp_path: Path) -> None:
    outputs = by_template(texts, tmp_path, None, '{"name": "add", "arguments": {"a": 1}}', at_once=False)
    assert [delta for output in outputs for delta in output.calls] == [CallDelta(0, "add", '{"a": 1}')]
    assert not any(output.text for output in outputs)
