"""The state that all ingress replicas share, as one of them uses it. Event loop only."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deltastore.errors import PeraxisError
from server.errors import QueueFull
from server.metrics.frontend import FrontendMetrics
from server.protocol.shared_calls import GetMetrics, GetStats, R, SharedCall, VariantsDeleted
from server.scale.mailbox import Mailbox
from server.scale.shared import SILENT_S, IngressReport

log = logging.getLogger(__name__)

REPORT_S = SILENT_S / 5

T = TypeVar("T")

# A call, and the future of its answer if one is waited for.
_Sent = tuple[SharedCall[Any], asyncio.Future[Any] | None]


class RaySharedLink:
    """The deployment of `SharedReplica` as a `SharedLink`.

    Args:
        ingress: the full id of this ingress replica.
        shared: a handle of the deployment.
        metrics: those of this ingress.
    """

    def __init__(self, ingress: str, shared: DeploymentHandle[Any], metrics: FrontendMetrics) -> None:
        self._ingress = ingress
        self._shared = shared
        self._metrics = metrics
        self._numbers = itertools.count()
        self._outbox: Mailbox[_Sent] = Mailbox(self._send)

    async def report(self) -> None:
        """Report this replica's metrics until cancelled."""
        while True:
            try:
                await self._call(self._shared.report.remote(self._report()))
            except PeraxisError as error:
                log.warning("metrics were not reported: %s", error)
            await asyncio.sleep(REPORT_S)

    async def ask(self, call: SharedCall[R]) -> R:
        """Return the answer to a call; raise QueueFull if nothing has the state now."""
        if isinstance(call, GetMetrics | GetStats | VariantsDeleted):
            # These wait for the engines, and other calls must not.
            await self._call(self._shared.report.remote(self._report()))
            (answer,) = await self._call(self._shared.answer.remote(self._ingress, [call]))
        else:
            asked = asyncio.get_running_loop().create_future()
            self._outbox.put((call, asked))
            answer = await asked
        if isinstance(answer, QueueFull):
            raise answer
        result: R = answer
        return result

    def tell(self, call: SharedCall[None]) -> None:
        """Send a call without waiting for an answer, behind all that were asked before."""
        self._outbox.put((call, None))

    async def _send(self, calls: list[_Sent]) -> None:
        try:
            sent = [call for call, _ in calls]
            answers: list[Any] = await self._call(self._shared.answer.remote(self._ingress, sent))
        except QueueFull as error:
            answers = [error] * len(calls)
        for (_, asked), answer in zip(calls, answers, strict=True):
            # What is not waited for any more is cancelled.
            if asked is not None and not asked.done():
                asked.set_result(answer)

    async def _call(self, response: Awaitable[T]) -> T:
        try:
            return await response
        except (RayError, RayServeException) as error:
            log.warning("the shared state did not answer: %s", type(error).__name__)
            raise QueueFull(
                "the server's shared state is being started again: try again in a moment"
            ) from error

    def _report(self) -> IngressReport:
        return IngressReport(self._ingress, next(self._numbers), self._metrics.snapshot())
