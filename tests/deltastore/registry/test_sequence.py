"""A sequence of numbered files: the newest counts, and of two changes that rest on one entry, one is refused."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deltastore.errors import RegistryError
from deltastore.registry.directory.files import DirectoryFiles
from deltastore.registry.storage import MODE, Storage
from deltastore.registry.variants import MAX_ENTRIES, NUM_KEPT, Entry, EntrySequence
from tests.deltastore.helpers.crash_storage import SteppedStorage


class Changes:
    """Writers of one sequence."""

    def __init__(self, root: Path, storage: Storage | None = None) -> None:
        storage = storage or SteppedStorage()
        self.directory = root
        self.files = DirectoryFiles(root, storage)
        self.entries = EntrySequence(root, "n-", self.files)

    def append(self, newest: Entry, value: int) -> bool:
        document = {"value": value, "after": newest.digest}
        return self.entries.append(newest, json.dumps(document).encode())

    def add(self, *values: int) -> None:
        for value in values:
            assert self.append(self.entries.newest(), value)

    def path(self, number: int) -> Path:
        return Path(self.entries.path(number))

    def collect(self) -> None:
        self.files.remove(self.entries.superseded())

    def value(self) -> int:
        raw = self.entries.newest().raw
        assert raw is not None
        value: int = json.loads(raw)["value"]
        return value


@pytest.fixture
def changes(tmp_path: Path) -> Changes:
    return Changes(tmp_path)


def test_a_sequence_begins_without_an_entry(changes: Changes) -> None:
    assert changes.entries.newest() == Entry(0, None)
    changes.add(5)
    assert changes.entries.newest().number == 1
    assert changes.value() == 5


def test_of_two_changes_that_rest_on_one_entry_the_second_is_refused(changes: Changes) -> None:
    changes.add(1)
    newest = changes.entries.newest()
    assert changes.append(newest, 2)
    assert not changes.append(newest, 3)
    assert changes.value() == 2


def test_numbers_beyond_six_digits_are_newer(changes: Changes) -> None:
    for number in (999_999, 1_000_000):
        changes.path(number).write_text(json.dumps({"value": number, "after": ""}))
    assert changes.value() == 1_000_000


def test_collection_leaves_the_newest_entries(changes: Changes) -> None:
    changes.add(*range(NUM_KEPT + 5))
    changes.collect()
    numbers = changes.entries.numbers(path.name for path in changes.directory.iterdir())
    assert numbers == list(range(6, NUM_KEPT + 6))


def test_repeated_changes_keep_a_bounded_number_of_entries_without_gc(changes: Changes) -> None:
    for value in range(3 * MAX_ENTRIES):
        changes.add(value)
        assert len(list(changes.directory.iterdir())) <= MAX_ENTRIES + 1
    assert changes.value() == 3 * MAX_ENTRIES - 1


def test_a_change_is_made_although_older_entries_cannot_be_removed(changes: Changes) -> None:
    class NotRemoving(SteppedStorage):
        def unlink(self, path: Path) -> None:
            if path.name.startswith("n-"):
                raise PermissionError(path)
            super().unlink(path)

    changes.add(*range(MAX_ENTRIES))
    here = Changes(changes.directory, NotRemoving())
    here.add(99)
    assert changes.value() == 99


class FullDisk(SteppedStorage):
    """A disk with room for two files, and for as many more as are removed."""

    num_free = 2

    def create(self, path: Path, mode: int = MODE) -> int:
        if not self.num_free:
            raise OSError(errno.ENOSPC, "full")
        self.num_free -= 1
        return super().create(path, mode)

    def unlink(self, path: Path) -> None:
        frees_a_block = path.stat().st_nlink == 1
        super().unlink(path)
        self.num_free += frees_a_block


def test_repeated_changes_on_a_full_disk_need_room_for_two_entries_and_no_reserve(tmp_path: Path) -> None:
    changes = Changes(tmp_path, FullDisk())
    changes.add(*range(20))
    assert changes.value() == 19


def test_a_writer_that_was_suspended_until_its_number_was_free_again_is_refused(changes: Changes) -> None:
    changes.add(1)
    late = changes.entries.newest()
    changes.add(*range(NUM_KEPT + 1))
    changes.collect()
    assert changes.path(late.number + 1).exists() is False
    assert changes.path(late.number + 2).exists()
    before = changes.value()
    assert not changes.append(late, 99)
    assert changes.value() == before


def test_a_writer_that_cannot_know_if_it_was_late_says_so(changes: Changes) -> None:
    changes.add(1)
    late = changes.entries.newest()
    changes.add(*range(NUM_KEPT + 2))
    changes.collect()
    before = changes.value()
    with pytest.raises(RegistryError, match="too many changes meanwhile"):
        changes.append(late, 99)
    assert changes.value() == before


def after_the_link(change: Callable[[], object]) -> SteppedStorage:
    """Return storage that lets another server run right after a link."""

    class Interrupted(SteppedStorage):
        def link(self, source: Path, target: Path) -> None:
            super().link(source, target)
            change()

    return Interrupted()


def test_a_change_that_others_followed_at_once_is_acknowledged(changes: Changes) -> None:
    changes.add(1)
    here = Changes(changes.directory, after_the_link(lambda: changes.add(3)))
    assert here.append(here.entries.newest(), 2)
    assert changes.value() == 3


def test_a_repeated_link_that_finds_its_own_file_has_been_made(tmp_path: Path) -> None:
    class Repeating(Storage):
        """As an NFS client that sends a request again because the reply was lost."""

        def link(self, source: Path, target: Path) -> None:
            super().link(source, target)
            super().link(source, target)

    assert Repeating().add(tmp_path / "file", b"mine")
    assert not Storage().add(tmp_path / "file", b"other")
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_draft_that_a_collection_took_is_written_again(tmp_path: Path) -> None:
    class Taken(Storage):
        num_links = 0

        def link(self, source: Path, target: Path) -> None:
            self.num_links += 1
            if self.num_links < 3:
                source.unlink()
            super().link(source, target)

    assert Taken().add(tmp_path / "file", b"mine")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
