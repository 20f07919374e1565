"""Outputs of a call whose model may call tools: moves the calls out of the text, as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from server.api.outputs.request_events import RequestEvents
from server.api.outputs.text_outputs import SequenceEnd, TextOutputs, TextToken
from server.grammar.requested import Requested
from server.grammar.response_parsing import FreeAnswer, parsed
from server.grammar.tool_calls import CallDelta, CallSplitter, ParsedAnswer, may_be_calls, parse_plain
from server.protocol.request import Request
from server.text.variant_text import VariantText


@dataclass(slots=True)
class _GrowingAnswer:
    """One answer as it grows, and the parts of it that were returned."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    shown: ParsedAnswer = field(default_factory=lambda: ParsedAnswer(""))

    def new_in(self, found: ParsedAnswer) -> tuple[str, str, tuple[CallDelta, ...]]:
        """Return the content, the reasoning and the calls that were not returned yet."""
        calls = [
            CallDelta(index, call.name, call.arguments)
            for index, call in enumerate(found.calls)
            if index >= len(self.shown.calls)
        ]
        content = found.content.removeprefix(self.shown.content)
        reasoning = found.reasoning.removeprefix(self.shown.reasoning)
        self.shown = found
        return content, reasoning, tuple(calls)


class ToolOutputs(TextOutputs):
    """Outputs whose text has no calls of tools; these are in `calls`.

    Args:
        as_it_comes: parts of free answers are returned as soon as they are known, not at their end.
    """

    def __init__(
        self,
        events: RequestEvents,
        requests: Sequence[Request],
        text: VariantText,
        requested: Requested,
        as_it_comes: bool,
    ) -> None:
        super().__init__(events, requests, text)
        self._requested = requested
        self._as_it_comes = as_it_comes
        # Until the variant's response template was asked for.
        self._may_have_template = True
        indices = range(requests[0].sampling_params.n * len(requests))
        self._splitters = {index: CallSplitter(requested.called) for index in indices}
        self._free = {index: _GrowingAnswer() for index in indices}

    async def take(self) -> list[TextToken | SequenceEnd]:
        outputs = await super().take()
        if self._requested.form == "free":
            return await self._parsed(outputs)
        return [
            replace(output, text="", calls=tuple(self._splitters[output.index].push(output.text)))
            for output in outputs
        ]

    async def _parsed(self, outputs: list[TextToken | SequenceEnd]) -> list[TextToken | SequenceEnd]:
        """Return outputs without text, but for the last one of each sequence, which has all that is new in it."""
        # The last output of a sequence counts.
        positions: dict[int, int] = {}
        for position, output in enumerate(outputs):
            free = self._free[output.index]
            free.text += output.text
            if isinstance(output, TextToken) and output.token_id not in self._stop_token_ids:
                free.token_ids.append(output.token_id)
            if self._as_it_comes or isinstance(output, SequenceEnd):
                positions[output.index] = position
        wholes = {index: isinstance(outputs[position], SequenceEnd) for index, position in positions.items()}
        bare: list[TextToken | SequenceEnd] = [replace(output, text="") for output in outputs]
        for index, found in zip(wholes, await self._found(wholes), strict=True):
            content, reasoning, calls = self._free[index].new_in(found)
            bare[positions[index]] = replace(
                bare[positions[index]], text=content, reasoning=reasoning, calls=calls
            )
        return bare

    async def _found(self, wholes: dict[int, bool]) -> list[ParsedAnswer]:
        """Parse the answers with these numbers, as far as they go."""
        if self._may_have_template and wholes:
            answers = [self._answer(index, is_whole) for index, is_whole in wholes.items()]
            found = await parsed(self._text, answers, self._requested.tools)
            if found is not None:
                return found
            self._may_have_template = False
        return [self._plain(self._free[index].text, is_whole) for index, is_whole in wholes.items()]

    def _answer(self, index: int, is_whole: bool) -> FreeAnswer:
        free, request = self._free[index], self._requests[index // self._n]
        return FreeAnswer(request.prompt_ids, tuple(free.token_ids), free.text, is_whole)

    def _plain(self, text: str, is_whole: bool) -> ParsedAnswer:
        if is_whole:
            return parse_plain(text, self._requested.names)
        return ParsedAnswer("" if may_be_calls(text) else text)
