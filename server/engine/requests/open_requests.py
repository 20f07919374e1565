"""Admitted requests until they are answered: how their sequences start and end, and what each gives back.

Engine thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.deltas.residency import Residency
from server.engine.requests.request_state import RequestState, SequenceOutput
from server.engine.requests.waiting_requests import WaitingRequests
from server.engine.sampling.held_logits import HeldLogits
from server.engine.scheduling.scheduler import Scheduler
from server.engine.sequence import Sequence
from server.engine.telemetry import Telemetry
from server.errors import EngineFailed, QueueFull
from server.protocol.events import DoneEvent, ErrorEvent, FinishEvent, FinishReason

log = logging.getLogger(__name__)


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
        # By tenant, then request id; the newest request is the last.
        self._by_tenant: dict[str, dict[str, RequestState]] = {}

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

    def of_version(self, version: str) -> list[RequestState]:
        """Return the requests for one delta."""
        return [state for state in self._states.values() if state.request.version == version]

    def versions_in_use(self) -> Iterator[VersionRecord]:
        """Yield the version of each request that has one, as often as there are requests."""
        records = (state.request.record for state in self._states.values())
        return (record for record in records if record is not None)

    def add(self, state: RequestState) -> None:
        """Take a request and start its first sequence; `start_next` starts the others."""
        request = state.request
        self._states[request.id] = state
        self._by_tenant.setdefault(request.tenant, {})[request.id] = state
        self._waiting.add(state)
        self._telemetry.waits(request)
        self._telemetry.delta_lookup(request, state.lookup)
        if request.record is not None:
            self._residency.retain(request.record)
        with self.failing_alone(state):
            self._start_sequence(state)
            self.finish_if_exhausted(state, state.outputs[0])

    def make_room(self, tenant: str) -> bool:
        """End a request without a token for a new one of a tenant that has fewer; False if there is none.

        It is the newest of the tenant with the most requests. The new one counts for its own tenant, so that two
        tenants never end each other's requests in turn.
        """
        num_own = len(self._by_tenant.get(tenant, ())) + 1
        larger = [states for states in self._by_tenant.values() if len(states) > num_own]
        for states in sorted(larger, key=len, reverse=True):
            for state in reversed(states.values()):
                if state.first_token_at is None:
                    error = overloaded()
                    self._telemetry.rejected(state.request, error)
                    self._discard(state, error)
                    return True
        return False

    def start_next(self, state: RequestState, sequence: Sequence) -> None:
        """Schedule the request's next sequence, if `sequence` was started last and has a row of the batch or ended.

        So one sequence of a request at most has never run, whatever its `n`. None starts before the first token,
        because the prompt is cached then.
        """
        if state.unstarted and sequence.index == state.last_started and state.first_token_at is not None:
            self._start_sequence(state)

    def admitted(self, sequence: Sequence) -> None:
        """Note that a sequence has got a row of the batch: the next one of its request may wait for another."""
        if (state := self._states.get(sequence.request_id)) is not None:
            with self.failing_alone(state):
                self.start_next(state, sequence)

    def stop_sequence(self, state: RequestState, index: int) -> None:
        """End a sequence as the client asks, also before it has started."""
        if (output := state.outputs.get(index)) is not None:
            self.finish_sequence(state, output, "stop")
        elif index in state.unstarted:
            state.unstarted.remove(index)
            state.on_event(FinishEvent(index, "stop"))

    def finish_sequence(self, state: RequestState, output: SequenceOutput, reason: FinishReason) -> None:
        """End a sequence, and its request behind the last one."""
        output.finish(reason)
        del state.outputs[output.sequence.index]
        self._held.forget(output)
        self._scheduler.remove(output.sequence)
        self.start_next(state, output.sequence)
        if not state.outputs:
            self._finish(state, reason)

    def finish_if_exhausted(self, state: RequestState, output: SequenceOutput) -> None:
        """End a sequence whose mask allows no token."""
        if output.is_exhausted:
            self.finish_sequence(state, output, "stop")

    def cancel(self, state: RequestState) -> None:
        """End a request whose client is gone."""
        request_id = state.request.id
        self._finish_unstarted(state, "cancelled")
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
        """End a request with an error."""
        now = time.monotonic()
        self._telemetry.finished(state.request, "error", now - state.submitted_at)
        self._discard(state, error)

    def fail_all(self, error: PeraxisError) -> None:
        """End every request with an error."""
        for state in list(self._states.values()):
            self.fail(state, error)

    @contextmanager
    def failing_alone(self, state: RequestState) -> Iterator[None]:
        """Fail this request alone with any error of the block, which goes no further."""
        try:
            yield
        except PeraxisError as error:
            self.fail(state, error)
        except Exception as error:
            request = state.request
            log.exception("request %s failed", request.id, extra=request.log_fields)
            self.fail(state, step_failed(error))

    def _start_sequence(self, state: RequestState) -> None:
        sequence = state.start_sequence()
        self._scheduler.add(sequence, time.monotonic(), state.arrival)
        if state.arrival is None:
            state.arrival = sequence.arrival

    def _finish_unstarted(self, state: RequestState, reason: FinishReason) -> None:
        while state.unstarted:
            state.on_event(FinishEvent(state.unstarted.popleft(), reason))

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        self._finish_unstarted(state, reason)
        timings = state.timings(time.monotonic())
        self._telemetry.finished(state.request, reason, timings.total_s)
        self._release(state)
        state.on_event(DoneEvent(timings))

    def _discard(self, state: RequestState, error: PeraxisError) -> None:
        """Send an error as the last event; nothing reuses the pages that the request has filled."""
        for output in state.outputs.values():
            self._scheduler.kv_cache.discard(output.sequence)
        self._release(state)
        state.on_event(ErrorEvent(error))

    def _release(self, state: RequestState) -> None:
        """Give back everything that a request holds, before its last event."""
        for output in state.outputs.values():
            self._held.forget(output)
            self._scheduler.remove(output.sequence)
        state.outputs = {}
        del self._states[state.request.id]
        own = self._by_tenant[state.request.tenant]
        del own[state.request.id]
        if not own:
            del self._by_tenant[state.request.tenant]
        if state.request.version is not None:
            self._residency.forget(state.request.version)
        self._telemetry.ended(state.request, has_run=state.started_at is not None)
        if state.started_at is None:
            self._waiting.remove(state)


def overloaded() -> QueueFull:
    """Return the error of a request that is one too many."""
    return QueueFull("as many requests run or wait as the server takes: try again in a moment")


def step_failed(error: Exception) -> EngineFailed:
    """Return the error of a request whose step raised something else than a PeraxisError."""
    return EngineFailed(f"the step failed: {type(error).__name__}: {error}")
