"""Keys after a power loss: what was acknowledged holds, and half a file is never a key."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from deltastore.errors import StorageFull
from deltastore.registry import Registry
from server.errors import KeyNotFound
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from tests.deltastore.helpers.crash_storage import RefusingStorage
from tests.deltastore.helpers.volatile_storage import VolatileStorage, rebuild


def never() -> bool:
    return False


def always() -> bool:
    return True


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A disk with a registry that has one key."""
    registry = Registry(tmp_path / "disk" / "registry")
    KeyStore(registry.root).create(silent(tmp_path), "acme", ["inference"])
    return tmp_path / "disk"


def silent(tmp_path: Path) -> Auditor:
    """Return an auditor whose lines go to another disk."""
    return Auditor(AuditLog(tmp_path / "elsewhere"))


def test_a_key_that_was_acknowledged_survives_a_power_loss(base: Path, tmp_path: Path) -> None:
    root, storage = base / "registry", VolatileStorage(base)
    old = set(KeyStore(root).records())
    made = KeyStore(root, storage).create(silent(tmp_path), "globex", ["admin"])
    for moment in storage.moments:
        for keeps_name, keeps_bytes in ((never, never), (always, never), (never, always), (always, always)):
            rebuild(base, moment.surviving(keeps_name, keeps_bytes))
            assert set(KeyStore(root).records()) - old <= {made.id}
            assert old <= set(KeyStore(root).records())
    rebuild(base, storage.now().surviving(never, never))
    assert KeyStore(root).records()[made.id] == made.record
    assert Registry(root).check().is_clean


def test_a_revoked_key_does_not_come_back_after_a_power_loss(base: Path, tmp_path: Path) -> None:
    root, storage = base / "registry", VolatileStorage(base)
    (key_id,) = KeyStore(root).records()
    KeyStore(root, storage).revoke(silent(tmp_path), key_id)
    rebuild(base, storage.now().surviving(never, never))
    assert KeyStore(root).records() == {}


def test_a_revocation_that_a_dead_process_left_unsynced_is_durable_once_another_is_told_of_it(
    base: Path, tmp_path: Path
) -> None:
    root, storage = base / "registry", VolatileStorage(base)
    (key_id,) = KeyStore(root).records()
    storage.stop_at = len(storage.calls) + 1
    keys = KeyStore(root, storage)
    with pytest.raises(KeyboardInterrupt):
        keys.revoke(silent(tmp_path), key_id)
    with pytest.raises(KeyNotFound):
        keys.revoke(silent(tmp_path), key_id)
    rebuild(base, storage.now().surviving(never, never))
    assert KeyStore(root).records() == {}


@pytest.mark.parametrize("number", range(4))
def test_a_full_disk_is_reported_and_leaves_no_key(base: Path, tmp_path: Path, number: int) -> None:
    root = base / "registry"
    old = KeyStore(root).records()
    full = OSError(errno.ENOSPC, "no room")
    storage = RefusingStorage(number, full, ("create", "write", "fsync", "rename"))
    with pytest.raises(StorageFull, match=f"under {root} is full"):
        KeyStore(root, storage).create(silent(tmp_path), "globex", ["admin"])
    assert KeyStore(root).records() == old
    assert [path for path in (root / "tenants" / "keys").iterdir() if path.suffix != ".json"] == []
