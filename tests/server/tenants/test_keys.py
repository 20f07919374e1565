"""API keys: what is stored, what is admitted, and that no file can make the store admit or crash."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from deltastore.errors import RegistryUnavailable, UsageError
from server.errors import InvalidApiKey, KeyNotFound
from server.tenants import records as directory_module
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import MAX_WAITING, KeyStore, NewKey, warn_without_keys
from server.tenants.records import FRESH_S, MAX_BYTES, RecordDirectory
from server.tenants.tenant import Caller, Role, Tenant


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path)


@pytest.fixture
def auditor(tmp_path: Path) -> Auditor:
    return Auditor(AuditLog(tmp_path), "0123456789ab", "req-1")


def caller(store: KeyStore, text: str) -> Caller:
    return asyncio.run(store.caller(text))


def refusal(store: KeyStore, text: str) -> str:
    with pytest.raises(InvalidApiKey) as caught:
        caller(store, text)
    return str(caught.value)


def file_of(tmp_path: Path, key: NewKey) -> Path:
    return tmp_path / "tenants" / "keys" / f"{key.id}.json"


def test_a_key_authenticates_its_tenant_with_its_roles(store: KeyStore, auditor: Auditor) -> None:
    key = store.create(auditor, "acme", ["publish", "inference"])
    found = caller(store, key.text)
    assert found == Caller(Tenant("acme"), frozenset({"inference", "publish"}), key.id)
    assert found.has("publish")
    assert not found.has("admin")


@pytest.mark.parametrize("role", ["inference", "publish", "metrics", "admin"])
def test_an_administrator_has_every_role(store: KeyStore, auditor: Auditor, role: Role) -> None:
    assert caller(store, store.create(auditor, "acme", ["admin"]).text).has(role)


def test_the_file_holds_the_hash_of_the_secret_and_only_its_owner_may_read_it(
    store: KeyStore, auditor: Auditor, tmp_path: Path
) -> None:
    key = store.create(auditor, "acme", ["inference"])
    raw = file_of(tmp_path, key).read_text()
    secret = key.text.rpartition("_")[2]
    assert secret not in raw
    assert json.loads(raw)["secret_sha256"] == hashlib.sha256(secret.encode()).hexdigest()
    assert stat.S_IMODE(file_of(tmp_path, key).stat().st_mode) == 0o600


def test_two_keys_share_neither_id_nor_secret(store: KeyStore, auditor: Auditor) -> None:
    keys = [store.create(auditor, "acme", ["inference"]) for _ in range(50)]
    assert len({key.id for key in keys}) == len({key.text.rpartition("_")[2] for key in keys}) == 50


def test_a_wrong_secret_an_unknown_id_and_no_key_at_all_are_refused_alike(
    store: KeyStore, auditor: Auditor
) -> None:
    key = store.create(auditor, "acme", ["inference"])
    flipped = key.text[:-1] + ("0" if key.text[-1] != "0" else "1")
    wrong = [
        flipped,
        f"pxk_{'0' * 12}_{'0' * 64}",
        "",
        "sk-abc",
        key.text + "0",
        key.text[:-1],
        f"{key.text}\n",
    ]
    wrong += [key.text.upper(), key.text.replace(key.id, "../../../etc"), "pxk__", "é" * 99, "x" * 10**6]
    assert len({refusal(store, text) for text in wrong}) == 1


def test_the_secret_of_one_key_does_not_open_another(store: KeyStore, auditor: Auditor) -> None:
    one, other = (store.create(auditor, tenant, ["inference"]) for tenant in ("acme", "globex"))
    refusal(store, f"pxk_{one.id}_{other.text.rpartition('_')[2]}")


def test_an_expired_key_is_refused(store: KeyStore, auditor: Auditor, tmp_path: Path) -> None:
    key = store.create(auditor, "acme", ["inference"], datetime.now(UTC) + timedelta(days=1))
    assert caller(store, key.text).tenant == Tenant("acme")
    record = json.loads(file_of(tmp_path, key).read_text())
    record["expires_at"] = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    file_of(tmp_path, key).write_text(json.dumps(record))
    assert "has expired" in refusal(KeyStore(tmp_path), key.text)


@pytest.mark.parametrize("tenant", ["", "..", "a/b", "a\n", "é", "a" * 65])
def test_a_key_of_a_tenant_that_cannot_be_is_not_made(store: KeyStore, auditor: Auditor, tenant: str) -> None:
    with pytest.raises(UsageError, match="is not allowed"):
        store.create(auditor, tenant, ["inference"])
    assert store.records() == {}


def test_a_key_without_a_role_or_with_a_past_expiry_is_not_made(store: KeyStore, auditor: Auditor) -> None:
    with pytest.raises(UsageError, match="needs a role"):
        store.create(auditor, "acme", [])
    for moment in (datetime.now(UTC), datetime(2100, 1, 1)):
        with pytest.raises(UsageError, match="cannot expire"):
            store.create(auditor, "acme", ["inference"], moment)
    assert store.records() == {}


def test_only_a_registry_without_keys_is_warned_about(
    store: KeyStore, auditor: Auditor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_without_keys(tmp_path)
    command = f"peraxis keys create --registry {tmp_path} --tenant NAME --role admin"
    assert [record.levelname for record in caplog.records if command in record.message] == ["WARNING"]
    caplog.clear()
    store.create(auditor, "acme", ["inference"])
    warn_without_keys(tmp_path)
    assert not caplog.records


def test_the_list_is_by_age_and_of_one_tenant_on_request(store: KeyStore, auditor: Auditor) -> None:
    keys = [store.create(auditor, tenant, ["inference"]) for tenant in ("acme", "globex", "acme")]
    assert set(store.records()) == {key.id for key in keys}
    assert set(store.records("acme")) == {keys[0].id, keys[2].id}
    assert store.records("absent") == {}


def test_a_revoked_key_is_gone_and_cannot_be_revoked_again(store: KeyStore, auditor: Auditor) -> None:
    key = store.create(auditor, "acme", ["inference"])
    store.revoke(auditor, key.id)
    assert store.records() == {}
    refusal(store, key.text)
    for absent in (key.id, "", "../limits/acme", "0" * 12):
        with pytest.raises(KeyNotFound, match="there is no key"):
            store.revoke(auditor, absent)


def test_a_store_admits_its_own_new_key_at_once_and_refuses_a_revoked_one_at_once(
    store: KeyStore, auditor: Auditor
) -> None:
    async def talk() -> None:
        first = await asyncio.to_thread(store.create, auditor, "ops", ["admin"])
        assert (await store.caller(first.text)).key_id == first.id
        second = await asyncio.to_thread(store.create, auditor, "acme", ["inference"])
        assert (await store.caller(second.text)).key_id == second.id
        await asyncio.to_thread(store.revoke, auditor, second.id)
        with pytest.raises(InvalidApiKey):
            await store.caller(second.text)

    asyncio.run(talk())


def test_a_change_by_another_process_is_seen_without_a_restart(
    store: KeyStore, auditor: Auditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A look is waited for, however slow this machine is.
    monkeypatch.setattr("server.tenants.records.PATIENCE_S", 60.0)
    elsewhere = KeyStore(tmp_path)

    async def talk() -> None:
        with pytest.raises(InvalidApiKey):
            await store.caller(f"pxk_{'0' * 12}_{'0' * 64}")
        # Ever more changes within one tick of the file system's clock.
        keys = [await asyncio.to_thread(elsewhere.create, auditor, "acme", ["inference"]) for _ in range(5)]
        await asyncio.sleep(FRESH_S)
        assert [(await store.caller(key.text)).key_id for key in keys] == [key.id for key in keys]
        await asyncio.to_thread(elsewhere.revoke, auditor, keys[0].id)
        await asyncio.sleep(FRESH_S)
        with pytest.raises(InvalidApiKey):
            await store.caller(keys[0].text)
        assert (await store.caller(keys[1].text)).key_id == keys[1].id

    asyncio.run(talk())


def test_many_lookups_at_once_read_the_files_once(
    store: KeyStore, auditor: Auditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = store.create(auditor, "acme", ["inference"])
    reads, read = [], RecordDirectory.read
    # One reading suffices, however long it takes.
    monkeypatch.setattr("server.tenants.records.FRESH_S", 3600.0)
    fresh = KeyStore(tmp_path)

    def counted(directory: RecordDirectory[Any]) -> Any:
        reads.append(directory)
        return read(directory)

    monkeypatch.setattr(RecordDirectory, "read", counted)

    async def talk() -> None:
        found = await asyncio.gather(*(fresh.caller(key.text) for _ in range(100)))
        assert {each.key_id for each in found} == {key.id}

    asyncio.run(talk())
    assert len(reads) == 1


DAMAGE: dict[str, Any] = {
    "empty": b"",
    "half": lambda raw: raw[: len(raw) // 2],
    "no JSON": b"\xff\xfe\x00",
    "a list": b"[]",
    "deep": b"[" * 60_000,
    "too large": lambda raw: raw + b" " * MAX_BYTES,
    "an empty hash": lambda raw: edited(raw, secret_sha256=""),
    "no hash": lambda raw: edited(raw, secret_sha256=None),
    "the hash of an empty secret": lambda raw: edited(raw, secret_sha256=[]),
    "a tenant outside": lambda raw: edited(raw, tenant="../other"),
    "a tenant with a line end": lambda raw: edited(raw, tenant="acme\n"),
    "no roles": lambda raw: edited(raw, roles=[]),
    "an unknown role": lambda raw: edited(raw, roles=["root"]),
    "an unknown field": lambda raw: edited(raw, expires="2020-01-01T00:00:00Z"),
    "an expiry without a zone": lambda raw: edited(raw, expires_at="2100-01-01T00:00:00"),
    "an expiry that is no time": lambda raw: edited(raw, expires_at="never"),
}


def edited(raw: bytes, **changes: object) -> bytes:
    return json.dumps({**json.loads(raw), **changes}).encode()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_admits_nothing_and_spoils_no_other_key(
    store: KeyStore, auditor: Auditor, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    sick, well = (store.create(auditor, "acme", ["inference"]) for _ in range(2))
    path = file_of(tmp_path, sick)
    raw, make = path.read_bytes(), DAMAGE[damage]
    path.write_bytes(make(raw) if callable(make) else make)
    assert caller(store, well.text).key_id == well.id
    refusal(store, sick.text)
    assert list(store.records()) == [well.id]
    assert sum(str(path) in record.message for record in caplog.records) == 1
    # The other half arrives: nothing tells of it but the file.
    path.write_bytes(raw)
    assert set(store.records()) == {sick.id, well.id}


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "dangling link"])
def test_what_is_no_regular_file_is_ignored(
    store: KeyStore, auditor: Auditor, tmp_path: Path, kind: str
) -> None:
    key = store.create(auditor, "acme", ["inference"])
    odd = file_of(tmp_path, key).with_name(f"{'a' * 12}.json")
    match kind:
        case "directory":
            odd.mkdir()
        case "pipe":
            os.mkfifo(odd)
        case "link":
            odd.symlink_to(file_of(tmp_path, key))
        case _:
            odd.symlink_to("nowhere")
    assert list(store.records()) == [key.id]
    refusal(store, key.text.replace(key.id, "a" * 12))


def test_a_damaged_key_can_be_revoked(store: KeyStore, auditor: Auditor, tmp_path: Path) -> None:
    key = store.create(auditor, "acme", ["inference"])
    file_of(tmp_path, key).write_bytes(b"{")
    store.revoke(auditor, key.id)
    assert not file_of(tmp_path, key).exists()


def test_a_directory_that_cannot_be_read_admits_nothing(
    store: KeyStore, auditor: Auditor, tmp_path: Path
) -> None:
    key = store.create(auditor, "acme", ["inference"])
    directory = file_of(tmp_path, key).parent
    directory.rename(tmp_path / "away")
    directory.write_text("")
    with pytest.raises(RegistryUnavailable):
        caller(store, key.text)


def test_after_its_last_change_has_settled_a_file_is_not_read_again_until_it_changes(
    store: KeyStore, auditor: Auditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = store.create(auditor, "acme", ["inference"])
    # Every change lies further back than this.
    monkeypatch.setattr(directory_module, "SETTLED_NS", -3600 * 10**9)
    reads, read = [], RecordDirectory._read_file

    def counted(directory: RecordDirectory[Any], name: str, size_bytes: int, *, is_logged: bool) -> Any:
        reads.append(name)
        return read(directory, name, size_bytes, is_logged=is_logged)

    monkeypatch.setattr(RecordDirectory, "_read_file", counted)
    for _ in range(3):
        assert list(store.records()) == [key.id]
    assert reads == [key.id]
    path = file_of(tmp_path, key)
    path.write_bytes(edited(path.read_bytes(), tenant="globex"))
    assert store.records()[key.id].tenant == "globex"
    assert reads == [key.id] * 2


def test_a_file_that_is_edited_in_place_with_its_old_time_and_length_is_read_again(
    store: KeyStore, auditor: Auditor, tmp_path: Path
) -> None:
    key = store.create(auditor, "acme", ["inference"])
    path = file_of(tmp_path, key)
    status = path.stat()
    assert store.records()[key.id].tenant == "acme"
    path.write_bytes(path.read_bytes().replace(b"acme", b"ecma"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store.records()[key.id].tenant == "ecma"


def test_a_key_that_another_process_has_just_made_is_known_at_once(
    store: KeyStore, auditor: Auditor, tmp_path: Path
) -> None:
    elsewhere = KeyStore(tmp_path)

    async def talk() -> None:
        for _ in range(3):
            key = await asyncio.to_thread(elsewhere.create, auditor, "acme", ["inference"])
            assert (await store.caller(key.text)).key_id == key.id

    asyncio.run(talk())


def test_unknown_keys_at_once_share_a_reading(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [], RecordDirectory.read

    def counted(directory: RecordDirectory[Any]) -> Any:
        reads.append(directory)
        return read(directory)

    monkeypatch.setattr(RecordDirectory, "read", counted)

    async def talk() -> None:
        texts = [f"pxk_{number:012x}_{'0' * 64}" for number in range(100)]
        found = await asyncio.gather(*map(store.caller, texts), return_exceptions=True)
        assert {type(each) for each in found} == {InvalidApiKey}

    asyncio.run(talk())
    # One for keys that were unread, one for those that were unknown then, and few more without a processor.
    assert 2 <= len(reads) < 10


def test_few_unknown_keys_wait_for_a_reading_and_the_others_are_refused_from_the_last(
    store: KeyStore, auditor: Auditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, known = KeyStore(tmp_path), store.create(auditor, "acme", ["inference"])
    read, may_read = RecordDirectory.read, threading.Event()

    def held(directory: RecordDirectory[Any]) -> Any:
        assert may_read.wait(60)
        return read(directory)

    async def talk() -> None:
        assert (await store.caller(known.text)).key_id == known.id
        monkeypatch.setattr(RecordDirectory, "read", held)
        # Just made elsewhere, so unknown here; it comes before the others.
        new = await asyncio.to_thread(elsewhere.create, auditor, "acme", ["inference"])
        asking = [asyncio.create_task(store.caller(new.text))]
        await asyncio.sleep(0)
        texts = [f"pxk_{number:012x}_{'0' * 64}" for number in range(3 * MAX_WAITING)]
        asking += [asyncio.create_task(store.caller(text)) for text in texts]
        done: set[asyncio.Task[Caller]] = set()
        while len(done) < len(asking) - MAX_WAITING:
            done, _ = await asyncio.wait(asking, timeout=0.05)
        assert {type(task.exception()) for task in done} == {InvalidApiKey}
        assert len(done) == len(asking) - MAX_WAITING
        may_read.set()
        assert (await asking[0]).key_id == new.id
        assert all(
            isinstance(task.exception(), InvalidApiKey) for task in (await asyncio.wait(asking[1:]))[0]
        )

    asyncio.run(talk())


def test_a_key_that_cannot_be_looked_for_is_not_refused(
    store: KeyStore, auditor: Auditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = store.create(auditor, "acme", ["inference"])

    def fails(_: RecordDirectory[Any]) -> Any:
        raise RegistryUnavailable("the volume is gone")

    async def talk() -> None:
        assert (await store.caller(known.text)).key_id == known.id
        monkeypatch.setattr(RecordDirectory, "read", fails)
        texts = [f"pxk_{number:012x}_{'0' * 64}" for number in range(3 * MAX_WAITING)]
        first = await asyncio.gather(*map(store.caller, texts[:1]), return_exceptions=True)
        found = first + await asyncio.gather(*map(store.caller, texts), return_exceptions=True)
        assert {type(each) for each in found} == {RegistryUnavailable}
        assert (await store.caller(known.text)).key_id == known.id

    asyncio.run(talk())


def test_each_change_of_a_key_is_one_audit_line_without_the_key(
    store: KeyStore, auditor: Auditor, tmp_path: Path
) -> None:
    key = store.create(auditor, "acme", ["publish"])
    store.revoke(auditor, key.id)
    (path,) = (tmp_path / "audit").iterdir()
    text = path.read_text()
    created, revoked = map(json.loads, text.splitlines())
    assert created.pop("time").startswith(path.name.removeprefix("audit-")[:10])
    author = {"key_id": "0123456789ab", "request_id": "req-1"}
    assert created == {
        **author, "action": "create_key", "tenant": "acme", "subject_key_id": key.id, "roles": ["publish"]
    }  # fmt: skip
    assert (revoked["action"], revoked["subject_key_id"]) == ("revoke_key", key.id)
    assert key.text.rpartition("_")[2] not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
