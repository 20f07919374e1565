"""Free answers of a variant with a response template: what a stream shows of them, and when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.api.outputs import RequestEvents, SequenceEnd, TextToken, ToolOutputs
from server.fairness import FairBudget
from server.grammar.grammar import Requested
from server.grammar.tool_calls import CallDelta, DecodedAnswer, FreeAnswer, ParsedAnswer, parsed
from server.inline import LocalMetrics
from server.protocol.engine_client import EngineClient
from server.protocol.messages import DoneEvent, Event, FinishEvent, Timings, TokenEvent
from server.protocol.request import Request, SamplingParams, token_ids_of
from server.text.service import TextService, VariantText
from server.workers.pool import WorkerPool
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_tokenizer
from tests.server.helpers.texts import RESPONSE_TEMPLATE, Texts, files_of, make_texts

EOS = 257
PROMPT = "<user>hi\n<assistant>"
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
ANSWER = '<think>Sum.</think>Here <b>: <call>{"name": "add", "arguments": {"a": 1}}</call>'


class GivenEvents(RequestEvents):
    """Events that come one by one."""

    def __init__(self, events: list[Event]) -> None:
        metrics = LocalMetrics(EngineClient("test")).frontend
        super().__init__(EngineClient("test"), metrics, "request", "default", FairBudget(1 << 20, "bytes"))
        self._given: Iterator[Event] = iter(events)

    async def take(self) -> list[tuple[int, Event]]:
        return [(0, next(self._given))]


def outputs_of(
    texts: Texts, directory: Path, template: dict[str, Any] | None, answer: str, as_it_comes: bool
) -> list[TextToken | SequenceEnd]:
    """Return the outputs of one sequence with the text `answer`."""
    files = files_of(make_tokenizer(1, CHAT_TEMPLATE), directory)
    config = {**json.loads(files["tokenizer_config.json"]), "response_template": template}
    record = texts.publish({**files, "tokenizer_config.json": json.dumps(config).encode()})
    found: list[TextToken | SequenceEnd] = []

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        prompt, ids = [await text.encode(part, 512) for part in (PROMPT, answer)]
        params = SamplingParams(stop_token_ids=frozenset([EOS]))
        request = Request("r", "default", None, None, token_ids_of(prompt), 300, params)
        tokens: list[Event] = [TokenEvent(0, token) for token in (*ids, EOS)]
        done = DoneEvent(Timings(0.0, 0.0, False, 0.0, 0.0))
        events = GivenEvents([*tokens, FinishEvent(0, "stop"), done])
        requested = Requested(None, json.dumps(TOOLS).encode(), frozenset(["add"]))
        outputs = ToolOutputs(events, [request], text, requested, as_it_comes)
        while taken := await outputs.take():
            found.extend(taken)

    texts.run(test)
    return found


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts"))


@pytest.mark.parametrize("as_it_comes", [True, False])
def test_an_answer_is_split_into_thoughts_content_and_calls(
    as_it_comes: bool, texts: Texts, tmp_path: Path
) -> None:
    outputs = outputs_of(texts, tmp_path, RESPONSE_TEMPLATE, ANSWER, as_it_comes)
    assert "".join(output.text for output in outputs) == "Here <b>:"
    assert "".join(output.reasoning for output in outputs) == "Sum."
    calls = [call for output in outputs for call in output.calls]
    assert calls == [CallDelta(0, "add", '{"a": 1}')]
    assert sum(isinstance(output, SequenceEnd) for output in outputs) == 1


def test_a_stream_shows_parts_before_the_answer_has_ended(texts: Texts, tmp_path: Path) -> None:
    outputs = outputs_of(texts, tmp_path, RESPONSE_TEMPLATE, ANSWER, as_it_comes=True)
    with_text = [position for position, output in enumerate(outputs) if output.text]
    assert with_text[0] < ANSWER.index("<call>") < with_text[0] + len(outputs) // 2
    assert len(with_text) > 1


def test_each_token_of_a_stream_is_decoded_once(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[FreeAnswer] = []

    async def recorded(
        text: VariantText, answers: list[FreeAnswer], tools: bytes
    ) -> list[tuple[ParsedAnswer, DecodedAnswer]] | None:
        sent.extend(answers)
        return await parsed(text, answers, tools)

    monkeypatch.setattr("server.api.outputs.parsed", recorded)
    outputs_of(texts, tmp_path, RESPONSE_TEMPLATE, ANSWER, as_it_comes=True)
    assert [isinstance(answer.prompt, DecodedAnswer) for answer in sent] == [False, *[True] * (len(sent) - 1)]
    assert max(len(answer.new_ids) for answer in sent) == 1
    decoded = sent[-1].prompt
    assert isinstance(decoded, DecodedAnswer)
    assert decoded.text == ANSWER


@pytest.mark.parametrize("answer", ["Hello there.", '{"name": "unknown"}'])
def test_without_a_response_template_text_that_is_no_call_is_content(
    answer: str, texts: Texts, tmp_path: Path
) -> None:
    outputs = outputs_of(texts, tmp_path, None, answer, as_it_comes=True)
    assert "".join(output.text for output in outputs) == answer
    assert not any(output.calls for output in outputs)
    # Text that begins as a call does is held back until its end.
    assert bool(outputs[0].text) == (answer[0] != "{")


def test_without_a_response_template_a_call_is_json(texts: Texts, tmp_path: Path) -> None:
    outputs = outputs_of(texts, tmp_path, None, '{"name": "add", "arguments": {"a": 1}}', as_it_comes=True)
    assert outputs[-1].calls == (CallDelta(0, "add", '{"a": 1}'),)
    assert not any(output.text for output in outputs)
