"""The objects of deleted versions are freed before a gc, as far as nothing else refers to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltastore.registry import Registry
from tests.deltastore.helpers.buckets import memory_registry
from tests.deltastore.helpers.crash_storage import artifact, push


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_freeing_deleted_versions_removes_their_bytes_unless_others_refer_to_them(
    kind: str, tmp_path: Path
) -> None:
    registry = Registry(tmp_path / "registry") if kind == "directory" else memory_registry(tmp_path)
    mine = [push(registry, artifact(seed), "a").record for seed in (1, 2, 3)]
    other = push(registry, artifact(2), "b", tenant="other").record
    registry.free(mine)
    assert [registry.object_path(record).read_bytes() for record in mine] == [
        artifact(1),
        artifact(2),
        artifact(3),
    ]
    registry.delete("default", "a", 1)
    registry.free(mine)
    registry.delete("default", "a")
    registry.free(mine)
    registry.free(mine)
    assert registry.usage()[:2] == (1, len(artifact(2)))
    assert registry.object_path(other).read_bytes() == artifact(2)
    assert registry.gc().objects == ()
    assert registry.check().is_clean
