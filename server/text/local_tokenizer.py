"""The base's tokenizer in the HTTP process. Long texts are handled on threads, one per tenant and variant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar, TypeVarTuple

from server.fair_limiter import FairLimiter, Share
from server.text.loaded_tokenizer import LoadedTokenizer

# A shorter text takes less time than a thread does to start on it.
SHORT_CHARS = 2000
NUM_THREADS = 2
MAX_WAITING = 256

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LocalTokenizer:
    """Asynchronous calls of a loaded tokenizer whose files are trusted. Event loop only.

    Args:
        several_tenants: one tenant has at most all threads but one, whatever the number of its variants.
    """

    def __init__(self, loaded: LoadedTokenizer, several_tenants: bool = False) -> None:
        self.loaded = loaded
        self._limiter = FairLimiter(NUM_THREADS, 1, MAX_WAITING, NUM_THREADS - 1 if several_tenants else None)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    async def run(
        self, share: Share, num_chars: int, function: Callable[[LoadedTokenizer, *Ts], T], *args: *Ts
    ) -> T:
        """Call a function of the tokenizer; raises what it does, and QueueFull.

        Args:
            share: the owner of the work.
            num_chars: of the text that it is about.
        """
        if num_chars <= SHORT_CHARS:
            return function(self.loaded, *args)
        started = asyncio.Event()
        work = asyncio.create_task(self._run_on_thread(started, share, partial(function, self.loaded, *args)))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # A thread cannot be cancelled, and keeps its permit until it is done.
            if not started.is_set():
                work.cancel()
            # Read, so that asyncio does not log an error whose client has left.
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def _run_on_thread(self, started: asyncio.Event, share: Share, call: Callable[[], T]) -> T:
        async with self._limiter.permit(share):
            started.set()
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """Drop texts that wait for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)
