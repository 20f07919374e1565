"""`Content-Digest` on uploads: compared with the content, as RFC 9530 describes it."""

from __future__ import annotations

import base64
import hashlib
from contextlib import suppress

import httpx
import pytest
from fastapi import Request

from server.api.uploads import expected_sha256
from server.errors import InvalidRequest
from tests.server.helpers.live_server import Artifacts, LiveServer, error_of

OCTETS = "application/octet-stream"


def sha256_member(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"


def parsed(*headers: str) -> str | None:
    raw = [(b"content-digest", header.encode()) for header in headers]
    return expected_sha256(Request({"type": "http", "headers": raw}))


def send(
    server: LiveServer, name: str, content: bytes, digest: str, content_type: str = OCTETS
) -> httpx.Response:
    headers = {"Content-Type": content_type, "Content-Digest": digest}
    return server.client.post("/variants", params={"name": name}, content=content, headers=headers)


def form_of(content: bytes) -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + content + b"\r\n--b--\r\n"


def is_absent(server: LiveServer, name: str) -> bool:
    """Return whether neither the variant nor a partial file exists."""
    partial = [path for path in (server.registry / "uploads").iterdir() if path.suffix == ".part"]
    return server.client.get(f"/variants/{name}").status_code == 404 and not partial


def test_a_matching_digest_is_accepted(server: LiveServer, artifacts: Artifacts) -> None:
    content = artifacts.plain.read_bytes()
    assert send(server, "digested", content, sha256_member(content)).status_code == 201


def test_another_digest_is_refused(server: LiveServer, artifacts: Artifacts) -> None:
    reply = send(server, "corrupted", artifacts.plain.read_bytes(), sha256_member(b"other bytes"))
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_artifact")
    assert is_absent(server, "corrupted")


def test_the_digest_of_a_form_is_that_of_the_whole_body(server: LiveServer, artifacts: Artifacts) -> None:
    content = artifacts.plain.read_bytes()
    body, form = form_of(content), "multipart/form-data; boundary=b"
    assert send(server, "form-digest", body, sha256_member(body), form).status_code == 201
    reply = send(server, "file-digest", body, sha256_member(content), form)
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_artifact")
    assert is_absent(server, "file-digest")


def test_a_malformed_digest_is_refused_before_the_body_is_read(server: LiveServer) -> None:
    reply = send(server, "undigested", b"x", "sha-256=abc")
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_request", "Content-Digest")


@pytest.mark.parametrize(
    "header",
    [
        "sha-256=abc", "sha-256=:abc", "sha-256=:a b:", "sha-256=:A:", "sha-256=:AAAA:", "sha-256", "SHA-256=:AAAA:",
        "sha-256=:AAAA:;=1", "sha-256=:\u00e9:", f"{sha256_member(b'x')}x", f"x{sha256_member(b'x')}",
        sha256_member(b"x").upper(), sha256_member(b"x").replace("=:", '="', 1),
        f"sha-256=:{hashlib.sha256(b'x').hexdigest()}:", f"md5=:AAAA: {sha256_member(b'x')}",
    ],
)  # fmt: skip
def test_a_sha_256_that_is_none_is_refused(header: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parsed(header)
    assert refused.value.param == "Content-Digest"


@pytest.mark.parametrize(
    "header", ["md5=:AAAA:", "sha-512=:AAAA:, unixsum=:AQ==:", "sha=:AAAA:;q=1", "md5=1", "=:AAAA:", "", "  "]
)
def test_other_algorithms_are_ignored(header: str) -> None:
    assert parsed(header) is None


@pytest.mark.parametrize(
    "form",
    [
        "{}",
        "  {}\t",
        "sha-512=:AAAA:,{}",
        "{} \t, sha-512=:AAAA:",
        "{};note=1; other",
        '{};note="a, b:c"',
    ],
)
def test_sha_256_is_found_in_every_form_of_the_header(form: str) -> None:
    assert parsed(form.format(sha256_member(b"content"))) == hashlib.sha256(b"content").hexdigest()


def test_a_digest_without_padding_is_understood() -> None:
    assert parsed(
        sha256_member(b"content").replace("=:", "=\0", 1).replace("=:", ":").replace("\0", ":")
    ) == (hashlib.sha256(b"content").hexdigest())


def test_several_headers_are_one_dictionary_whose_last_value_counts() -> None:
    first, last = sha256_member(b"first"), sha256_member(b"last")
    assert parsed("md5=:AAAA:", first, last) == hashlib.sha256(b"last").hexdigest()


@pytest.mark.parametrize("piece", ["a=::;b", "sha-256=:", "sha-256=::, ", ",", " \t", "sha-256=:" + "A" * 43])
def test_a_long_hostile_header_ends_at_once(piece: str) -> None:
    with suppress(InvalidRequest):
        assert parsed(piece * (64_000 // len(piece)) + "!") is None
