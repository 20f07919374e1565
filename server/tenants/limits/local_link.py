"""The ledger in the process that asks it, with `--engine inline`."""

from __future__ import annotations

import asyncio

from server.protocol.limits import (
    AddTokens,
    GiveBack,
    LimitAnswer,
    LimitQuestion,
)
from server.tenants.limits.ledger import Ledger

HOLDER = "inline"


class LocalLink:
    """Calls a ledger on the same event loop, in order."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # A task that nothing refers to may be collected.
        self._telling: set[asyncio.Task[object]] = set()

    async def ask(self, call: LimitQuestion) -> LimitAnswer:
        """Return the ledger's answer."""
        # A task like those of `tell`: tasks begin in the order in which they were made.
        answer = await asyncio.create_task(self._ledger.answer(HOLDER, call))
        assert answer is not None
        return answer

    def tell(self, call: AddTokens | GiveBack) -> None:
        """Do what a call asks soon, without its answer."""
        task: asyncio.Task[object] = asyncio.create_task(self._ledger.answer(HOLDER, call))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
