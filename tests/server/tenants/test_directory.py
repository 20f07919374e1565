"""Tenants' limits as files of the registry."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deltastore.errors import UsageError
from server.errors import QueueFull
from server.tenants.limits import LimitsDirectory
from server.tenants.tenant import TenantLimits

DEFAULT = TenantLimits(requests_per_minute=60)
SMALL = TenantLimits(max_running=1, max_stored_bytes=0)


def test_a_tenant_has_its_own_limits_or_the_default(tmp_path: Path) -> None:
    LimitsDirectory(tmp_path, DEFAULT).write("acme", SMALL)
    directory = LimitsDirectory(tmp_path, DEFAULT)
    assert (directory.of("acme"), directory.of("other")) == (SMALL, DEFAULT)
    assert dict(directory.own()) == {"acme": SMALL}


def test_another_server_sees_limits_that_were_set_replaced_or_removed(tmp_path: Path) -> None:
    async def main() -> None:
        watching = asyncio.create_task(watched.watch())
        async with asyncio.timeout(30):
            for limits in (SMALL, DEFAULT, TenantLimits()):
                LimitsDirectory(tmp_path, DEFAULT).write("acme", limits)
                while watched.of("acme") != limits:
                    await asyncio.sleep(0.01)
            (tmp_path / "tenants/limits/acme.json").unlink()
            while watched.of("acme") != DEFAULT:
                await asyncio.sleep(0.01)
        watching.cancel()

    watched = LimitsDirectory(tmp_path, DEFAULT)
    asyncio.run(main())


def test_limits_that_are_edited_in_place_are_read_again(tmp_path: Path) -> None:
    directory = LimitsDirectory(tmp_path, DEFAULT)
    directory.write("acme", SMALL)
    assert dict(directory.own()) == {"acme": SMALL}
    (tmp_path / "tenants/limits/acme.json").write_text('{"max_running": 2}')
    assert dict(directory.own()) == {"acme": TenantLimits(max_running=2)}


def test_a_damaged_file_admits_nothing_until_the_limits_are_set_again(tmp_path: Path) -> None:
    directory = LimitsDirectory(tmp_path, DEFAULT)
    directory.write("acme", SMALL)
    (tmp_path / "tenants/limits/acme.json").write_text('{"max_running": 0}')
    with pytest.raises(QueueFull, match="limits of tenant 'acme' cannot be read"):
        LimitsDirectory(tmp_path, DEFAULT).of("acme")
    directory.write("acme", SMALL)
    assert LimitsDirectory(tmp_path, DEFAULT).of("acme") == SMALL


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a\n", "x" * 65])
def test_a_name_that_is_no_tenants_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="tenant name"):
        LimitsDirectory(tmp_path, DEFAULT).write(name, SMALL)
