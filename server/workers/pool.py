"""Runs functions on tenants' input in worker processes that may be killed, for shares in turn. Event loop only.

A hostile tokenizer can abort its process or never return, and no thread can be stopped: only a process can be killed.

A worker is forked when a task needs it, which takes milliseconds: work that kills its worker again and again costs
others no more processor time than its own tasks ask for.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from server.errors import Draining, InvalidRequest, WorkerDied, WorkerTimeout
from server.fairness import FairLimiter, Share, tenant_of
from server.workers.worker_main import NICENESS, Limits, Reply
from server.workers.worker_process import WorkerProcess, pack_task, template_of

# Waiting tasks of one share. Each keeps its arguments in memory.
MAX_WAITING = 64
# Shares that a worker is remembered for.
MAX_REMEMBERED = 64

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class WorkerPool:
    """Worker processes, started when they are needed.

    Args:
        num_workers: tasks that run at a time. One share has at most half of them.
        limits: of each task, unless its call has others.
        modules: modules that a worker imports before its first task.
        niceness: of the workers, above that of this process.
        several_tenants: one tenant has at most all workers but one, so that slow work of its many shares leaves one.
    """

    def __init__(
        self,
        num_workers: int,
        limits: Limits,
        modules: tuple[str, ...] = (),
        niceness: int = NICENESS,
        several_tenants: bool = False,
    ) -> None:
        self._num_workers = num_workers
        self._limits = limits
        self._modules = modules
        self._niceness = niceness
        permits_per_tenant = max(1, num_workers - 1) if several_tenants else None
        self._limiter = FairLimiter(num_workers, max(1, num_workers // 2), MAX_WAITING, permits_per_tenant)
        # The shares that each worker served lately: it may have their tokenizers loaded.
        self._workers: dict[WorkerProcess, deque[Share]] = {}
        # The longest idle one comes first.
        self._idle: list[WorkerProcess] = []
        self._ending: set[asyncio.Task[None]] = set()
        # Made for the first worker. A worker that is killed cannot remove its temporary files.
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._closed = False

    async def run(
        self,
        share: Share,
        deadline_s: float,
        function: Callable[[*Ts], T],
        *args: *Ts,
        limits: Limits | None = None,
        check: Callable[[], None] | None = None,
    ) -> T:
        """Call ``function(*args)`` in a worker and return its result. Cancelling the call kills the worker.

        Args:
            share: the owner of the work; each has its own queue. Tenants are served in turn, then their shares.
            deadline_s: seconds after which a running task is killed. Waiting does not count.
            function: a function of a module; it, its arguments and its result are pickled.
            limits: of this task; None takes the pool's.
            check: called when the task's turn has come; the task is not run if it raises.

        Raises:
            PeraxisError: as `function` or `check` raised it.
            WorkerTimeout: the task was killed at its deadline.
            WorkerDied: it reached a limit of memory or processor time, or crashed.
            QueueFull: too many tasks of the share wait.
            Draining: the pool was closed.
            RuntimeError: `function` raised another exception; the message is its traceback.
        """
        limits = limits or self._limits
        async with self._limiter.permit(share):
            if check is not None:
                check()
            # Not before: a task that waits would take its bytes twice.
            task = pack_task(function, args, limits)
            worker = await self._take(share)
            try:
                async with asyncio.timeout(deadline_s):
                    reply = await worker.call(task, limits)
            except WorkerDied:
                self._check_open()
                raise
            except TimeoutError as error:
                worker.kill()
                raise WorkerTimeout(f"the work was not done after {deadline_s:g} s") from error
            except asyncio.CancelledError:
                worker.kill()
                raise
            finally:
                self._give_back(worker)
        result: T = _result(reply)
        return result

    @property
    def is_running(self) -> bool:
        """False while no worker that could take a task is started; one that died may be noticed a moment later."""
        return any(worker.is_usable for worker in self._workers)

    async def warm(self, num_workers: int | None = None) -> None:
        """Start workers ahead of the first tasks, until there are `num_workers`; None starts all."""
        missing = (self._num_workers if num_workers is None else num_workers) - len(self._workers)

        async def start_one() -> None:
            self._give_back(await self._start())

        await asyncio.gather(*(start_one() for _ in range(missing)))

    async def close(self) -> None:
        """Kill the workers; running and waiting tasks raise Draining. Returns when all workers have ended."""
        self._closed = True
        for worker in list(self._workers):
            self._discard(worker)
        await asyncio.gather(*self._ending)
        if self._scratch is not None:
            await asyncio.to_thread(self._scratch.cleanup)

    async def _take(self, share: Share) -> WorkerProcess:
        """Return an idle worker, or a new one."""
        for worker in [worker for worker in self._idle if not worker.is_usable]:
            self._discard(worker)
        worker = self._idle_for(share) or await self._start()
        if worker in self._idle:
            self._idle.remove(worker)
        self._workers[worker].append(share)
        return worker

    def _idle_for(self, share: Share) -> WorkerProcess | None:
        """Return an idle worker that served the share before, or else one that served no other tenant.

        Another tenant's worker is taken only if no further one may be started: it may have the tokenizers of its
        tenant loaded, and work that kills it would have the tenant load them again.
        """
        for worker in self._idle:
            if share in self._workers[worker]:
                return worker
        for worker in self._idle:
            if all(tenant_of(other) == tenant_of(share) for other in self._workers[worker]):
                return worker
        may_start = len(self._workers) < self._num_workers
        return None if may_start or not self._idle else self._idle[0]

    async def _start(self) -> WorkerProcess:
        self._check_open()
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="peraxis-workers-", ignore_cleanup_errors=True)
        worker = WorkerProcess(template_of(self._modules, self._niceness), Path(self._scratch.name))
        self._workers[worker] = deque(maxlen=MAX_REMEMBERED)
        try:
            await worker.ready()
            # `close` may have come in the same moment, and ended it.
            self._check_open()
        except WorkerDied:
            self._discard(worker)
            self._check_open()
            raise
        except asyncio.CancelledError:
            self._discard(worker)
            raise
        return worker

    def _give_back(self, worker: WorkerProcess) -> None:
        # There is one too many if a task came while `warm` started them.
        if self._closed or not worker.is_usable or len(self._workers) > self._num_workers:
            self._discard(worker)
        else:
            self._idle.append(worker)

    def _discard(self, worker: WorkerProcess) -> None:
        """Kill a worker and forget it."""
        if self._workers.pop(worker, None) is None:
            return
        if worker in self._idle:
            self._idle.remove(worker)
        worker.kill()
        ending = asyncio.create_task(worker.wait())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _check_open(self) -> None:
        if self._closed:
            raise Draining("the server is shutting down: send the request to another replica")


def _result(reply: Reply) -> Any:
    match reply.kind:
        case "result":
            return reply.value
        case "error":
            raise reply.value
        case "died":
            raise WorkerDied(f"the work {reply.value}")
        case "failed":
            raise RuntimeError(f"a task failed in its worker process:\n{reply.value}")


# Encoding, rendering or decoding of one request or step.
WORK_S = 5.0
WORK_LIMITS = Limits(memory_bytes=1 << 30, cpu_s=2.0)
# The pause of a share whose work had to be killed; it doubles with each further time.
MIN_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
# Loading a tokenizer, twice as large as the largest known one, beside other work.
LOAD_S = 30.0
LOAD_LIMITS = Limits(memory_bytes=2 << 30, cpu_s=15.0)


@dataclass(frozen=True, slots=True)
class WorkKind:
    """One kind of work, as errors name it.

    Args:
        subject: the part of the variant that fails.
        advice: the way out.
        pauses: work is refused for a pause after some had to be killed.
    """

    subject: str
    advice: str
    pauses: bool = True


TEXT_WORK = WorkKind("its tokenizer or chat template", "send less text, or upload it repaired")


class VariantWork:
    """The work of one share of the pool. After work that had to be killed, further work is refused for a pause.

    Args:
        share: the tenant and the variant's digest.
        label: the variant's name in error messages.
        now: a clock in seconds.
        kind: the kind of work.
    """

    def __init__(
        self,
        pool: WorkerPool,
        share: Share,
        label: str,
        now: Callable[[], float] = time.monotonic,
        kind: WorkKind = TEXT_WORK,
    ) -> None:
        self.label = label
        self._pool = pool
        self.share = share
        self._kind = kind
        self._now = now
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._reason = ""

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a function within `WORK_S` and `WORK_LIMITS`.

        Raises:
            InvalidRequest: the work was killed or crashed, or is refused because earlier work was.
            QueueFull: too much work of this share waits.
            PeraxisError: as `function` raised it.
        """
        return await self._run(WORK_S, WORK_LIMITS, function, *args)

    async def load(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a function that loads a tokenizer, within `LOAD_S` and `LOAD_LIMITS`; raises as `run` does."""
        return await self._run(LOAD_S, LOAD_LIMITS, function, *args)

    async def _run(self, deadline_s: float, limits: Limits, function: Callable[[*Ts], T], *args: *Ts) -> T:
        self._check_pause()
        try:
            # Checked again when its turn comes: work that waited must not kill one worker after the other.
            result = await self._pool.run(
                self.share, deadline_s, function, *args, limits=limits, check=self._check_pause
            )
        except (WorkerTimeout, WorkerDied) as error:
            self._pause(str(error))
            raise InvalidRequest(
                f"{self.label}: {self._kind.subject} failed: {error}: {self._kind.advice}"
            ) from error
        self._pause_s = 0.0
        return result

    def _check_pause(self) -> None:
        if (left_s := self._paused_until - self._now()) > 0:
            raise InvalidRequest(
                f"{self.label}: {self._kind.subject} failed: {self._reason}: try again in {left_s:.0f} s"
            )

    def _pause(self, reason: str) -> None:
        if not self._kind.pauses:
            return
        self._reason = reason
        self._pause_s = min(max(2 * self._pause_s, MIN_PAUSE_S), MAX_PAUSE_S)
        self._paused_until = self._now() + self._pause_s
