"""Keys and limits while the registry's volume is gone, hangs or comes back."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deltastore.errors import RegistryUnavailable
from deltastore.registry import Registry
from server.errors import InvalidApiKey
from server.registry_calls import RegistryCalls, probe
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.limits import LimitsDirectory
from server.tenants.records import FRESH_S, RecordDirectory
from server.tenants.tenant import TenantLimits


@pytest.fixture
def auditor(tmp_path: Path) -> Auditor:
    return Auditor(AuditLog(tmp_path / "audit"))


class SlowVolume:
    """The time that readings take: none, or until they may end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.answers.set()
        read = RecordDirectory.read

        def slowly(directory: RecordDirectory[Any]) -> Any:
            assert self.answers.wait(60)
            return read(directory)

        monkeypatch.setattr(RecordDirectory, "read", slowly)


def served(root: Path) -> tuple[KeyStore, RegistryCalls]:
    """Return the keys of a registry as a server has them."""
    calls = RegistryCalls(str(root), partial(probe, Registry(root)))
    return KeyStore(root, calls=calls), calls


@pytest.mark.parametrize("failure", ["gone", "empty", "a file"])
def test_known_keys_go_on_while_the_volume_is_gone_and_unknown_ones_are_not_called_invalid(
    auditor: Auditor, tmp_path: Path, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A look is waited for, however slow this machine is.
    monkeypatch.setattr("server.tenants.records.PATIENCE_S", 60.0)
    root, away = tmp_path / "registry", tmp_path / "away"
    keys, _ = served(root)
    old, later = (keys.create(auditor, "acme", ["inference"]) for _ in range(2))

    async def talk() -> None:
        assert (await keys.caller(old.text)).key_id == old.id
        await asyncio.to_thread(keys.revoke, auditor, later.id)
        root.rename(away)
        if failure == "empty":
            root.mkdir()
        if failure == "a file":
            root.write_text("")
        for _ in range(3):
            await asyncio.sleep(FRESH_S)
            assert (await keys.caller(old.text)).key_id == old.id
        for unknown in (later.text, f"pxk_{'0' * 12}_{'0' * 64}"):
            with pytest.raises(RegistryUnavailable):
                await keys.caller(unknown)
        with pytest.raises(InvalidApiKey):
            await keys.caller("no key")
        with pytest.raises(RegistryUnavailable):
            await asyncio.to_thread(keys.create, auditor, "acme", ["inference"])
        with pytest.raises(RegistryUnavailable):
            await asyncio.to_thread(keys.revoke, auditor, old.id)
        if failure != "gone":
            root.rename(tmp_path / "below")
        away.rename(root)
        with pytest.raises(InvalidApiKey):
            await keys.caller(later.text)
        await asyncio.to_thread(KeyStore(root).revoke, auditor, old.id)
        await asyncio.sleep(FRESH_S)
        with pytest.raises(InvalidApiKey):
            await keys.caller(old.text)

    asyncio.run(talk())
    if failure == "empty":
        assert not list((tmp_path / "below").iterdir())


def test_known_keys_go_on_while_the_volume_hangs_and_changes_are_seen_when_it_answers(
    auditor: Auditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, calls = served(tmp_path)
    key, revoked = (keys.create(auditor, "acme", ["inference"]) for _ in range(2))
    volume = SlowVolume(monkeypatch)

    async def talk() -> None:
        watching = asyncio.create_task(calls.watch())
        assert (await keys.caller(key.text)).key_id == key.id
        volume.answers.clear()
        await asyncio.sleep(FRESH_S)
        async with asyncio.timeout(30):
            found = await asyncio.gather(*(keys.caller(key.text) for _ in range(50)))
        assert {each.key_id for each in found} == {key.id}
        with pytest.raises(RegistryUnavailable, match="not answer"):
            await keys.caller(f"pxk_{'0' * 12}_{'0' * 64}")
        (tmp_path / f"tenants/keys/{revoked.id}.json").unlink()
        assert (await keys.caller(revoked.text)).key_id == revoked.id
        volume.answers.set()
        async with asyncio.timeout(30):
            while True:
                await asyncio.sleep(0.05)
                try:
                    await keys.caller(revoked.text)
                except InvalidApiKey:
                    break
                except RegistryUnavailable:
                    continue
        watching.cancel()

    asyncio.run(talk())


class Later(datetime):
    """The time in two days."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(days=2)


def test_a_key_expires_also_while_the_volume_is_gone(
    auditor: Auditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "registry"
    keys, _ = served(root)
    key = keys.create(auditor, "acme", ["inference"], datetime.now(UTC) + timedelta(days=1))

    async def talk() -> None:
        assert (await keys.caller(key.text)).key_id == key.id
        root.rename(tmp_path / "away")
        monkeypatch.setattr("server.tenants.keys.datetime", Later)
        with pytest.raises(InvalidApiKey, match="has expired"):
            await keys.caller(key.text)

    asyncio.run(talk())


def test_limits_stand_while_the_volume_is_gone_and_change_when_it_is_back(tmp_path: Path) -> None:
    root, small, large = tmp_path / "registry", TenantLimits(max_running=1), TenantLimits(max_running=9)
    calls = RegistryCalls(str(root), partial(probe, Registry(root)))
    LimitsDirectory(root, TenantLimits()).write("acme", small)
    limits = LimitsDirectory(root, TenantLimits(), calls)

    async def main() -> None:
        watching = asyncio.create_task(limits.watch())
        root.rename(tmp_path / "away")
        root.mkdir()
        await asyncio.sleep(3 * FRESH_S)
        assert limits.of("acme") == small
        root.rmdir()
        (tmp_path / "away").rename(root)
        LimitsDirectory(root, TenantLimits()).write("acme", large)
        async with asyncio.timeout(30):
            while limits.of("acme") != large:
                await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(main())
