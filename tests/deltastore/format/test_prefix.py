"""The first bytes of an upload tell what can be no artifact."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from deltastore.errors import ArtifactError
from deltastore.format.header import (
    FREE_HEADER_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADER_SHARE,
    check_prefix,
)
from tests.helpers.tiny_artifact import write_tiny

GIGABYTES = 8 << 30


def test_the_beginning_of_an_artifact_passes_however_short_it_is(tmp_path: Path) -> None:
    write_tiny(tmp_path / "a")
    raw = (tmp_path / "a").read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(raw)):
        check_prefix(raw[:length], len(raw))


@pytest.mark.parametrize(
    "first_bytes",
    [b"\xff" * 8, b"\xff" * 100, b"PK\x03\x04\x14\0\0\0", b"\x80\x02}q\0X\x07\0", b"<!DOCTYPE html>"],
    ids=["0xFF", "much 0xFF", "zip", "pickle", "page"],
)
def test_a_header_length_that_no_file_can_have_is_refused(first_bytes: bytes) -> None:
    with pytest.raises(
        ArtifactError, match=r"the upload: not a safetensors file, or a damaged one: its header claims"
    ):
        check_prefix(first_bytes, GIGABYTES)


def test_a_header_that_is_too_long_for_the_file_is_refused() -> None:
    size = 1 << 20
    longest = FREE_HEADER_BYTES + size // MAX_HEADER_SHARE
    check_prefix(struct.pack("<Q", longest), size)
    with pytest.raises(ArtifactError, match=f"more than the {longest} allowed in a file of {size}"):
        check_prefix(struct.pack("<Q", longest + 1), size)
    with pytest.raises(ArtifactError, match=f"more than the {MAX_HEADER_BYTES} allowed"):
        check_prefix(struct.pack("<Q", MAX_HEADER_BYTES + 1), GIGABYTES)


@pytest.mark.parametrize("rest", [b"[", b"\0" * 9, b' {"a"'])
def test_a_header_that_does_not_begin_with_a_brace_is_refused(rest: bytes) -> None:
    with pytest.raises(
        ArtifactError, match=r"the upload: not a safetensors file: its header does not begin with '\{'"
    ):
        check_prefix(struct.pack("<Q", 4088) + rest, GIGABYTES)
