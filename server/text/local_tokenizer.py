"""The base's tokenizer in the HTTP process. Long texts are encoded on threads, one of a tenant at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor

from server.text.loaded_tokenizer import LoadedTokenizer
from server.workers.fair_limiter import FairLimiter

# A shorter text takes less time than a thread does to start on it.
SHORT_CHARS = 2000
NUM_THREADS = 2
MAX_WAITING = 256


class LocalTokenizer:
    """Asynchronous calls of a loaded tokenizer whose files are trusted. Event loop only."""

    def __init__(self, loaded: LoadedTokenizer) -> None:
        self.loaded = loaded
        self._limiter = FairLimiter(NUM_THREADS, 1, MAX_WAITING)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    async def encode(
        self, share: Hashable, text: str, max_tokens: int, add_special_tokens: bool, param: str
    ) -> list[int]:
        """Return the token ids of a text; raises as `LoadedTokenizer.encode`, and QueueFull."""
        if len(text) <= SHORT_CHARS:
            return self.loaded.encode(text, max_tokens, add_special_tokens, param)
        started = asyncio.Event()
        encoding = asyncio.create_task(
            self._encode_on_thread(started, share, (text, max_tokens, add_special_tokens, param))
        )
        try:
            return await asyncio.shield(encoding)
        except asyncio.CancelledError:
            # A thread cannot be cancelled, and keeps its seat until it is done.
            if not started.is_set():
                encoding.cancel()
            raise

    async def _encode_on_thread(
        self, started: asyncio.Event, share: Hashable, args: tuple[str, int, bool, str]
    ) -> list[int]:
        async with self._limiter.seat(share):
            started.set()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self.loaded.encode, *args)

    def close(self) -> None:
        """Drop texts that wait for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)
