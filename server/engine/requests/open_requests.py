"""Admitted requests until they are answered: how their sequences start and end, and what each gives back.

Engine thread only. Knows no model, no logits and no step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.deltas.residency import Residency
from server.engine.requests.failing_alone import FailingAlone
from server.engine.requests.request_state import RequestState, SequenceOutput
from server.engine.requests.waiting_requests import WaitingRequests
from server.engine.sampling.held_logits import HeldLogits
from server.engine.scheduling.scheduler import Scheduler
from server.engine.telemetry import Telemetry
from server.protocol.events import DoneEvent, ErrorEvent, FinishEvent, FinishReason


class OpenRequests:
    """The admitted requests by their ids.

    A request that ends gives back its sequences' pages, its reference on the delta and its logits, then sends its last
    event.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        residency: Residency,
        telemetry: Telemetry,
        waiting: WaitingRequests,
        held: HeldLogits,
    ) -> None:
        self._scheduler = scheduler
        self._residency = residency
        self._telemetry = telemetry
        self._waiting = waiting
        self._held = held
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def find(self, request_id: str) -> RequestState | None:
        """Return a request; None if it has ended or never was."""
        return self._states.get(request_id)

    def find_output(self, request_id: str, index: int) -> tuple[RequestState, SequenceOutput] | None:
        """Return a request and one of its unfinished sequences; None if there is no such sequence."""
        state = self._states.get(request_id)
        output = None if state is None else state.outputs.get(index)
        return None if state is None or output is None else (state, output)

    def of_digest(self, digest: str) -> list[RequestState]:
        """Return the requests for one delta."""
        return [state for state in self._states.values() if state.request.digest == digest]

    def versions_in_use(self) -> Iterator[VersionRecord]:
        """Yield the version of each request that has one, as often as there are requests."""
        records = (state.request.record for state in self._states.values())
        return (record for record in records if record is not None)

    def add(self, state: RequestState) -> None:
        """Take a request and start its first sequence; the others start when its prompt is cached."""
        request = state.request
        self._states[request.id] = state
        self._waiting.add(state)
        self._telemetry.waits(request)
        self._telemetry.delta_lookup(request, state.lookup)
        if request.record is not None:
            self._residency.retain(request.record)
        with self.failing_alone(state):
            self.start_sequence(state)
            self.finish_if_exhausted(state, state.outputs[0])

    def start_sequence(self, state: RequestState) -> None:
        """Schedule the next of a request's sequences."""
        self._scheduler.add(state.start_sequence(), time.monotonic())

    def finish_sequence(self, state: RequestState, output: SequenceOutput, reason: FinishReason) -> None:
        """End a sequence, and its request behind the last one."""
        output.finish(reason)
        del state.outputs[output.sequence.index]
        self._held.forget(output)
        self._scheduler.remove(output.sequence)
        if not state.outputs:
            self._finish(state, reason)

    def finish_if_exhausted(self, state: RequestState, output: SequenceOutput) -> None:
        """End a sequence whose mask allows no token."""
        if output.is_exhausted:
            self.finish_sequence(state, output, "stop")

    def cancel(self, state: RequestState) -> None:
        """End a request whose client is gone."""
        request_id = state.request.id
        for output in list(state.outputs.values()):
            # Ending a sequence may fail and with it the request.
            if request_id not in self._states:
                return
            with self.failing_alone(state):
                self.finish_sequence(state, output, "cancelled")
        # Still there if none of its sequences had started.
        if request_id in self._states:
            self._finish(state, "cancelled")

    def fail(self, state: RequestState, error: PeraxisError) -> None:
        """End a request with an error; nothing reuses the pages that it has filled."""
        now = time.monotonic()
        self._telemetry.finished(state.request, "error", now - state.submitted_at)
        for output in state.outputs.values():
            self._scheduler.kv_cache.discard(output.sequence)
        self._release(state)
        state.on_event(ErrorEvent(error))

    def fail_all(self, error: PeraxisError) -> None:
        """End every request with an error."""
        for state in list(self._states.values()):
            self.fail(state, error)

    def failing_alone(self, state: RequestState) -> FailingAlone:
        """Return a context manager: any error in its block fails this request alone."""
        return FailingAlone(state, self.fail)

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        for index in range(state.num_started, state.request.sampling_params.n):
            state.on_event(FinishEvent(index, reason))
        timings = state.timings(time.monotonic())
        self._telemetry.finished(state.request, reason, timings.total_s)
        self._release(state)
        state.on_event(DoneEvent(timings))

    def _release(self, state: RequestState) -> None:
        """Give back everything that a request holds, before its last event."""
        for output in state.outputs.values():
            self._held.forget(output)
            self._scheduler.remove(output.sequence)
        state.outputs = {}
        del self._states[state.request.id]
        if state.request.digest is not None:
            self._residency.forget(state.request.digest)
        self._telemetry.ended(state.request, has_run=state.started_at is not None)
        if state.started_at is None:
            self._waiting.remove(state)
