"""Connections beyond the bound where tenants have keys: callers without one give way, then the largest tenant."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from server.api.access import owner_of
from server.app import create_app
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.loop_ledger import NOBODY, PART_WITHOUT_KEY, WINDOW_S, Headers, Turns
from server.web_server import run_event_loop
from tests.server.helpers.http_app import make_service, settings_of
from tests.server.helpers.live_server import WAIT_S
from tests.server.helpers.web import Web, answer, code_of, make_turns, serving, talk
from tests.server.helpers.web_program import hello

UNKNOWN_KEY = f"pxk_{'0' * 12}_{'0' * 64}"


def get(path: str, key: str | None = None) -> bytes:
    header = "" if key is None else f"X-API-Key: {key}\r\n"
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n".encode()


def owner_of_name(headers: Headers) -> str:
    """Return the tenant whose name is the key."""
    return dict(headers).get(b"x-api-key", NOBODY.encode()).decode()


class Held:
    """An application whose keys are names of tenants. It answers `/held` when it is told to, all else at once."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_held = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        tenant = owner_of_name(scope["headers"])
        if not scope["state"]["identify"](tenant):
            await send({"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
            return
        if scope["path"] == "/held":
            self.num_held += 1
            await receive()
            left = asyncio.create_task(receive())
            released = asyncio.create_task(self.release.wait())
            await asyncio.wait({left, released}, return_when=asyncio.FIRST_COMPLETED)
        await hello(scope, receive, send)

    async def hold(self, web: Web, key: str | None, number: int) -> list[asyncio.StreamReader]:
        """Open connections, each with a request under way."""
        before = self.num_held
        opened = [await web.connect(get("/held", key)) for _ in range(number)]
        while self.num_held < before + number:
            await asyncio.sleep(0.01)
        self.writers += [writer for _, writer in opened]
        return [reader for reader, _ in opened]


def with_held(what: Callable[[Web, Held], Awaitable[None]], max_connections: int) -> None:
    """Run `what` with a server of few connections, whose application holds requests."""

    async def main() -> None:
        app = Held()
        turns = make_turns(owner_of_name)
        async with (
            asyncio.timeout(WAIT_S),
            serving(app, max_connections, has_keys=True, turns=turns) as web,
        ):
            await what(web, app)
            for writer in app.writers:
                writer.close()

    run_event_loop(main())


def test_callers_without_a_key_go_first_whatever_they_do_and_the_oldest_of_them() -> None:
    async def what(web: Web, app: Held) -> None:
        (tenants,) = await app.hold(web, "tenant", 1)
        first, second = await app.hold(web, None, 2)
        idle, writer = await web.connect(get("/", "tenant"))
        assert await answer(idle) == (200, b"hello")
        assert await web.ask(get("/", "other")) == (200, b"hello")
        assert await first.read() == b""
        app.release.set()
        assert await answer(second) == await answer(tenants) == (200, b"hello")
        writer.write(get("/", "tenant"))
        assert await answer(idle) == (200, b"hello")
        writer.close()

    with_held(what, max_connections=4)


def test_a_connection_that_has_not_asked_yet_ends_no_request_of_a_tenant() -> None:
    async def what(web: Web, app: Held) -> None:
        held = await app.hold(web, "tenant", 4)
        silent = [await web.connect() for _ in range(8)]
        refused = await web.ask(get("/"))
        assert code_of(refused) == (503, "overloaded")
        app.release.set()
        assert [await answer(reader) for reader in held] == [(200, b"hello")] * 4
        for _, writer in silent:
            writer.close()

    with_held(what, max_connections=4)


def test_a_tenant_with_fewer_connections_takes_the_place_of_the_newest_of_the_largest() -> None:
    async def what(web: Web, app: Held) -> None:
        large = await app.hold(web, "large", 5)
        small = await app.hold(web, "small", 1)
        small += await app.hold(web, "small", 2)
        assert [await reader.read() for reader in large[3:]] == [b""] * 2
        # Both have three now, so neither takes one of the other.
        for key in ("small", "large"):
            assert (await web.ask(get("/", key)))[0] == 503
        assert await web.ask(get("/", "third")) == (200, b"hello")
        app.release.set()
        answers = await asyncio.gather(*map(answer, [*large[:3], *small]), return_exceptions=True)
        assert answers.count((200, b"hello")) == 5

    with_held(what, max_connections=6)


def test_a_caller_without_a_key_has_one_request_at_a_time() -> None:
    paths: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await hello(scope, receive, send)

    async def what(web: Web) -> None:
        for key, num_answers in ((None, 1), ("tenant", 3)):
            requests = [get(f"/{key}-{number}", key) for number in range(3)]
            reader, writer = await web.connect(b"".join(requests))
            for _ in range(num_answers):
                assert await answer(reader) == (200, b"hello")
            if num_answers == 1:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()
        assert paths == ["/None-0", "/tenant-0", "/tenant-1", "/tenant-2"]

    talk(what, app, has_keys=True, turns=make_turns(owner_of_name))


async def pipeline(web: Web, request: bytes, begun: asyncio.Semaphore) -> None:
    """Send requests without waiting for their answers, and connect again when the connection ends."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(*web.address)
            begun.release()
            try:
                writer.write(8 * request)
                while await reader.read(1 << 16):
                    writer.write(request)
            finally:
                writer.close()


@contextlib.asynccontextmanager
async def pipelining(web: Web, number: int, request: bytes) -> AsyncIterator[None]:
    """Send the requests on so many connections while the block runs, which all have begun before."""
    begun = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(pipeline(web, request, begun)) for _ in range(number)]
    try:
        for _ in tasks:
            await begun.acquire()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def test_refusals_end_when_their_part_of_the_loop_is_used_while_tenants_and_probes_are_answered() -> None:
    """The clock of the ledger stands still, so the part is never renewed."""
    cost_s, num_nobody, num_tenant = 0.02, 0, 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_nobody, num_tenant
        begun = time.thread_time()
        if scope["path"] == "/health":
            pass
        elif owner_of_name(scope["headers"]) == NOBODY:
            num_nobody += 1
            while time.thread_time() - begun < cost_s:
                pass
        else:
            num_tenant += 1
        await hello(scope, receive, send)

    turns = make_turns(owner_of_name, clock=lambda: 0.0)

    async def what(web: Web) -> None:
        flood = [await web.connect(get("/")) for _ in range(40)]
        while turns.ledger.has_time(NOBODY):
            await asyncio.sleep(0.01)
        for number in range(20):
            assert await web.ask(get("/", f"tenant-{number % 2}")) == (200, b"hello")
            assert await web.ask(get("/health")) == (200, b"hello")
        # As a load balancer asks.
        reader, writer = await web.connect(get("/health").replace(b"GET", b"HEAD"))
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()
        assert num_nobody <= PART_WITHOUT_KEY * WINDOW_S / cost_s + 1
        assert num_tenant == 20
        for _, writer in flood:
            writer.close()

    talk(what, app, has_keys=True, turns=turns)


def test_a_tenant_that_floods_waits_for_another_one_and_not_the_other_way_round() -> None:
    order: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        order.append(owner_of_name(scope["headers"]))
        await hello(scope, receive, send)

    turns = make_turns(owner_of_name, clock=lambda: 0.0)
    turns.ledger.charge("flood", 10.0)
    turns.ledger.charge("honest", 0.001)

    async def what(web: Web) -> None:
        opened = [await web.connect() for _ in range(51)]
        # The last one sends after all others, and all before the event loop has another turn.
        for number, (_, writer) in enumerate(opened):
            writer.write(get("/", "flood" if number < 50 else "honest"))
        assert [await answer(reader) for reader, _ in opened] == 51 * [(200, b"hello")]
        assert order.count("flood") == 50
        assert order.index("honest") <= 10
        for _, writer in opened:
            writer.close()

    talk(what, app, has_keys=True, turns=turns)


def test_a_key_that_becomes_valid_on_an_open_connection_makes_its_requests_its_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was used is not forgotten while this test looks, however slow this machine is.
    monkeypatch.setattr("server.tenants.loop_ledger.WINDOW_S", 3600.0)
    store, auditor = KeyStore(tmp_path), Auditor(AuditLog(tmp_path))
    store.create(auditor, "other", ["inference"])

    async def main() -> None:
        service = make_service(settings_of(tmp_path, str(tmp_path), auth="keys"))
        turns = Turns(service.loop_ledger, partial(owner_of, service))
        async with (
            asyncio.timeout(WAIT_S),
            serving(create_app(service), 10, has_keys=True, turns=turns) as web,
        ):
            reader, writer = await web.connect(get("/me", UNKNOWN_KEY))
            assert (await answer(reader))[0] == 401
            assert turns.ledger.used("late") == 0.0 < turns.ledger.used(NOBODY)
            key = store.create(auditor, "late", ["inference"]).text
            writer.write(get("/me", key))
            assert (await answer(reader))[0] == 200
            assert turns.ledger.used("late") > 0.0
            # Now the head shows it.
            assert owner_of(service, [(b"authorization", f"Bearer {key}".encode())]) == "late"
            assert owner_of(service, [(b"x-api-key", key.encode()), (b"x-api-key", b"x")]) == NOBODY
            writer.close()
        await service.close()

    run_event_loop(main())


@pytest.mark.parametrize(
    "request_of_nobody",
    [get("/me", UNKNOWN_KEY), get("/me"), get("/nothing"), get("/health")],
    ids=["unknown key", "no key", "no route", "public"],
)
def test_callers_without_a_key_that_hold_all_connections_keep_no_tenant_out(
    tmp_path: Path, request_of_nobody: bytes
) -> None:
    num_connections, num_hostile, num_honest = 256, 288, 15
    key = KeyStore(tmp_path).create(Auditor(AuditLog(tmp_path)), "honest", ["inference"]).text

    async def main() -> None:
        service = make_service(settings_of(tmp_path, str(tmp_path), auth="keys"))
        app = create_app(service)
        turns = Turns(service.loop_ledger, partial(owner_of, service))
        async with (
            asyncio.timeout(WAIT_S),
            serving(app, num_connections, has_keys=True, turns=turns) as web,
        ):
            kept, writer = await web.connect(get("/me", key))
            assert (await answer(kept))[0] == 200
            async with pipelining(web, num_hostile, request_of_nobody):
                for _ in range(num_honest):
                    assert (await web.ask(get("/me", key)))[0] == 200
                writer.write(get("/me", key))
                assert (await answer(kept))[0] == 200
            writer.close()
        await service.close()

    run_event_loop(main())
