"""The audit log: whole lines, whatever happens to the process, to the disk or to other writers."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from deltastore.registry import Registry
from server.tenants.audit import AuditLog, Auditor, Change
from server.tenants.limits.tenant_limits import FIELDS, TenantLimits

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
