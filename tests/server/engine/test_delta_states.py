"""States of deltas: what statistics list of versions with the same bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from server.engine.delta_states import residents
from server.protocol.messages import DeltaState
from tests.server.helpers.residency import running_residency


def test_each_version_that_wants_a_delta_is_listed_with_its_own_pin_and_requests(tmp_path: Path) -> None:
    with running_residency(tmp_path) as harness:
        first = harness.publish("first", seed=1)
        second = dataclasses.replace(first, tenant="acme", name="second")
        harness.load(first)
        harness.residency.retain(second)
        harness.residency.pin(second)
        lines = residents(harness.residency, [second, second])
        assert [(line.tenant, line.name, line.version, line.state) for line in lines] == [
            ("default", "first", 1, DeltaState("device", False, 0)),
            ("acme", "second", 1, DeltaState("device", True, 2)),
        ]
        assert {(line.digest, line.device_bytes) for line in lines} == {(first.digest, first.device_bytes)}


def test_a_version_that_unloaded_a_delta_which_others_want_is_no_longer_listed(tmp_path: Path) -> None:
    with running_residency(tmp_path) as harness:
        first = harness.publish("first", seed=1)
        harness.load(first)
        harness.residency.retain(dataclasses.replace(first, tenant="acme", name="second"))
        assert harness.residency.unload(first)
        assert [line.name for line in residents(harness.residency, [])] == ["second"]
