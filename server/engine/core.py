"""The engine's step: take requests in, schedule, run the model, sample, send tokens out; and the requests under way.

Called by the engine thread alone; nothing here blocks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.deltas.residency import Residency, ResidencyCalls, load_timeout
from server.deltas.resident import ResidentDelta
from server.engine.model_runner import Batch, ModelRunner, ScheduledSequence
from server.engine.request_state import (
    HeldLogits,
    OnEvent,
    RequestState,
    SequenceOutput,
    Trial,
    WaitingRequests,
    check_first_mask,
    mask_timeout,
    masked,
)
from server.engine.sampler import SampledToken, divided, sample, score
from server.engine.scheduler import Scheduler, StepPlan
from server.engine.sequence import Sequence
from server.errors import ContextTooLong, EngineFailed, InvalidRequest, QueueFull
from server.fairness import FairBudget
from server.metrics.metrics import Telemetry
from server.protocol.messages import (
    DoneEvent,
    ErrorEvent,
    FinishEvent,
    FinishReason,
    Level,
    Mask,
    Progress,
)
from server.protocol.request import Request, max_model_len_of
from server.protocol.step_page import Step, StepPage, StepRequest, Suspect

log = logging.getLogger(__name__)


class OpenRequests:
    """The admitted requests by their ids.

    A request that ends gives back its place, its sequences' pages, its reference on the delta and its logits, then
    sends its last event.
    """

    def __init__(
        self,
        limits: RequestLimits,
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
        self._limits = limits
        # One more than there are, which stays free: the last place is granted, too, to a tenant without a request.
        self._places = FairBudget(limits.max_open + 1, "open requests")
        self.num_finished = 0

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: object) -> bool:
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
        """Take a request, which `start` starts."""
        request = state.request
        self._states[request.id] = state
        self._places.retake(request.tenant, 1)
        self._waiting.add(state)
        self._telemetry.waits(request)
        if state.progress is None:
            self._telemetry.delta_lookup(request, state.lookup)
        if request.record is not None:
            self._residency.retain(request.record)

    def start(self, state: RequestState) -> None:
        """Start a request's first sequence, or let one that has paused go on; `start_next` starts the others."""
        state.is_out = False
        state.asked_at = time.monotonic()
        with self.failing_alone(state):
            if state.outputs:
                for output in state.outputs.values():
                    self._scheduler.go_on(output.sequence, state.asked_at)
            elif state.unstarted:
                self._start_sequence(state)
            else:
                # Another engine has ended all its sequences.
                self._finish(state, "stop")

    def pause(self, state: RequestState) -> None:
        """Let a request wait outside all queues until `start`. It keeps its tokens and loses its pages."""
        state.is_out = True
        # Its delta is not wanted meanwhile.
        state.asked_at = math.inf
        for output in state.outputs.values():
            self._scheduler.remove(output.sequence)
            self.preempted(output)

    def preempted(self, output: SequenceOutput) -> None:
        """Forget what a sequence computes again, because it has lost its pages."""
        output.clear_prompt_logprobs()
        self._held.drop(output)

    def check_room(self, tenant: str) -> None:
        """Check that one more request of a tenant may be open.

        A tenant's part does not depend on how far its requests have come, because a client decides that: with a version
        for each request, all of them begin at once.

        Raises:
            QueueFull: all places are taken, or the tenant has as many as it leaves free.
        """
        if len(self) >= self._limits.max_open:
            raise QueueFull("as many requests run or wait as the server takes: try again in a moment")
        if self._limits.has_shares and not self._places.has(tenant, 1):
            raise QueueFull(
                "the tenant has as many requests that run or wait as it leaves free to others: try again in a moment"
            )

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
            if state.started_at is None:
                state.num_cached = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
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
        # The next one may have ended at once, and the request with it.
        if not state.outputs and state.request.id in self._states:
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
            state.arrival = sequence.arrival - sequence.index
        output = state.outputs[sequence.index]
        if (reason := output.end) is not None:
            # Another engine died between its last token and the news of its end.
            self.finish_sequence(state, output, reason)
            return
        if state.is_out:
            # The client has ended the sequence before it.
            self._scheduler.remove(sequence)
        self.finish_if_exhausted(state, output)

    def _finish_unstarted(self, state: RequestState, reason: FinishReason) -> None:
        while state.unstarted:
            state.on_event(FinishEvent(state.unstarted.popleft(), reason))

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        self._finish_unstarted(state, reason)
        self.num_finished += 1
        timings = state.timings(time.monotonic())
        self._telemetry.finished(state.request, reason, timings.total_s)
        self._release(state)
        state.on_event(DoneEvent(timings, state.num_cached))

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
        self._places.give_back(state.request.tenant, 1)
        if state.request.version is not None:
            self._residency.forget(state.request.version)
        self._telemetry.ended(state.request, has_run=state.started_at is not None)
        if state.started_at is None:
            self._waiting.remove(state)


def step_failed(error: Exception) -> EngineFailed:
    """Return the error of a request whose step raised something else than a PeraxisError."""
    return EngineFailed(f"the step failed: {type(error).__name__}: {error}")


T = TypeVar("T")


class EngineCore:
    """Admitted requests, and the step that advances them."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        residency: Residency,
        telemetry: Telemetry,
        limits: RequestLimits,
    ) -> None:
        self.limits = limits
        self.residency_calls = ResidencyCalls(residency, limits.load_timeout_s)
        self._runner = runner
        self._scheduler = scheduler
        self._kv_cache = scheduler.kv_cache
        self._residency = residency
        self._telemetry = telemetry
        self._waiting = WaitingRequests(residency, limits.load_timeout_s)
        self._held = HeldLogits(limits.mask_timeout_s)
        self._requests = OpenRequests(limits, scheduler, residency, telemetry, self._waiting, self._held)
        self._trial = Trial((), 0.0)
        self._page: StepPage | None = None
        # Spent on sampling since the step began.
        self._sampling_s = 0.0

    def supervise(self, page: StepPage, suspects: Iterable[Suspect]) -> None:
        """Note each step in a page, and first try the requests with which the engine before this one died."""
        self._page, self._trial = page, Trial(suspects, time.monotonic())

    def add_request(
        self,
        request: Request,
        on_event: OnEvent,
        submitted_at: float,
        first_mask: bytes | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Admit a request and schedule its first sequence; the others start as rows of the batch come free.

        Args:
            request: an ErrorEvent answers one that cannot be served, or that is one too many.
            on_event: called with each event, a DoneEvent or an ErrorEvent last; must not fail.
            submitted_at: when the client sent it, in seconds of `time.monotonic`.
            first_mask: of each of its sequences, if it is constrained.
            progress: what its client has of it from an engine before this one.
        """
        try:
            self._check(request, first_mask)
            # Another engine has admitted one with progress.
            if progress is None:
                self._requests.check_room(request.tenant)
        except PeraxisError as error:
            self._telemetry.rejected(request, error)
            on_event(ErrorEvent(error))
            return
        lookup: Level = "device" if request.version is None else self._residency.level_of(request.version)
        state = RequestState(request, on_event, lookup, submitted_at, first_mask, progress)
        self._requests.add(state)
        if not self._trial.hold(state) and not state.is_paused:
            self._requests.start(state)

    def cancel(self, request_id: str) -> None:
        """End a request whose client is gone; unknown ids are ignored."""
        if (state := self._requests.find(request_id)) is not None:
            self._requests.cancel(state)

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence as its client asks; unknown ids are ignored."""
        if (state := self._requests.find(request_id)) is not None:
            with self._requests.failing_alone(state):
                self._requests.stop_sequence(state, index)

    def set_paused(self, request_id: str, is_paused: bool) -> None:
        """Let a request whose events are not read wait outside all queues, or go on; unknown ids are ignored."""
        state = self._requests.find(request_id)
        if state is None or state.is_paused == is_paused:
            return
        state.is_paused = is_paused
        if self._trial.suspects:
            # They run or wait by their trial alone, until it is over.
            return
        if is_paused:
            self._requests.pause(state)
            for output in state.outputs.values():
                # Its client has the prompt computed again.
                output.sequence.num_charged_tokens = 0
        else:
            self._requests.start(state)

    def set_mask(self, mask: Mask) -> None:
        """Take a mask for a constrained sequence; unknown ids are ignored."""
        if (found := self._requests.find_output(mask.request_id, mask.index)) is not None:
            state, output = found
            with self._requests.failing_alone(state):
                output.set_mask(mask.position, mask.bits)
                self._requests.finish_if_exhausted(state, output)

    def versions_in_use(self) -> Iterator[VersionRecord]:
        """Yield the version of each admitted request that has one, as often as there are requests."""
        return self._requests.versions_in_use()

    def sample_masked(self) -> bool:
        """Sample the sequences whose masks have come since their logits were computed. Return whether there were any.

        Send the tokens before the next step, so that their clients compute the next masks while it runs.
        """
        ready = self._held.take_ready()
        for output in self._held.take_views():
            # Another sequence of its request may have failed just now.
            if (state := self._requests.find(output.sequence.request_id)) is not None:
                with self._requests.failing_alone(state):
                    self._held.keep_copy(output)
        self._sample_each([(held.output.sequence, held) for held in ready], masked)
        return bool(ready)

    def step(self) -> bool:
        """Make finished loads visible and run one step of the model. Return whether there was one to run."""
        now = time.monotonic()
        pausing, starting = self._trial.turn(now, self._requests)
        for held in pausing:
            self._requests.pause(held)
        for held in starting:
            self._requests.start(held)
        self._poll_loads(now)
        self._fail_late(now)
        plan = self._scheduler.plan(now, self._requests.admitted)
        # After scheduling, which references freshly loaded deltas so that unload cannot evict them.
        self.residency_calls.serve(now)
        for sequence in plan.preempted:
            # Its request may have failed while the step was planned.
            if (found := self._requests.find_output(sequence.request_id, sequence.index)) is not None:
                self._requests.preempted(found[1])
        for sequence in plan.too_long:
            state = self._requests.find(sequence.request_id)
            if state is not None:
                self._requests.fail(state, too_long(self._kv_cache.max_tokens))
        self._report(plan)
        if plan.batch:
            self._note_step(plan)
            self._execute(plan)
            if self._page is not None:
                self._page.end(self._requests.num_finished)
        return bool(plan.batch)

    def _note_step(self, plan: StepPlan) -> None:
        """Note in the page what a step is about to compute."""
        if self._page is None:
            return
        num_computed: dict[str, dict[int, int]] = {}
        for sequence, num_tokens in plan.batch.items():
            own = num_computed.setdefault(sequence.request_id, {})
            own[sequence.index] = sequence.num_computed_tokens + num_tokens
        found = ((self._requests.find(id_), own) for id_, own in num_computed.items())
        requests = tuple(
            StepRequest(state.request.id, state.request.tenant, state.request.version, own)
            for state, own in found
            if state is not None
        )
        self._page.begin(Step(requests, self._trial.suspects))

    def fail_all(self, error: PeraxisError) -> None:
        """Answer every request and call with an error: the engine stops."""
        self._requests.fail_all(error)
        self.residency_calls.fail_all(error)

    def _check(self, request: Request, first_mask: bytes | None) -> None:
        """Raise InvalidRequest or EngineFailed unless a request can be served."""
        limits = self.limits
        request.check(max_model_len_of(request.record, limits.max_model_len, limits.longest))
        if request.id in self._requests:
            raise InvalidRequest(f"request id {request.id!r} is in use: choose another")
        check_first_mask(request, first_mask)

    def _poll_loads(self, now: float) -> None:
        """Make loaded deltas visible; fail the requests and calls of those that could not be loaded."""
        for load in self._residency.poll_loads():
            version, error = load.version, load.error
            self._scheduler.load_ended(version, now)
            self._waiting.load_ended(version, now)
            if error is not None:
                for state in self._requests.of_version(version):
                    self._requests.fail(state, error)
                self.residency_calls.fail_prefetches(version, error)

    def _fail_late(self, now: float) -> None:
        """Fail requests whose delta was not loaded, or whose masks have not come, in time."""
        for state in self._waiting.late(now):
            assert state.request.record is not None
            self._requests.fail(state, load_timeout(state.request.record, self.limits.load_timeout_s))
        for output in self._held.late(now):
            # Another sequence of it may have been late, too.
            if (late := self._requests.find(output.sequence.request_id)) is not None:
                self._requests.fail(late, mask_timeout(self.limits.mask_timeout_s))

    def _report(self, plan: StepPlan) -> None:
        """Update the metrics of queues, KV cache and preemptions."""
        num_waiting = self._waiting.num_requests
        self._telemetry.queues(len(self._requests) - num_waiting, num_waiting, self._waiting.num_loading)
        self._telemetry.cache(self._kv_cache.usage, *self._kv_cache.take_prefix_counts())
        self._telemetry.preempted(len(plan.preempted))

    def _execute(self, plan: StepPlan) -> None:
        """Compute the planned tokens and send what comes of them."""
        began, self._sampling_s = time.monotonic(), 0.0
        batch = self._batch(plan)
        for item in batch:
            state = self._requests[item.sequence.request_id]
            if state.started_at is None:
                state.started_at = began
                self._waiting.remove(state)
                self._telemetry.runs(state.request)
        for computed, logits in self._forward(batch) if batch else ():
            self._advance(computed, logits)
        num_requests = len({item.sequence.request_id for item in batch})
        num_variants = len({item.sequence.version for item in batch if item.delta is not None})
        self._charge(plan, began, num_requests, num_variants)

    def _charge(self, plan: StepPlan, began: float, num_requests: int, num_variants: int) -> None:
        """Charge tenants for a step that is over, but for its sampling, and record it."""
        now = time.monotonic()
        seconds = self._scheduler.charge(plan, now, now - began - self._sampling_s)
        for tenant, own in seconds.items():
            self._telemetry.seconds(tenant, "step", own)
        self._telemetry.step(now - began, num_requests, num_variants)

    def charge_reading(self, tenant: str, seconds: float) -> None:
        """Charge a tenant for reading one of its messages and doing what it asks."""
        self._telemetry.seconds(tenant, "step", self._scheduler.charge_tenant(tenant, seconds))

    def _batch(self, plan: StepPlan) -> Batch:
        """Return the planned sequences with their deltas; those of one delta stand together, the base's first."""
        deltas: dict[str | None, ResidentDelta | None] = {None: None}
        batch: Batch = []
        for sequence, num_tokens in plan.batch.items():
            state, version = self._requests.find(sequence.request_id), sequence.version
            if state is None:
                continue
            if version is not None and version not in deltas:
                deltas[version] = self._residency.find(version)
            delta = deltas[version]
            if version is not None and delta is None:
                self._requests.fail(state, EngineFailed(f"{version} was scheduled and is not resident"))
            else:
                batch.append(ScheduledSequence(sequence, num_tokens, delta))
        batch.sort(key=lambda item: -1 if item.delta is None else item.delta.slot.index)
        return batch

    def _forward(self, batch: Batch) -> list[tuple[Batch, Tensor]]:
        """Return the batch and its logits; if that fails, run each sequence alone, so that a faulty one fails alone.

        Raises:
            Exception: the model's own, if the device does not work any more.
        """
        pages_to_zero = self._kv_cache.take_pages_to_zero()
        try:
            return [(batch, self._runner.forward(batch, pages_to_zero))]
        except Exception as error:  # any error of a step must leave the engine running
            log.exception("step failed with sequences %s in it", [item.sequence.id for item in batch])
            if not self._runner.is_usable():
                raise
            if len(batch) == 1:
                self._requests.fail(self._requests[batch[0].sequence.request_id], step_failed(error))
                return []
        computed: list[tuple[Batch, Tensor]] = []
        for item in batch:
            # A sequence of the same request may have failed just now, and the request with it.
            state = self._requests.find(item.sequence.request_id)
            if state is None:
                continue
            try:
                computed.append(([item], self._runner.forward([item], pages_to_zero)))
            except Exception as error:
                if not self._runner.is_usable():
                    raise
                self._requests.fail(state, step_failed(error))
            # Zeroed with the first.
            pages_to_zero = []
        return computed

    def _advance(self, batch: Batch, logits: Tensor) -> None:
        """Count the batch's tokens as computed, read prompt log-probabilities, and sample next tokens.

        The logits of constrained sequences are held for `sample_masked`.
        """
        row, now = 0, time.monotonic()
        ready: list[tuple[Sequence, int]] = []
        for sequence, num_tokens, _ in batch:
            start, row = row, row + sequence.num_logits(num_tokens)
            state = self._requests.find(sequence.request_id)
            if state is not None and sequence.needs_prompt_logits:
                with self._requests.failing_alone(state):
                    self._read_prompt_logprobs(state, sequence, logits[start:row])
            if state is None or sequence.request_id not in self._requests:
                continue
            sequence.num_computed_tokens += num_tokens
            if sequence.num_computed_tokens < sequence.num_tokens:
                self._kv_cache.cache_full_pages(sequence)
            elif (output := state.outputs[sequence.index]).is_constrained:
                self._held.hold(output, logits[row - 1], now)
            else:
                ready.append((sequence, row - 1))
        # Usually every row belongs to a sequence that has all its tokens.
        self._sample_each(ready, lambda rows: logits if len(rows) == len(logits) else logits[rows])

    def _read_prompt_logprobs(self, state: RequestState, sequence: Sequence, logits: Tensor) -> None:
        """Score the prompt's tokens that follow those just computed; `logits` is ``[tokens, vocab]``."""
        first = sequence.num_computed_tokens + 1
        following = list(state.request.prompt_ids[first : first + len(logits)])
        num_top = state.request.sampling_params.prompt_logprobs
        assert num_top is not None
        scored = score(logits[: len(following)], following, num_top)
        state.outputs[sequence.index].add_prompt_logprobs(scored)

    def _sample_each(self, ready: list[tuple[Sequence, T]], gather: Callable[[list[T]], Tensor]) -> None:
        """Sample the next token of each sequence from its row of `gather`; if that fails, of each one alone.

        Args:
            ready: sequences, each with what `gather` needs to know of it.
            gather: returns logits ``[sequences, vocab]``.

        Raises:
            Exception: the model's own, if the device does not work any more.
        """
        # A request may have failed just now with another of its sequences.
        found = (self._requests.find_output(one.request_id, one.index) for one, _ in ready)
        open_ = [(*each, *one) for each, one in zip(found, ready, strict=True) if each is not None]
        if not open_:
            return
        began = time.monotonic()
        try:
            rows = [(output.sampler, state.request.num_embeddings) for state, output, _, _ in open_]
            tokens = sample(gather([item for *_, item in open_]), rows)
        except Exception as error:
            log.exception("no tokens for %s", [sequence.id for _, _, sequence, _ in open_])
            if not self._runner.is_usable():
                raise
            if len(open_) > 1:
                for one in ready:
                    self._sample_each([one], gather)
            else:
                self._requests.fail(open_[0][0], step_failed(error))
            return
        seconds = time.monotonic() - began
        own = divided([output.sampler for _, output, _, _ in open_], seconds)
        self._charge_sampling(list(zip((sequence for _, _, sequence, _ in open_), own, strict=True)), seconds)
        for (state, output, sequence, _), token in zip(open_, tokens, strict=True):
            if state.request.id in self._requests:
                with self._requests.failing_alone(state):
                    if isinstance(token, EngineFailed):
                        raise token
                    self._kv_cache.cache_full_pages(sequence)
                    self._send(state, sequence, output, token)

    def _charge_sampling(self, costs: list[tuple[Sequence, float]], seconds: float) -> None:
        """Divide the time of a call that has sampled among its sequences, by the cost of each."""
        self._sampling_s += seconds
        for tenant, own in self._scheduler.charge_sampling(costs, seconds).items():
            self._telemetry.seconds(tenant, "sample", own)

    def _send(
        self, state: RequestState, sequence: Sequence, output: SequenceOutput, token: SampledToken
    ) -> None:
        """Send a sequence's next token; start the request's next sequence, and end this one behind its last token."""
        now = time.monotonic()
        reason = output.add_token(token)
        if state.first_token_at is None:
            state.first_token_at = now
            self._telemetry.first_token(state.request, state.lookup, state.timings(now))
        self._telemetry.tokens(state.request, "generation", 1)
        if output.last_token_at is not None:
            self._telemetry.next_token(now - output.last_token_at)
        output.last_token_at = now
        self._requests.start_next(state, sequence)
        if reason is not None:
            self._requests.finish_sequence(state, output, reason)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on requests."""

    max_open: int  # requests that run or wait
    has_shares: bool  # a tenant may have as many of them open as it leaves free
    max_model_len: int  # tokens of prompt and output together, for the base
    load_timeout_s: float
    mask_timeout_s: float  # for which a constrained sequence waits for its mask
    longest: int | None = None  # as `max_model_len`, of a variant with a longer context; None: as of the base


def too_long(max_tokens: int) -> ContextTooLong:
    """Return the error of a request with a sequence that the whole KV cache cannot hold."""
    return ContextTooLong(
        f"the key-value cache holds {max_tokens} tokens, and more are needed: shorten the prompt"
    )
