"""The parser of multipart uploads: independent of chunk boundaries, and strict about everything but one file."""

from __future__ import annotations

import pytest

from server.api.uploads import FileField
from server.errors import InvalidRequest

TYPE = 'multipart/form-data; boundary="bound"'
CONTENT = b"first\r\n--boun\r\n--bound but no boundary\r\n\x00\xff" + bytes(range(256))


def form(*parts: tuple[str, bytes]) -> bytes:
    """Return a multipart body of named parts."""
    lines = [
        b'--bound\r\nContent-Disposition: form-data; name="%s"; filename="x"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n%s\r\n" % (name.encode(), content)
        for name, content in parts
    ]
    return b"".join(lines) + b"--bound--\r\n"


def file_in(body: bytes, chunk_size: int) -> bytes:
    field = FileField(TYPE)
    data = b"".join(
        piece
        for start in range(0, len(body), chunk_size)
        for piece in field.feed(body[start : start + chunk_size])
    )
    field.finish()
    return data


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 64, 150, 1 << 20])
def test_the_file_does_not_depend_on_chunk_boundaries(chunk_size: int) -> None:
    content = CONTENT.replace(b"\r\n--bound but", b"\r\n--bounds but")
    assert file_in(form(("file", content)), chunk_size) == content


def test_an_empty_file_is_a_file() -> None:
    assert file_in(form(("file", b"")), 10) == b""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (form(("other", b"x")), "has a field 'other'"),
        (form(("file", b"x"), ("file", b"y")), "has a field 'file'"),
        (form(("name", b"x"), ("file", b"y")), "has a field 'name'"),
        (form(("", b"x")), "has a field ''"),
        (form(("file", b"x"))[:-4], "ends before its closing boundary"),
        (b"", "ends before its closing boundary"),
        (b"no boundary at all", "cannot be read"),
        (b"--bound\r\nX-Long: " + b"a" * 100_000, "cannot be read"),
    ],
    ids=["other", "two", "more", "nameless", "cut", "empty", "text", "long header"],
)
def test_anything_but_one_whole_file_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        file_in(body, 1000)


@pytest.mark.parametrize(
    "content_type", ["multipart/form-data", "multipart/form-data; boundary=" + "b" * 1000]
)
def test_an_invalid_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidRequest, match="boundary"):
        FileField(content_type)
