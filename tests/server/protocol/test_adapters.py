"""The record of adapters that clients have loaded: shares, what is forgotten, and whose they are."""

from __future__ import annotations

import pytest

from server import shared_state as adapters_module
from server.shared_state import AdapterChange, LoadedAdapter, LoadedAdapters


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> LoadedAdapters:
    monkeypatch.setattr(adapters_module, "MAX_ADAPTERS", 8)
    return LoadedAdapters()


def load(record: LoadedAdapters, tenant: str, name: str) -> list[str]:
    adapter = LoadedAdapter(tenant, name, f"/adapters/{name}", 0.0)
    return [each.name for each in record.apply(AdapterChange(tenant, loaded=adapter))]


def test_a_tenant_has_half_of_the_record_and_its_oldest_are_forgotten(record: LoadedAdapters) -> None:
    for number in range(4):
        assert load(record, "one", f"v{number}") == [f"v{each}" for each in range(number + 1)]
    assert load(record, "one", "v4") == ["v1", "v2", "v3", "v4"]
    # One that is loaded again takes no place.
    assert load(record, "one", "v1") == ["v1", "v2", "v3", "v4"]
    assert load(record, "other", "v1") == ["v1"]


def test_a_tenant_is_answered_with_its_own(record: LoadedAdapters) -> None:
    load(record, "one", "v1")
    load(record, "other", "v2")
    assert [each.name for each in record.apply(AdapterChange("one"))] == ["v1"]
    assert record.apply(AdapterChange("one", unloaded="v2")) != ()
    assert record.apply(AdapterChange("one", unloaded="v1")) == ()
    assert [each.name for each in record.apply(AdapterChange("other"))] == ["v2"]
    assert record.apply(AdapterChange("third")) == ()
