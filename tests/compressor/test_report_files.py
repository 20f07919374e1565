"""The files of a report: which there are, how they take an older report's place, and what refuses them."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from compressor.report import check_report, write_report
from deltastore.errors import StorageFull, UsageError
from deltastore.format.manifest import TensorSpec
from tests.compressor.helpers.reporting import model_of, report_of

Image = pytest.importorskip("PIL.Image", reason="figures need matplotlib: pip install 'peraxis[report]'")
pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'peraxis[report]'")

ALL = {"report.html", "axis_counts.png", "error.png", "size.png"}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    write_report(tmp_path / "new" / "report", report_of(model_of(2)))
    assert names(tmp_path / "new" / "report") == ALL


def test_the_figures_are_images(tmp_path: Path) -> None:
    write_report(tmp_path, report_of(model_of(2)))
    for name in ALL - {"report.html"}:
        with Image.open(tmp_path / name) as image:
            image.load()
            assert min(image.size) > 50
            assert len(image.getcolors()) > 2


def test_the_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    for directory in ("one", "two"):
        write_report(tmp_path / directory, report_of(model_of(3)))
    for name in ALL:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_users_own_style_of_figures_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    write_report(tmp_path / "one", report_of(model_of(2)))
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    monkeypatch.setitem(matplotlib.rcParams, "axes.facecolor", "red")
    write_report(tmp_path / "two", report_of(model_of(2)))
    for name in ALL:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_new_report_takes_an_older_ones_place_and_leaves_other_files(tmp_path: Path) -> None:
    write_report(tmp_path, report_of(model_of(2)))
    (tmp_path / "notes.txt").write_text("mine")
    write_report(tmp_path, report_of({"norm.weight": TensorSpec(codec="whole", shape=[4])}, name="other"))
    assert names(tmp_path) == {"report.html", "size.png", "notes.txt"}
    assert "<h1>other</h1>" in (tmp_path / "report.html").read_text()


def test_a_full_disk_leaves_the_older_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(tmp_path, report_of(model_of(2)))
    before = {name: (tmp_path / name).read_bytes() for name in ALL}

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="No space left on device: free some space there"):
        write_report(tmp_path, report_of(model_of(3), name="other"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_check_leaves_nothing_behind(tmp_path: Path) -> None:
    check_report(tmp_path / "new" / "report")
    check_report(tmp_path)
    assert not names(tmp_path)


@pytest.mark.parametrize("place", ["file", "file/report", "dangling"])
def test_what_is_no_directory_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"^--report .* is no directory: choose another"):
        check_report(tmp_path / place)


def test_a_directory_in_a_files_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UsageError, match=r"report\.html in it is a directory"):
        check_report(tmp_path)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory that nobody may write to")
def test_a_directory_that_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--report /proc/report: /proc: .*: choose another --report$"):
        check_report(Path("/proc/report"))


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what makes an import fail
    with pytest.raises(UsageError, match=r"pip install 'peraxis\[report\]'"):
        check_report(tmp_path)
