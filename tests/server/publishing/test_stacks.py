"""An upload with stacks of experts is refused by their name."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltastore.errors import ArtifactError
from deltastore.format.artifact import Artifact
from deltastore.format.validate import check_artifact
from server.publishing.checks import check_tensors
from tests.helpers.tiny_stacks import STACK, STACKS_BASE, write_stacks

REFUSED = (
    rf"artifact format 2, with 2 stacks of experts \('{STACK}'\), which can be merged and not served: run"
)


@pytest.mark.parametrize("slot_bytes", [1, 1 << 20])
def test_an_upload_with_stacks_is_refused_before_anything_else(slot_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_stacks(path)
    with Artifact.open(path) as artifact:
        check_artifact(artifact)
    with pytest.raises(ArtifactError, match=f"^the upload: {REFUSED}") as caught:
        check_tensors(path, STACKS_BASE, slot_bytes)
    assert str(caught.value).isprintable()
