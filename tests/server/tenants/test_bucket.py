"""Keys, limits and audit lines in a bucket, and the commands that make them there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import obstore
import pytest

from deltastore.errors import RegistryUnavailable
from deltastore.registry import Registry
from deltastore.registry.object_cache import ObjectCache
from peraxis.cli import run
from server.check import check_bucket
from server.errors import InvalidApiKey
from server.registry_calls import RegistryCalls
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.limits import LimitsDirectory
from server.tenants.tenant import TenantLimits
from tests.helpers.s3_server import Bucket


@pytest.fixture(autouse=True)
def environment(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)


def made_key(bucket: Bucket) -> tuple[str, str]:
    made = KeyStore(bucket.url).create(Auditor(AuditLog(bucket.url)), "acme", ["inference"])
    return made.id, made.text


def test_a_key_is_known_to_another_server_until_it_is_revoked(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A look is waited for, however slow this machine is.
    monkeypatch.setattr("server.tenants.records.PATIENCE_S", 60.0)
    key_id, text = made_key(bucket)

    async def known_and_refused() -> None:
        elsewhere = KeyStore(bucket.url)
        assert (await elsewhere.caller(text)).tenant.name == "acme"
        KeyStore(bucket.url).revoke(Auditor(AuditLog(bucket.url)), key_id)
        # Longer than the records that were read last are used.
        await asyncio.sleep(1.1)
        with pytest.raises(InvalidApiKey):
            await elsewhere.caller(text)

    asyncio.run(known_and_refused())


def test_limits_that_another_server_wrote_are_read(bucket: Bucket) -> None:
    small = TenantLimits(max_running=3)
    reader = LimitsDirectory(bucket.url, TenantLimits())
    for limits in (small, TenantLimits(max_running=4)):
        LimitsDirectory(bucket.url, TenantLimits()).write("acme", limits)
        assert reader.own() == {"acme": limits}


def test_known_keys_are_served_while_the_bucket_is_gone_and_unknown_ones_not_called_invalid(
    bucket: Bucket, tmp_path: Path
) -> None:
    Registry.open(bucket.url, ObjectCache(tmp_path / "cache", 0))
    _, text = made_key(bucket)

    async def served() -> None:
        keys = KeyStore(bucket.url, calls=RegistryCalls(bucket.url, lambda: None))
        await keys.caller(text)
        store = bucket.store()
        obstore.delete(store, [meta["path"] for page in obstore.list(store) for meta in page])
        await asyncio.sleep(1.1)
        assert (await keys.caller(text)).tenant.name == "acme"
        with pytest.raises(RegistryUnavailable, match="is gone"):
            await keys.caller(f"pxk_{'0' * 12}_{'0' * 64}")

    asyncio.run(served())


def test_a_damaged_record_is_left_out_and_can_be_removed(bucket: Bucket) -> None:
    key_id, _ = made_key(bucket)
    obstore.put(bucket.store("registry"), f"tenants/keys/{key_id}.json", b"{")
    keys = KeyStore(bucket.url)
    assert keys.records() == {}
    keys.revoke(Auditor(AuditLog(bucket.url)), key_id)
    assert not any(obstore.list(bucket.store("registry"), "tenants"))


def test_the_check_of_a_bucket_writes_there_and_leaves_nothing(bucket: Bucket) -> None:
    assert "no registry yet" in check_bucket(bucket.url)
    assert not any(obstore.list(bucket.store()))


def test_the_commands_make_list_and_revoke_a_key_without_a_local_directory(
    bucket: Bucket, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["keys", "list", "--registry", bucket.url]) != 0
    assert run(["keys", "create", "--registry", bucket.url, "--tenant", "ops", "--role", "admin"]) == 0
    text = capsys.readouterr().out.strip()
    assert run(["keys", "list", "--registry", bucket.url]) == 0
    assert text[4:16] in capsys.readouterr().out
    assert run(["keys", "revoke", "--registry", bucket.url, text]) == 0
    assert KeyStore(bucket.url).records() == {}
    assert list(tmp_path.iterdir()) == []
