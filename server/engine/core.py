"""What the engine's thread does: takes in requests, lets the scheduler choose, runs the step, sends the tokens on.

One `turn` is at most one step of the model. Nothing here waits, and nobody else calls it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from functools import partial

from torch import Tensor

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.deltas.fetcher import label
from server.deltas.residency import Residency
from server.engine.admitted import Admitted, Prefetch, Unload
from server.engine.model_runner import ModelRunner, Piece
from server.engine.request import DoneEvent, ErrorEvent, FinishEvent, FinishReason, Request
from server.engine.sampling import Choice, LastLogits, score
from server.engine.scheduling.kv_cache import KVCache
from server.engine.scheduling.scheduler import Plan, Scheduler
from server.engine.sequence import Sequence
from server.engine.telemetry import Telemetry
from server.errors import EngineFailed, InvalidRequest, LoadTimeout
from server.model.attention import Chunk

logger = logging.getLogger("peraxis.engine")

Work = Items[tuple[Sequence, int]]  # sequences and how many of their tokens a step computes


class Core:
    """See the module. `on_answered` is told of each request just before its last event."""

    def __init__(
        self,
        runner: ModelRunner,
        residency: Residency,
        scheduler: Scheduler[Sequence],
        kv_cache: KVCache,
        telemetry: Telemetry,
    ) -> None:
        self.on_answered: Callable[[Request], None] = lambda request: None
        self.load_timeout_s = 60.0
        self._runner = runner
        self._residency = residency
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._telemetry = telemetry
        self._admitted: dict[str, Admitted] = {}  # by request id
        self._unstarted: dict[
            str | None, dict[str, Admitted]
        ] = {}  # that have had no step yet, by digest and id
        self._prefetches: list[Prefetch] = []
        self._unloads: list[Unload] = []

    def admit(self, request: Request) -> None:
        """Take a request in; its first sample is scheduled, the others when its prompt is in the cache."""
        found = "device" if request.digest is None else self._residency.level_of(request.digest)
        admitted = Admitted(request, found)
        self._admitted[request.id] = admitted
        self._unstarted.setdefault(request.digest, {})[request.id] = admitted
        self._telemetry.admitted(request, found)
        if request.record is not None:
            self._residency.know(request.record)
        self._attempt(admitted, lambda: self._begin_sample(admitted))

    def cancel(self, request_id: str) -> None:
        """End a request whose client is gone; unknown ids are ignored."""
        admitted = self._admitted.get(request_id)
        if admitted is None:
            return
        for sequence in list(admitted.live):
            if request_id not in self._admitted:  # the end of another sample failed
                return
            self._attempt(admitted, partial(self._end_sample, admitted, sequence, "cancelled"))
        if request_id in self._admitted:  # samples that never began
            self._finish(admitted, "cancelled")

    def prefetch(self, prefetch: Prefetch) -> None:
        """Bring a version in; an older call to unload the same bytes, which still waits, is answered by this one."""
        for unload in [u for u in self._unloads if u.digest == prefetch.record.digest]:
            self._unloads.remove(unload)
            unload.future.set_result(None)
        self._residency.know(prefetch.record)
        self._prefetches.append(prefetch)

    def unload(self, unload: Unload) -> None:
        self._unloads.append(unload)

    def turn(self) -> bool:
        """Make finished loads visible and run one step; whether there was anything to run."""
        now = time.monotonic()
        self._adopt_loads(now)
        self._time_out(now)
        plan = self._scheduler.plan(now)
        self._serve_calls(now)  # behind the plan, which holds what has been loaded for those who wait
        for sequence in plan.preempted:
            sequence.forget_prompt()
        for sequence in plan.unfit:
            if sequence.request.id in self._admitted:
                self._fail(self._admitted[sequence.request.id], _outgrown(self._kv_cache.max_tokens))
        self._report_queues()
        self._telemetry.cache(self._kv_cache.usage, *self._kv_cache.take_counts())
        self._telemetry.preempted(len(plan.preempted))
        if plan.batch:
            self._step(plan)
        return bool(plan.batch)

    def fail_all(self, error: PeraxisError) -> None:
        """Tell everybody that nothing more comes."""
        for admitted in list(self._admitted.values()):
            self._fail(admitted, error)
        calls: list[Prefetch | Unload] = [*self._prefetches, *self._unloads]
        self._prefetches, self._unloads = [], []
        for call in calls:
            call.future.set_exception(error)

    def _adopt_loads(self, now: float) -> None:
        for adopted in self._residency.adopt():
            digest, error = adopted.record.digest, adopted.error
            for admitted in self._unstarted.get(digest, {}).values():
                admitted.loaded_at = (
                    now if admitted.cold and admitted.loaded_at is None else admitted.loaded_at
                )
            if error is not None:
                for admitted in [a for a in self._admitted.values() if a.request.digest == digest]:
                    self._fail(admitted, error)
                for prefetch in [p for p in self._prefetches if p.record.digest == digest]:
                    self._end_prefetch(prefetch)
                    prefetch.future.set_exception(error)

    def _time_out(self, now: float) -> None:
        """Fail requests that have waited for their delta for too long."""
        late = [
            admitted
            for digest, waiting in self._unstarted.items()
            if digest is not None and not self._residency.is_resident(digest)
            for admitted in waiting.values()
            if now - admitted.admitted_at > self.load_timeout_s
        ]
        for admitted in late:
            assert admitted.request.record is not None
            self._fail(admitted, self._load_timeout(admitted.request.record))

    def _serve_calls(self, now: float) -> None:
        for unload in [u for u in self._unloads if self._residency.evict(u.digest, "unload")]:
            self._unloads.remove(unload)
            unload.future.set_result(None)
        for prefetch in list(self._prefetches):
            self._serve_prefetch(prefetch, now)

    def _serve_prefetch(self, prefetch: Prefetch, now: float) -> None:
        record = prefetch.record
        resident = self._residency.is_resident(record.digest)
        if not resident and now - prefetch.since <= self.load_timeout_s:
            self._residency.load(record.digest)
            return
        self._end_prefetch(prefetch)
        try:
            if not resident:
                raise self._load_timeout(record)
            if prefetch.pin:
                self._residency.pin(record.digest)
            prefetch.future.set_result(None)
        except PeraxisError as error:
            prefetch.future.set_exception(error)

    def _end_prefetch(self, prefetch: Prefetch) -> None:
        self._prefetches.remove(prefetch)
        self._residency.forget(prefetch.record.digest)

    def _step(self, plan: Plan[Sequence]) -> None:
        """Compute the plan's tokens. Where the whole fails, each sequence is tried alone, so that one fails alone."""
        began = time.monotonic()
        known = [item for item in plan.batch if item[0].request.id in self._admitted]
        work = sorted(known, key=lambda item: self._place(item[0]))
        for sequence, _ in work:
            admitted = self._admitted[sequence.request.id]
            if admitted.started_at is None:
                admitted.started_at = began
                self._leave_unstarted(sequence.request)
        for computed, logits in self._compute(work):
            self._advance(computed, logits)
        self._scheduler.charge(plan, time.monotonic())
        num_deltas = len({sequence.digest for sequence, _ in work} - {None})
        self._telemetry.step(time.monotonic() - began, len(work), num_deltas)

    def _compute(self, work: Work) -> Iterator[tuple[Work, Tensor]]:
        """Logits of all of them at once; where that fails, of each by itself, so that one fails alone.

        Raises:
            Exception: what the model did, when the device does not work any more.
        """
        fresh = self._kv_cache.take_fresh()
        try:
            yield work, self._forward(work, fresh)
            return
        except Exception as error:  # the engine's place for what nobody foresaw
            logger.exception("step failed with %d sequences in it", len(work))
            if not self._runner.is_usable():
                raise
            if len(work) == 1:
                self._fail(self._admitted[work[0][0].request.id], _step_failed(error))
                return
        for alone in ([item] for item in work):
            admitted = self._admitted.get(alone[0][0].request.id)
            if admitted is None:  # another sample of it has failed
                continue
            try:
                logits = self._forward(alone, fresh)
            except Exception as error:
                if not self._runner.is_usable():
                    raise
                self._fail(admitted, _step_failed(error))
            else:
                yield alone, logits
            fresh = []  # cleared with the first

    def _forward(self, work: Work, fresh: Items[int]) -> Tensor:
        return self._runner.forward([self._piece(*item) for item in work], fresh)

    def _piece(self, sequence: Sequence, num_tokens: int) -> Piece:
        first, last = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        delta = None if sequence.digest is None else self._residency.find(sequence.digest)
        assert (delta is None) == (sequence.digest is None), (
            "a step was planned for a delta that is not there"
        )
        chunk = Chunk(first, num_tokens, sequence.held.pages)
        return Piece(sequence.tokens[first:last], chunk, delta, sequence.num_kept(num_tokens))

    def _advance(self, work: Work, logits: Tensor) -> None:
        """Take what the step computed: the cache's new contents, the prompts' scores, the next tokens."""
        row = 0
        ready: list[tuple[int, Sequence]] = []
        for sequence, num_tokens in work:
            num_kept = sequence.num_kept(num_tokens)
            if num_kept > 1 or not sequence.reuses_prefix:
                self._read_prompt(sequence, logits[row : row + num_kept])
            row += num_kept
            sequence.num_computed_tokens += num_tokens
            if sequence.num_computed_tokens == sequence.num_tokens:
                ready.append((row - 1, sequence))
            else:
                self._kv_cache.commit(sequence)
        if ready:
            last = LastLogits(logits[[row for row, _ in ready]])
            for index, (_, sequence) in enumerate(ready):
                self._choose(sequence, last, index)

    def _choose(self, sequence: Sequence, last: LastLogits, index: int) -> None:
        """The next token of one sequence, sent on."""
        admitted = self._admitted.get(sequence.request.id)
        if admitted is None:  # another sample of it failed in this very step
            return

        def send() -> None:
            num_ids = sequence.request.tokenizer.num_embeddings
            choice = last.choose(index, num_ids, sequence.sampler, sequence.tokens)
            self._kv_cache.commit(sequence)
            self._send(admitted, sequence, choice)

        self._attempt(admitted, send)

    def _read_prompt(self, sequence: Sequence, logits: Tensor) -> None:
        """Score the prompt's tokens that follow those just computed."""
        first = sequence.num_computed_tokens + 1
        following = sequence.request.prompt_ids[first : first + len(logits)]
        num_top = sequence.request.sampling.prompt_logprobs
        assert num_top is not None
        sequence.read_prompt(score(logits[: len(following)], following, num_top))

    def _send(self, admitted: Admitted, sequence: Sequence, choice: Choice) -> None:
        now = time.monotonic()
        reason = sequence.accept(choice)
        admitted.num_generated += 1
        if admitted.first_token_at is None:
            admitted.first_token_at = now
            self._telemetry.first_token(admitted.request, admitted.found, admitted.timings(now))
        self._telemetry.tokens(admitted.request, "generation", 1)
        if sequence.last_token_at is not None:
            self._telemetry.next_token(now - sequence.last_token_at)
        sequence.last_token_at = now
        while admitted.num_begun < admitted.request.sampling.n:
            self._begin_sample(admitted)
        if reason is not None:
            self._end_sample(admitted, sequence, reason)

    def _begin_sample(self, admitted: Admitted) -> None:
        sequence = Sequence(admitted.request, admitted.num_begun, admitted.admitted_at)
        admitted.num_begun += 1
        admitted.live.append(sequence)
        self._scheduler.add(sequence, time.monotonic())

    def _end_sample(self, admitted: Admitted, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish(reason)
        admitted.live.remove(sequence)
        self._scheduler.remove(sequence)
        if not admitted.live:
            self._finish(admitted, reason)

    def _attempt(self, admitted: Admitted, action: Callable[[], None]) -> None:
        """Do something for one request; whatever goes wrong fails that request alone."""
        try:
            action()
        except PeraxisError as error:
            self._fail(admitted, error)
        except Exception as error:  # of a stranger's tokenizer, or of who listens
            logger.exception("request %s failed", admitted.request.id)
            self._fail(admitted, _step_failed(error))

    def _finish(self, admitted: Admitted, reason: FinishReason) -> None:
        for index in range(admitted.num_begun, admitted.request.sampling.n):
            admitted.request.on_event(FinishEvent(index, reason, ""))
        timings = admitted.timings(time.monotonic())
        self._telemetry.finished(admitted.request, reason, timings.total_s)
        self._forget(admitted)
        admitted.request.on_event(
            DoneEvent(timings, len(admitted.request.prompt_ids), admitted.num_generated)
        )

    def _fail(self, admitted: Admitted, error: PeraxisError) -> None:
        now = time.monotonic()
        self._telemetry.finished(admitted.request, "error", now - admitted.admitted_at)
        for sequence in admitted.live:
            self._kv_cache.discard(sequence)
        self._forget(admitted)
        admitted.request.on_event(ErrorEvent(error))

    def _forget(self, admitted: Admitted) -> None:
        """Give back what a request held; it is answered next."""
        for sequence in admitted.live:
            self._scheduler.remove(sequence)
        admitted.live = []
        del self._admitted[admitted.request.id]
        if admitted.request.digest is not None:
            self._residency.forget(admitted.request.digest)
        if admitted.started_at is None:
            self._leave_unstarted(admitted.request)
        self.on_answered(admitted.request)

    def _place(self, sequence: Sequence) -> int:
        """Where a sequence stands in a batch: those of one slot together, the base's first."""
        delta = None if sequence.digest is None else self._residency.find(sequence.digest)
        return -1 if delta is None else delta.slot.index

    def _report_queues(self) -> None:
        num_waiting = sum(map(len, self._unstarted.values()))
        loading = [
            len(waiting)
            for digest, waiting in self._unstarted.items()
            if digest is not None and not self._residency.is_resident(digest)
        ]
        self._telemetry.queues(len(self._admitted) - num_waiting, num_waiting, sum(loading))

    def _leave_unstarted(self, request: Request) -> None:
        waiting = self._unstarted[request.digest]
        del waiting[request.id]
        if not waiting:
            del self._unstarted[request.digest]

    def _load_timeout(self, record: VersionRecord) -> LoadTimeout:
        return LoadTimeout(
            f"{label(record)} found no slot or was not loaded within {self.load_timeout_s:g} s: "
            "try again, or unpin some"
        )


def _step_failed(error: Exception) -> EngineFailed:
    return EngineFailed(f"the step failed: {type(error).__name__}: {error}")


def _outgrown(max_tokens: int) -> InvalidRequest:
    return InvalidRequest(
        f"the key-value cache holds {max_tokens} tokens, and more are needed: shorten the prompt"
    )
