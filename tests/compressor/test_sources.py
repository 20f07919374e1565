"""Models on the hub are listed with their sizes before anything is downloaded, and found in the cache without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from compressor.sources import checkpoint_directory, find_on_hub
from deltastore.errors import CheckpointError
from tests.helpers.hub import Hub, asked_hub
from tests.helpers.tiny_models import make_pair


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with asked_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def model(hub: Hub, tmp_path: Path) -> str:
    base = make_pair("llama", tmp_path, changes=()).base
    (base / "pytorch_model.bin").write_bytes(b"a second copy of the weights")
    return hub.add_directory("base", base)


def test_listing_a_model_downloads_nothing(hub: Hub, model: str, tmp_path: Path) -> None:
    found = find_on_hub(model)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "base").iterdir()}
    sizes.pop("pytorch_model.bin")
    assert dict(found.files) == sizes
    assert found.missing_bytes == sum(sizes.values())
    assert not hub.fetched()


def test_one_file_is_fetched_and_counts_as_there_afterwards(hub: Hub, model: str) -> None:
    found = find_on_hub(model)
    assert found.fetch("config.json").read_bytes().startswith(b"{")
    assert hub.fetched() == {"config.json"}
    assert find_on_hub(model).missing_bytes == found.missing_bytes - found.files["config.json"]


def test_a_downloaded_model_is_found_without_the_hub(
    hub: Hub, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint_directory(model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = find_on_hub(model)
    assert found.missing_bytes == 0
    assert found.fetch("config.json") == directory / "config.json"


def test_a_model_that_the_hub_lacks_is_one_line(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="acme/none: no such directory, and the hub") as caught:
        find_on_hub("acme/none")
    assert "\n" not in str(caught.value)
