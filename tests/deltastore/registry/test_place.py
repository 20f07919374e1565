"""Paths where a registry is, where one may be made, and where none may."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltastore.errors import UsageError
from deltastore.registry import Registry
from deltastore.registry.claims import check_place, is_registry


def test_a_registry_a_missing_and_an_empty_directory_are_accepted(tmp_path: Path) -> None:
    check_place(Registry(tmp_path / "registry").root)
    check_place(tmp_path / "missing" / "deep")
    (tmp_path / "empty").mkdir()
    check_place(tmp_path / "empty")
    assert not is_registry(tmp_path / "empty")


def test_a_new_volume_and_a_registry_that_another_process_makes_now_are_accepted(tmp_path: Path) -> None:
    for name in ("lost+found", "objects", "tenants"):
        (tmp_path / name).mkdir()
    check_place(tmp_path)


def test_a_directory_with_other_contents_is_refused_with_the_name_of_one(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"is not a registry: .* 'config\.json'"):
        check_place(tmp_path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file and not a registry"):
        check_place(tmp_path / "file")
