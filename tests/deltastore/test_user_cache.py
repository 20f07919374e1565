"""Files of the user's cache are read only whole, unchanged, and from a directory that others cannot write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltastore.user_cache import MAX_FILES, CacheDirectory, user_cache_dir


@pytest.fixture
def directory(tmp_path: Path) -> CacheDirectory:
    return CacheDirectory(tmp_path / "peraxis" / "things")


def test_a_file_is_read_as_it_was_written_and_replaced_as_a_whole(directory: CacheDirectory) -> None:
    directory.write("one", b"a longer first")
    directory.write("one", b"second")
    assert directory.read("one") == b"second"
    assert os.listdir(directory.path) == ["one"]


def test_only_the_user_can_enter_a_directory_that_was_created(directory: CacheDirectory) -> None:
    directory.write("one", b"content")
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert (directory.path / "one").stat().st_mode & 0o777 == 0o600


def test_a_missing_file_and_a_missing_directory_read_as_nothing(directory: CacheDirectory) -> None:
    assert directory.read("one") is None
    directory.write("one", b"content")
    assert directory.read("two") is None


@pytest.mark.parametrize("keep", [0, 7, 32, 38])
def test_a_file_that_was_cut_off_reads_as_nothing(directory: CacheDirectory, keep: int) -> None:
    directory.write("one", b"content")
    os.truncate(directory.path / "one", keep)
    assert directory.read("one") is None


def test_a_changed_byte_anywhere_reads_as_nothing(directory: CacheDirectory) -> None:
    directory.write("one", b"content")
    stored = (directory.path / "one").read_bytes()
    for index in range(len(stored)):
        changed = bytearray(stored)
        changed[index] ^= 1
        (directory.path / "one").write_bytes(changed)
        assert directory.read("one") is None


def test_a_renamed_file_reads_as_nothing(directory: CacheDirectory) -> None:
    directory.write("one", b"content")
    os.rename(directory.path / "one", directory.path / "two")
    assert directory.read("two") is None


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_can_write_is_not_used(directory: CacheDirectory, mode: int) -> None:
    directory.write("one", b"content")
    directory.path.chmod(mode)
    assert directory.read("one") is None
    with pytest.raises(PermissionError, match="chmod go-w"):
        directory.write("two", b"content")


def test_a_file_that_others_can_write_is_not_used(directory: CacheDirectory) -> None:
    directory.write("one", b"content")
    (directory.path / "one").chmod(0o666)
    assert directory.read("one") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_not_used_but_those_of_root_are(directory: CacheDirectory) -> None:
    directory.write("one", b"content")
    assert directory.read("one") == b"content"
    os.chown(directory.path / "one", 65534, 65534)
    assert directory.read("one") is None


def test_links_are_not_followed(directory: CacheDirectory, tmp_path: Path) -> None:
    directory.write("one", b"content")
    (tmp_path / "link").symlink_to(directory.path)
    os.rename(directory.path / "one", tmp_path / "one")
    (directory.path / "one").symlink_to(tmp_path / "one")
    assert directory.read("one") is None
    assert CacheDirectory(tmp_path / "link").read("one") is None


def test_the_oldest_files_make_place_for_new_ones(directory: CacheDirectory) -> None:
    for number in range(MAX_FILES):
        directory.write(f"{number}", b"content")
        os.utime(directory.path / f"{number}", (number, number))
    directory.write("new", b"content")
    assert len(os.listdir(directory.path)) == MAX_FILES
    assert directory.read("0") is None
    assert directory.read("1") == directory.read("new") == b"content"


def test_a_write_that_fails_leaves_no_partial_file(
    directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write("one", b"content")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        directory.write("two", b"content")
    assert os.listdir(directory.path) == ["one"]


def test_a_user_without_a_home_has_a_directory_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(OSError, match="Not a directory"):
        CacheDirectory(user_cache_dir() / "things").write("one", b"content")
