"""The audit log: whole lines, whatever happens to the process, to the disk or to other writers."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from deltastore.errors import VariantNotFound
from deltastore.registry import Deleted, Registry
from server.tenants.changes import AuditLog, Auditor, Change, VariantChanges
from server.tenants.tenant import FIELDS, Tenant, TenantLimits
from tests.deltastore.helpers.crash_storage import artifact, push

PROMOTED = Change("promote", "acme", variant="chat", version=2, digest="ab" * 32)


def lines(root: Path) -> list[dict[str, object]]:
    (path,) = (root / "audit").iterdir()
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_a_line_holds_what_was_changed_and_by_whom(tmp_path: Path) -> None:
    Auditor(AuditLog(tmp_path), "0123456789ab", "req-7").write(PROMOTED)
    (line,) = lines(tmp_path)
    assert str(line.pop("time")).endswith("+00:00")
    assert line == {
        "key_id": "0123456789ab", "request_id": "req-7", "action": "promote", "tenant": "acme", "variant": "chat",
        "version": 2, "digest": "ab" * 32,
    }  # fmt: skip


def test_a_line_about_limits_holds_their_values(tmp_path: Path) -> None:
    Auditor(AuditLog(tmp_path)).write(Change("set_limits", "acme", limits=TenantLimits(max_running=3)))
    (line,) = lines(tmp_path)
    assert line["limits"] == {**dict.fromkeys(FIELDS), "max_running": 3}


def test_hostile_text_stays_inside_its_line(tmp_path: Path) -> None:
    Auditor(AuditLog(tmp_path), None, 'a"\n{"action": "delete"}').write(PROMOTED)
    assert len(lines(tmp_path)) == 1


def test_writers_at_the_same_time_do_not_mix_their_lines(tmp_path: Path) -> None:
    auditors = [Auditor(AuditLog(tmp_path), None, f"req-{number}") for number in range(4)]
    threads = [
        threading.Thread(target=lambda each=each: [each.write(PROMOTED, PROMOTED) for _ in range(25)])
        for each in auditors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [line["request_id"] for line in lines(tmp_path)]
    assert sorted(map(str, found)) == sorted(f"req-{number}" for number in range(4) for _ in range(50))


def test_a_line_that_a_crash_cut_short_does_not_swallow_the_next(tmp_path: Path) -> None:
    auditor = Auditor(AuditLog(tmp_path))
    auditor.write(PROMOTED)
    (path,) = (tmp_path / "audit").iterdir()
    path.write_bytes(path.read_bytes() + b'{"time": "20')
    auditor.write(PROMOTED)
    first, cut, last = path.read_text().splitlines()
    assert json.loads(first)["action"] == json.loads(last)["action"] == "promote"
    assert cut == '{"time": "20'


def test_a_disk_that_fails_does_not_fail_the_change_and_the_line_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "audit").write_text("a file where the directory should be")
    with caplog.at_level(logging.ERROR):
        Auditor(AuditLog(tmp_path), "0123456789ab").write(PROMOTED)
    (record,) = caplog.records
    assert '"action":"promote"' in record.message
    assert '"key_id":"0123456789ab"' in record.message


def test_nothing_is_written_below_the_mount_point_of_a_volume_that_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auditor = Auditor(AuditLog(tmp_path, must_exist=True), "0123456789ab")
    auditor.write(PROMOTED)
    assert list(tmp_path.iterdir()) == []
    assert "is gone: mount its volume again" in caplog.text
    assert '"action":"promote"' in caplog.text
    Registry(tmp_path)
    auditor.write(PROMOTED)
    assert len(lines(tmp_path)) == 1


class PublishedFirst(Registry):
    """A registry in which another caller publishes right before each deletion, and then a record may be damaged."""

    damaged: int | None = None

    def delete(self, tenant: str, name: str, version: int | None = None) -> Deleted:
        push(self, artifact(2), name, tenant=tenant)
        if self.damaged is not None:
            (self.root / f"variants/{tenant}/{name}/{self.damaged}.json").write_text("damaged")
        return super().delete(tenant, name, version)


@pytest.mark.parametrize("damaged", [None, 1])
def test_a_version_that_was_published_right_before_the_deletion_of_its_variant_has_a_line(
    damaged: int | None, tmp_path: Path
) -> None:
    registry = PublishedFirst(tmp_path)
    records = [push(registry, artifact(1), "chat", tenant="acme").record]
    registry.damaged = damaged
    deleted = VariantChanges(registry, Tenant("acme"), Auditor(AuditLog(tmp_path)), True).delete("chat", None)
    assert deleted.versions == [1, 2]
    assert [record.version for record in deleted.records] == ([1, 2] if damaged is None else [2])
    logged = [(line["action"], line["version"], line.get("digest")) for line in lines(tmp_path)]
    digest = records[0].digest if damaged is None else None
    assert logged == [("delete", 1, digest), ("delete", 2, deleted.records[-1].digest)]
    with pytest.raises(VariantNotFound):
        registry.variant("acme", "chat")
