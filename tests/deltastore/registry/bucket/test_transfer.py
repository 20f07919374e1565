"""Fetching an object of a bucket by ranges."""

from __future__ import annotations

import os
from pathlib import Path

import obstore
import pytest

from deltastore.errors import CorruptObject
from deltastore.registry.bucket.objects import RANGE_BYTES, fetch_object
from tests.helpers.s3_server import Bucket


def fetched(bucket: Bucket, file: Path, size: int) -> bytes:
    with file.open("wb") as opened:
        fetch_object(bucket.store("registry"), "objects/name", size, opened.fileno())
    return file.read_bytes()


@pytest.mark.parametrize("size", [1, RANGE_BYTES, 2 * RANGE_BYTES + 1])
def test_a_fetched_object_has_all_its_bytes(bucket: Bucket, tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    obstore.put(bucket.store("registry"), "objects/name", content)
    assert fetched(bucket, tmp_path / "file", size) == content


@pytest.mark.parametrize("difference", [-1, 1])
def test_an_object_of_another_size_is_corrupt(bucket: Bucket, tmp_path: Path, difference: int) -> None:
    obstore.put(bucket.store("registry"), "objects/name", bytes(RANGE_BYTES))
    with pytest.raises(CorruptObject, match="objects/name has 8388608 bytes"):
        fetched(bucket, tmp_path / "file", RANGE_BYTES + difference)


def test_a_missing_object_is_not_found(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fetched(bucket, tmp_path / "file", RANGE_BYTES)
