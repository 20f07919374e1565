"""The files of a model card: which there are, how they replace an older card's, and what is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from compressor.model_card import check_card_directory, write_card
from deltastore.errors import StorageFull, UsageError
from deltastore.format.manifest import TensorSpec
from tests.compressor.helpers.model_cards import facts_of, model_of

ALL = {"README.md"}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    write_card(tmp_path / "new" / "report", facts_of(model_of(2)))
    assert names(tmp_path / "new" / "report") == ALL


def test_the_same_facts_give_the_same_bytes(tmp_path: Path) -> None:
    for directory in ("one", "two"):
        write_card(tmp_path / directory, facts_of(model_of(3)))
    for name in ALL:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_new_card_replaces_an_older_one_and_leaves_other_files(tmp_path: Path) -> None:
    write_card(tmp_path, facts_of(model_of(2)))
    (tmp_path / "notes.txt").write_text("mine")
    write_card(tmp_path, facts_of({"norm.weight": TensorSpec(codec="whole", shape=[4])}, name="other"))
    assert names(tmp_path) == {"README.md", "notes.txt"}
    assert "# `other`\n" in (tmp_path / "README.md").read_text()


def test_a_full_disk_leaves_the_older_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_card(tmp_path, facts_of(model_of(2)))
    before = {name: (tmp_path / name).read_bytes() for name in ALL}

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="No space left on device: free some space there"):
        write_card(tmp_path, facts_of(model_of(3), name="other"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_check_leaves_nothing_behind(tmp_path: Path) -> None:
    check_card_directory(tmp_path / "new" / "report")
    check_card_directory(tmp_path)
    assert not names(tmp_path)


@pytest.mark.parametrize("place", ["file", "file/report", "dangling"])
def test_what_is_no_directory_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"^`report` .* is no directory: choose another"):
        check_card_directory(tmp_path / place)


def test_a_directory_in_a_files_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").mkdir()
    with pytest.raises(UsageError, match=r"README\.md in it is a directory"):
        check_card_directory(tmp_path)


def test_a_readme_of_another_hand_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# My model")
    with pytest.raises(UsageError, match=r"its README\.md is not a card of a delta: move it away"):
        check_card_directory(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My model"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory without write permission")
def test_a_directory_that_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^`report` /proc/report: /proc: .*: choose another `report`$"):
        check_card_directory(Path("/proc/report"))
