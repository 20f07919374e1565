"""`POST /variants` over HTTP: valid uploads are published; refused ones leave nothing behind."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
import torch

from tests.deltastore.helpers.hostile import with_header, with_values
from tests.server.helpers.live_server import (
    ARTIFACT_PREFIX,
    Artifacts,
    LiveServer,
    connection,
    error_of,
    eventually,
)

MEBIBYTE = 1 << 20
OCTETS = {"Content-Type": "application/octet-stream"}


def send(server: LiveServer, name: str, content: Any, headers: dict[str, str] = OCTETS) -> httpx.Response:
    return server.client.post("/variants", params={"name": name}, content=content, headers=headers)


def partial_files(server: LiveServer) -> list[str]:
    return [path.name for path in (server.registry / "uploads").iterdir() if path.suffix == ".part"]


def is_absent(server: LiveServer, name: str) -> bool:
    """Return whether neither the variant nor a partial file exists."""
    return server.client.get(f"/variants/{name}").status_code == 404 and not partial_files(server)


def test_an_upload_is_published_and_answers(server: LiveServer, artifacts: Artifacts) -> None:
    reply = server.upload("raw", artifacts.plain)
    content = artifacts.plain.read_bytes()
    assert reply.status_code == 201
    assert reply.json() == {
        "name": "raw",
        "version": 1,
        "digest": f"sha256:{hashlib.sha256(content).hexdigest()}",
        "size_bytes": len(content),
        "active": True,
    }
    assert server.token_ids("raw", max_new_tokens=8) == server.token_ids("plain", max_new_tokens=8)


def test_an_upload_may_come_as_a_form(server: LiveServer, artifacts: Artifacts) -> None:
    content = artifacts.chatty.read_bytes()
    reply = server.client.post("/variants?name=form", files={"file": ("x.safetensors", content)})
    assert reply.status_code == 201
    assert reply.json()["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_an_upload_may_come_in_chunks_of_unknown_number(server: LiveServer, artifacts: Artifacts) -> None:
    content = artifacts.third.read_bytes()
    pieces = (content[start : start + 1000] for start in range(0, len(content), 1000))
    assert send(server, "chunked", pieces).status_code == 201


def test_the_same_bytes_again_are_the_same_version(server: LiveServer, artifacts: Artifacts) -> None:
    first, again = (server.upload("twice", artifacts.plain) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()


def test_bytes_of_an_older_version_do_not_roll_back(server: LiveServer, artifacts: Artifacts) -> None:
    server.upload("older", artifacts.plain)
    server.upload("older", artifacts.third)
    again = server.upload("older", artifacts.plain)
    assert (again.status_code, again.json()["version"], again.json()["active"]) == (200, 1, False)
    assert server.client.get("/variants/older").json()["active"] == 2


def test_a_version_may_arrive_without_becoming_active(server: LiveServer, artifacts: Artifacts) -> None:
    server.upload("quiet", artifacts.plain)
    reply = server.upload("quiet", artifacts.third, activate="false")
    assert (reply.status_code, reply.json()["version"], reply.json()["active"]) == (201, 2, False)
    assert server.generate("quiet", max_new_tokens=1).json()["version"] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: b"",
        lambda raw: b"not an artifact",
        lambda raw: raw[:-1],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw + b"\0",
        lambda raw: b"\xff" * 8 + raw[8:],
        with_header(lambda header: header.pop("__metadata__")),
        with_values("model.layers.0.mlp.up_proj.weight.scale_out", [float("nan")], torch.float16),
    ],
    ids=["empty", "text", "one byte short", "half", "one byte more", "endless header", "no manifest", "NaN"],
)
def test_a_malformed_artifact_is_refused(server: LiveServer, artifacts: Artifacts, change: Any) -> None:
    reply = send(server, "malformed", change(artifacts.plain.read_bytes()))
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_artifact")
    assert is_absent(server, "malformed")


def test_an_artifact_for_another_base_is_refused(server: LiveServer, artifacts: Artifacts) -> None:
    reply = server.upload("foreign", artifacts.foreign)
    assert (reply.status_code, error_of(reply)["code"]) == (409, "base_mismatch")
    assert is_absent(server, "foreign")


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "../up", ".hidden", "a b", "a" * 65, "base", "other", "a@1", "a\n"]
)
def test_a_name_that_no_variant_may_have_is_refused(
    server: LiveServer, artifacts: Artifacts, name: str
) -> None:
    reply = server.upload(name, artifacts.plain)
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_request")
    assert not partial_files(server)


@pytest.mark.parametrize("query", ["", "name=a&name2=b", "name=a&activate=perhaps"])
def test_a_query_that_is_not_understood_is_refused(server: LiveServer, query: str) -> None:
    reply = server.client.post(f"/variants?{query}", content=b"x", headers=OCTETS)
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_request")


def test_an_announced_size_over_the_limit_is_refused_before_a_byte_is_read(server: LiveServer) -> None:
    head = (
        "POST /variants?name=huge HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
    )
    with connection(server.url) as raw:
        raw.sendall(f"{head}Content-Length: {10**10}\r\n\r\n".encode())
        reply = HTTPResponse(raw)
        reply.begin()
        assert reply.status == 413
        assert json.load(reply)["error"]["code"] == "too_large"


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain"])
def test_a_body_of_another_type_is_refused(server: LiveServer, content_type: str) -> None:
    reply = send(server, "typed", b"x", {"Content-Type": content_type})
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_request", "Content-Type")


def test_a_compressed_body_is_refused(server: LiveServer) -> None:
    reply = send(server, "zipped", b"x", {**OCTETS, "Content-Encoding": "gzip"})
    assert (reply.status_code, error_of(reply)["code"]) == (415, "unsupported_media_type")
    assert is_absent(server, "zipped")


def test_a_form_that_ends_early_is_refused(server: LiveServer, artifacts: Artifacts) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    reply = send(server, "cut", body + artifacts.plain.read_bytes(), headers)
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_request")
    assert is_absent(server, "cut")


@pytest.mark.parametrize("as_form", [False, True])
def test_a_killed_upload_leaves_nothing_and_is_no_failure_of_the_server(
    server: LiveServer, artifacts: Artifacts, as_form: bool
) -> None:
    rejected, failed = (server.metric("uploads_total", result=result) for result in ("rejected", "failed"))
    kind = "multipart/form-data; boundary=b" if as_form else "application/octet-stream"
    head = f"POST /variants?name=killed HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    begin = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n' if as_form else b""
    with connection(server.url) as raw:
        raw.sendall(f"{head}Content-Length: {50 * MEBIBYTE}\r\n\r\n".encode() + begin)
        raw.sendall(artifacts.plain.read_bytes() + bytes(2 * MEBIBYTE))
        assert eventually(lambda: partial_files(server))
    assert eventually(lambda: server.metric("uploads_total", result="rejected") == rejected + 1)
    assert server.metric("uploads_total", result="failed") == failed
    assert is_absent(server, "killed")


@pytest.mark.parametrize(("as_form", "size_mib"), [(False, 512), (True, 128)])
def test_memory_stays_flat_however_large_the_body_is(
    server: LiveServer, as_form: bool, size_mib: int
) -> None:
    before, highest = server.resident_bytes(), 0

    def body() -> Iterator[bytes]:
        nonlocal highest
        yield b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n' if as_form else b""
        yield ARTIFACT_PREFIX
        block = bytes(4 * MEBIBYTE)
        for _ in range(size_mib // 4):
            yield block
            highest = max(highest, server.resident_bytes())
        yield b"\r\n--b--\r\n" if as_form else b""

    headers = {"Content-Type": "multipart/form-data; boundary=b"} if as_form else OCTETS
    reply = send(server, "zeros", body(), headers)
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_artifact")
    assert highest - before < 64 * MEBIBYTE
    assert is_absent(server, "zeros")


@pytest.mark.parametrize("announced", [True, False])
def test_a_file_that_cannot_be_an_artifact_is_refused_by_its_first_bytes(
    server: LiveServer, announced: bool
) -> None:
    length = f"Content-Length: {400 * MEBIBYTE}" if announced else "Transfer-Encoding: chunked"
    head = f"POST /variants?name=noise HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n"
    with connection(server.url) as raw:
        raw.sendall(head.encode() + (b"" if announced else b"1000\r\n") + b"\xff" * 4096)
        reply = HTTPResponse(raw)
        reply.begin()
        assert reply.status == 400
        assert json.load(reply)["error"]["code"] == "invalid_artifact"
    assert is_absent(server, "noise")


def begin_uploads(server: LiveServer, stack: ExitStack, number: int, content: bytes) -> list[socket.socket]:
    """Send the first half of an artifact on each of several connections."""
    uploads = []
    for index in range(number):
        raw = stack.enter_context(connection(server.url))
        head = f"POST /variants?name=slow-{index} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        raw.sendall(head.encode() + content[: len(content) // 2])
        uploads.append(raw)
    return uploads


def test_slow_uploads_do_not_hold_up_another(server: LiveServer, artifacts: Artifacts) -> None:
    content = artifacts.plain.read_bytes()
    with ExitStack() as stack:
        slow = begin_uploads(server, stack, 12, content)
        assert eventually(lambda: len(partial_files(server)) == 12)
        assert server.upload("honest", artifacts.plain).status_code == 201
        for raw in slow:
            raw.sendall(content[len(content) // 2 :])
        for raw in slow:
            reply = HTTPResponse(raw)
            reply.begin()
            assert reply.status == 201


def test_a_tenant_has_a_bounded_number_of_uploads_at_once(server: LiveServer, artifacts: Artifacts) -> None:
    with ExitStack() as stack:
        begin_uploads(server, stack, 16, artifacts.plain.read_bytes())
        assert eventually(lambda: len(partial_files(server)) == 16)
        reply = server.upload("one-more", artifacts.plain)
        assert (reply.status_code, error_of(reply)["code"]) == (503, "overloaded")
    assert eventually(lambda: server.upload("one-more", artifacts.plain).status_code == 201)


def test_an_artifact_larger_than_a_slot_is_refused_without_a_path_of_the_server(
    server: LiveServer, artifacts: Artifacts
) -> None:
    reply = server.upload("oversized", artifacts.oversized)
    assert (reply.status_code, error_of(reply)["code"]) == (413, "too_large")
    assert str(server.registry.parent) not in reply.text
