"""States of deltas: what is told of versions with the same bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from server.engine.engine import residents, states_of
from server.protocol.messages import DeltaState
from tests.server.helpers.residency import running_residency


def test_each_version_in_memory_is_listed_with_its_own_pin_and_requests(tmp_path: Path) -> None:
    with running_residency(tmp_path) as harness:
        first = harness.publish("first", seed=1)
        second = dataclasses.replace(first, tenant="acme", name="second")
        harness.residency.retain(second)
        harness.published.add(second.label)
        harness.load(first, second)
        harness.residency.pin(second)
        lines = residents(harness.residency, [second, second])
        assert [(line.label, line.state) for line in lines] == [
            ("default/first@1", DeltaState("device", False, 0)),
            ("acme/second@1", DeltaState("device", True, 2)),
        ]
        assert {(line.digest, line.device_bytes) for line in lines} == {(first.digest, first.device_bytes)}


def test_a_version_is_on_disk_while_another_with_its_bytes_is_in_a_slot(tmp_path: Path) -> None:
    with running_residency(tmp_path) as harness:
        first = harness.publish("first", seed=1)
        second = dataclasses.replace(first, tenant="acme", name="second")
        harness.load(first)
        harness.residency.pin(first)
        assert states_of(harness.residency, [first], (first.label, second.label)) == (
            DeltaState("device", True, 1),
            DeltaState("disk", False, 0),
        )
        assert [line.label for line in residents(harness.residency, [])] == [first.label]
