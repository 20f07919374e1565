"""The probe tells a registry that is gone from one that can only be read."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deltastore.errors import RegistryUnavailable, RegistryUnwritable
from deltastore.registry import Registry
from server.registry_calls import probe
from tests.conftest import SmallDisk


def test_the_probe_tells_a_registry_from_a_volume_that_is_gone(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry")
    probe(registry)
    (tmp_path / "registry").rename(tmp_path / "away")
    (tmp_path / "registry").mkdir()
    with pytest.raises(RegistryUnavailable, match="is gone"):
        probe(registry)


def test_the_probe_tells_a_registry_on_a_read_only_volume(small_disk: SmallDisk) -> None:
    disk = small_disk(1 << 20)
    registry = Registry(disk / "registry")
    probe(registry)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(RegistryUnwritable, match="is read-only") as raised:
        probe(registry)
    assert str(disk) not in raised.value.public


def test_the_probe_tells_a_registry_without_the_right_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path / "registry")
    # Root, as which the tests may run, has every right.
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "variants")
    with pytest.raises(RegistryUnwritable, match="variants cannot be written"):
        probe(registry)
