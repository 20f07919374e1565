"""Work on the base's tokenizer whose client leaves."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from server.errors import InvalidRequest
from server.text.service import SHORT_CHARS, LocalTokenizer
from server.text.tokenizer import LoadedTokenizer
from tests.helpers.tiny_models import make_tokenizer


def test_an_error_of_work_whose_client_has_left_is_not_logged() -> None:
    begun, left = threading.Event(), threading.Event()

    def fail(_: LoadedTokenizer) -> None:
        begun.set()
        left.wait()
        raise InvalidRequest("the prompt is too long")

    async def main() -> list[dict[str, Any]]:
        logged: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        local = LocalTokenizer(LoadedTokenizer(make_tokenizer()))
        asking = asyncio.create_task(local.run(("tenant", "base"), SHORT_CHARS + 1, fail))
        await asyncio.to_thread(begun.wait)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        left.set()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
        local.close()
        # A task logs its error when it is collected.
        gc.collect()
        return logged

    assert asyncio.run(main()) == []


def test_a_tenant_s_long_texts_leave_a_thread_to_others() -> None:
    begun, left = threading.Event(), threading.Event()

    def work(_: object) -> bool:
        begun.set()
        return left.wait()

    async def main() -> None:
        local = LocalTokenizer(LoadedTokenizer(make_tokenizer()), several_tenants=True)
        slow = [asyncio.create_task(local.run(("a", name), SHORT_CHARS + 1, work)) for name in ("one", "two")]
        # Both have asked for a thread by then.
        await asyncio.to_thread(begun.wait)
        try:
            async with asyncio.timeout(30):
                assert await local.run(("b", "one"), SHORT_CHARS + 1, lambda _: 1) == 1
        finally:
            left.set()
        await asyncio.gather(*slow)
        local.close()

    asyncio.run(main())
