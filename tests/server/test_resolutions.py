"""Resolutions while the registry can be asked, and while it cannot."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from deltastore.errors import RegistryUnavailable, VariantNotFound
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server import resolutions as resolutions_module
from server.registry_calls import RegistryCalls, probe
from server.resolutions import CHUNK_BYTES, RECORD_BYTES, Resolutions
from tests.deltastore.helpers.stored import publish_file, write_stored


class Case:
    """A registry with one variant, `a`, of the tenant `default`, and the versions that count as in memory."""

    def __init__(self, directory: Path) -> None:
        self.root, self.away = directory / "registry", directory / "away"
        self.registry = Registry(self.root)
        self.artifact = directory / "artifact"
        write_stored(self.artifact, {})
        self.record = publish_file(self.registry, self.artifact)
        self.in_memory = {self.record.digest}

    async def is_in_memory(self, record: VersionRecord, tenant: str) -> bool:
        return record.digest in self.in_memory

    def resolutions(self, max_age_s: float = 0.0) -> Resolutions:
        calls = RegistryCalls(str(self.root), partial(probe, self.registry))
        return Resolutions(self.registry, calls, self.is_in_memory, max_age_s)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_the_last_answer_counts_while_the_registry_is_gone_if_the_delta_is_in_memory(case: Case) -> None:
    async def main() -> None:
        resolutions = case.resolutions()
        for version in (None, 1):
            assert await resolutions.resolve("default", "a", version) == case.record
        case.root.rename(case.away)
        for version in (None, 1):
            assert await resolutions.resolve("default", "a", version) == case.record
            assert await resolutions.resolve("default", "a", version, owned=True) == case.record
        with pytest.raises(RegistryUnavailable, match="is gone"):
            await resolutions.resolve("default", "a", 2)
        with pytest.raises(RegistryUnavailable):
            await resolutions.resolve("other", "a")
        case.in_memory.clear()
        with pytest.raises(RegistryUnavailable):
            await resolutions.resolve("default", "a")

    asyncio.run(main())


def test_the_answer_to_a_name_counts_for_its_version_while_the_registry_is_gone(case: Case) -> None:
    async def main() -> None:
        resolutions = case.resolutions()
        await resolutions.resolve("default", "a")
        case.root.rename(case.away)
        assert await resolutions.resolve("default", "a", 1) == case.record
        with pytest.raises(RegistryUnavailable):
            await resolutions.resolve("default", "a", 2)

    asyncio.run(main())


def test_a_version_that_is_found_deleted_is_forgotten_under_its_name_alone(case: Case) -> None:
    async def main() -> None:
        resolutions = case.resolutions()
        await resolutions.resolve("default", "a")
        case.registry.delete("default", "a")
        with pytest.raises(VariantNotFound):
            await resolutions.resolve("default", "a", 1)
        case.root.rename(case.away)
        for version in (None, 1):
            with pytest.raises(RegistryUnavailable):
                await resolutions.resolve("default", "a", version)

    asyncio.run(main())


def test_a_public_variant_of_another_tenant_is_not_taken_for_ones_own(case: Case) -> None:
    async def main() -> None:
        case.registry.set_visibility("default", "a", "public")
        resolutions = case.resolutions()
        assert await resolutions.resolve("other", "a") == case.record
        case.root.rename(case.away)
        assert await resolutions.resolve("other", "a") == case.record
        with pytest.raises(RegistryUnavailable):
            await resolutions.resolve("other", "a", owned=True)

    asyncio.run(main())


def test_a_deleted_variant_is_forgotten(case: Case) -> None:
    async def main() -> None:
        resolutions = case.resolutions()
        await resolutions.resolve("default", "a")
        case.registry.delete("default", "a")
        with pytest.raises(VariantNotFound):
            await resolutions.resolve("default", "a")
        case.root.rename(case.away)
        with pytest.raises(RegistryUnavailable):
            await resolutions.resolve("default", "a")

    asyncio.run(main())


@pytest.mark.parametrize("max_age_s", [0.0, 3600.0])
def test_an_answer_is_given_again_until_it_has_its_greatest_age(case: Case, max_age_s: float) -> None:
    async def main() -> None:
        resolutions = case.resolutions(max_age_s)
        await resolutions.resolve("default", "a")
        case.registry.delete("default", "a")
        if max_age_s:
            assert await resolutions.resolve("default", "a") == case.record
        else:
            with pytest.raises(VariantNotFound):
                await resolutions.resolve("default", "a")

    asyncio.run(main())


def test_only_a_bounded_number_of_answers_is_remembered_and_the_tenant_with_the_most_loses_its_oldest(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_bytes = RECORD_BYTES + CHUNK_BYTES * len(case.record.chunk_sha256)
    monkeypatch.setattr(resolutions_module, "MAX_BYTES", 3 * record_bytes)
    for name in ("b", "c", "d"):
        publish_file(case.registry, case.artifact, name, "many")

    async def main() -> None:
        resolutions = case.resolutions()
        await resolutions.resolve("default", "a")
        for name in ("b", "c", "b", "d"):
            await resolutions.resolve("many", name)
        case.root.rename(case.away)
        for tenant, name in (("default", "a"), ("many", "b"), ("many", "d")):
            assert (await resolutions.resolve(tenant, name)).name == name
        with pytest.raises(RegistryUnavailable):
            await resolutions.resolve("many", "c")

    asyncio.run(main())
