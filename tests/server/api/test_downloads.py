"""Downloads send verified bytes alone, without a thread or much memory for a client that is slow."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltastore.errors import VariantNotFound, VariantQuarantined
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.registry.uploads import CHUNK_BYTES
from server.api.downloads import NUM_THREADS, ArtifactResponse, Downloads, etag_of, selected
from server.errors import QueueFull
from server.fairness import FairBudget
from tests.deltastore.helpers.crash_storage import push
from tests.deltastore.helpers.stored import flip_byte
from tests.server.helpers.live_server import WAIT_S, Artifacts, LiveServer, error_of, eventually

NUM_CHUNKS = 10
SIZE = NUM_CHUNKS * CHUNK_BYTES - 777


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


@pytest.fixture
def record(registry: Registry, content: bytes) -> VersionRecord:
    return push(registry, content, "a").record


def app_of(registry: Registry, record: VersionRecord, max_unsent: int = 1 << 30) -> ASGIApp:
    """Return an application that sends one version; the tenant is a header of the request."""
    downloads = Downloads(FairBudget(max_unsent, "unsent bytes"))

    async def download(scope: Scope, receive: Receive, send: Send) -> None:
        tenant = dict(scope["headers"]).get(b"tenant", b"").decode()
        reply = ArtifactResponse(registry, record, selected(Request(scope), record), downloads, tenant)
        try:
            await reply(scope, receive, send)
        except QueueFull:
            await Response("full", 503)(scope, receive, send)

    return download


@pytest.fixture
def app(registry: Registry, record: VersionRecord) -> ASGIApp:
    return app_of(registry, record)


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Serve an application on a thread and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


@pytest.fixture
def url(app: ASGIApp) -> Iterator[str]:
    with served(app) as url:
        yield url


def messages_of(app: ASGIApp, **headers: str) -> list[Message]:
    """Make one request without a web server and return what the application sends."""
    sent: list[Message] = []
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": raw, "asgi": {"spec_version": "2.4"}}

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def main() -> None:
        await app(scope, receive, send)

    asyncio.run(main())
    return sent


class Reads:
    """Counts the reads of chunks, and holds them while `held` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        real = os.preadv

        def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
            if len(buffers[0]):
                self.threads.append(threading.current_thread().name)
            assert self.may_go_on.wait(30)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", counted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, record: VersionRecord) -> Reads:
    return Reads(monkeypatch)


def test_an_artifact_of_many_chunks_is_sent_whole_and_each_chunk_is_read_once(
    url: str, content: bytes, record: VersionRecord, reads: Reads
) -> None:
    reply = httpx.get(url, timeout=WAIT_S)
    assert (reply.status_code, reply.content) == (200, content)
    assert reply.headers["Content-Length"] == str(SIZE)
    assert reply.headers["ETag"] == f'"sha256:{record.digest}"'
    assert len(reads.threads) == NUM_CHUNKS
    assert all(name.startswith("download") for name in reads.threads)


@pytest.mark.parametrize(
    ("header", "part", "num_reads"),
    [
        (f"bytes={CHUNK_BYTES - 5}-{CHUNK_BYTES + 4}", slice(CHUNK_BYTES - 5, CHUNK_BYTES + 5), 2),
        (f"bytes={CHUNK_BYTES}-{2 * CHUNK_BYTES - 1}", slice(CHUNK_BYTES, 2 * CHUNK_BYTES), 1),
        ("bytes=-1", slice(-1, None), 1),
        (f"bytes=5-{SIZE + 1000}", slice(5, None), NUM_CHUNKS),
        (f"bytes=-{SIZE + 1000}", slice(0, None), NUM_CHUNKS),
    ],
)
def test_a_range_is_sent_from_its_chunks_alone(
    url: str, content: bytes, reads: Reads, header: str, part: slice, num_reads: int
) -> None:
    reply = httpx.get(url, headers={"Range": header}, timeout=WAIT_S)
    assert (reply.status_code, reply.content) == (206, content[part])
    first, last, _ = part.indices(SIZE)
    assert reply.headers["Content-Range"] == f"bytes {first}-{last - 1}/{SIZE}"
    assert len(reads.threads) == num_reads


@pytest.mark.parametrize(
    "header", ["bytes=0-9, 20-29", "bytes=5-9,5-9", "bytes=" + ",".join(f"{n}-{n}" for n in range(101))]
)
def test_several_ranges_give_the_whole(app: ASGIApp, header: str) -> None:
    sent = messages_of(app, range=header)
    assert (sent[0]["status"], sum(len(message["body"]) for message in sent[1:])) == (200, SIZE)


@pytest.mark.parametrize("matches", [True, False])
def test_a_range_holds_only_for_the_artifact_that_it_was_asked_of(
    app: ASGIApp, record: VersionRecord, matches: bool
) -> None:
    sent = messages_of(app, range="bytes=0-9", if_range=etag_of(record) if matches else '"other"')
    assert sent[0]["status"] == (206 if matches else 200)


def test_corruption_before_the_first_byte_is_an_error_of_its_own(
    app: ASGIApp, registry: Registry, record: VersionRecord
) -> None:
    flip_byte(registry.object_path(record), CHUNK_BYTES - 1)
    with pytest.raises(VariantQuarantined, match="default/a@1: its stored object is corrupt"):
        messages_of(app)
    assert registry.is_quarantined(record)


def test_corruption_of_a_later_chunk_breaks_the_connection_off_before_its_bytes(
    url: str, registry: Registry, record: VersionRecord, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    flip_byte(registry.object_path(record), 3 * CHUNK_BYTES + 5)
    received = bytearray()

    def read_all() -> None:
        with httpx.stream("GET", url, timeout=WAIT_S) as reply:
            assert reply.status_code == 200
            for piece in reply.iter_raw():
                received.extend(piece)

    with pytest.raises(httpx.RemoteProtocolError):
        read_all()
    assert received == content[: 3 * CHUNK_BYTES]
    assert registry.is_quarantined(record)
    assert "a download of default/a@1 was broken off" in caplog.text


def test_a_chunk_that_is_not_asked_for_may_be_corrupt(
    url: str, registry: Registry, record: VersionRecord, content: bytes
) -> None:
    flip_byte(registry.object_path(record), 0)
    assert httpx.get(url, headers={"Range": "bytes=-10"}, timeout=WAIT_S).content == content[-10:]


def test_a_truncated_object_is_quarantined_and_a_missing_one_is_not_found(
    app: ASGIApp, registry: Registry, record: VersionRecord
) -> None:
    os.truncate(registry.object_path(record), SIZE - 1)
    with pytest.raises(VariantQuarantined):
        messages_of(app)
    (registry.root / "quarantine" / f"{record.digest}.json").unlink()
    with pytest.raises(VariantNotFound, match="its object is no longer in the registry"):
        messages_of(app)


def unread_download(url: str, tenant: str = "") -> socket.socket:
    """Ask for the artifact through a socket that nobody reads, whose buffer holds little of it."""
    address = httpx.URL(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((address.host, address.port))
    client.sendall(f"GET / HTTP/1.1\r\nHost: test\r\nTenant: {tenant}\r\n\r\n".encode())
    return client


def test_a_client_that_does_not_read_holds_no_thread_and_little_memory(
    url: str, content: bytes, reads: Reads
) -> None:
    stalled = [unread_download(url) for _ in range(2 * NUM_THREADS)]
    try:
        assert eventually(lambda: len(reads.threads) >= len(stalled))
        assert httpx.get(url, timeout=WAIT_S).content == content
        # The rest is in buffers of the kernel.
        assert len(reads.threads) - NUM_CHUNKS < len(stalled) * NUM_CHUNKS / 2
    finally:
        for client in stalled:
            client.close()


def test_chunks_of_slow_clients_are_bounded_and_hold_up_no_other_tenant(
    registry: Registry, record: VersionRecord, content: bytes, reads: Reads
) -> None:
    # Of five chunks a tenant may hold two: a third is more than is left free behind it.
    with served(app_of(registry, record, 5 * CHUNK_BYTES)) as url, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(unread_download(url, "slow"))
        assert eventually(lambda: len(reads.threads) >= 2)
        assert httpx.get(url, headers={"Tenant": "slow"}, timeout=WAIT_S).status_code == 503
        assert httpx.get(url, headers={"Tenant": "other"}, timeout=WAIT_S).content == content


def test_only_so_many_downloads_hash_at_once(url: str, reads: Reads) -> None:
    reads.may_go_on.clear()
    download = partial(httpx.get, url, timeout=WAIT_S)
    clients = [threading.Thread(target=download) for _ in range(3 * NUM_THREADS)]
    for client in clients:
        client.start()
    assert eventually(lambda: len(reads.threads) == NUM_THREADS)
    reads.may_go_on.set()
    for client in clients:
        client.join()
    assert len(reads.threads) == len(clients) * NUM_CHUNKS
    assert len(set(reads.threads)) == NUM_THREADS


def test_a_client_that_leaves_ends_its_download(
    url: str, registry: Registry, record: VersionRecord, reads: Reads
) -> None:
    stored = str(registry.object_path(record))

    def is_open() -> bool:
        links = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return any(os.path.realpath(link) == stored for link in links)

    with unread_download(url):
        assert eventually(is_open)
    assert eventually(lambda: not is_open())
    assert len(reads.threads) < NUM_CHUNKS


@pytest.mark.parametrize(
    ("damage", "status", "code"),
    [("changed", 424, "variant_quarantined"), ("missing", 404, "model_not_found")],
)
def test_a_damaged_object_is_never_sent_by_a_server(
    server: LiveServer, artifacts: Artifacts, damage: str, status: int, code: str
) -> None:
    name = f"download-{damage}"
    source = artifacts.spare[1]
    digest = server.upload(name, source).json()["digest"].removeprefix("sha256:")
    stored = server.registry / "objects" / digest
    if damage == "changed":
        flip_byte(stored, stored.stat().st_size // 2)
    else:
        stored.unlink()
    for _ in range(2):
        reply = server.client.get(f"/variants/{name}/artifact")
        assert (reply.status_code, error_of(reply)["code"]) == (status, code)
        assert str(server.registry) not in reply.text
    assert server.upload(name, source).status_code == 200
    assert server.client.get(f"/variants/{name}/artifact").content == source.read_bytes()
