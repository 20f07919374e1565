"""Models on the hub are listed with their sizes before anything is downloaded, and found in the cache without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.console import size_text
from deltastore.errors import CheckpointError
from deltastore.hub import checkpoint_directory, find_on_hub
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


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, model: str, tmp_path: Path) -> None:
    (first,) = hub.repositories[model].commits
    (tmp_path / "base" / "README.md").write_text("the second commit")
    second = hub.add_commit("base", tmp_path / "base", "v2.0", "refs/pr/1", "trial/long-name")
    (tmp_path / "base" / "README.md").write_text("the newest commit")
    newest = hub.add_commit("base", tmp_path / "base")
    wanted = {"": newest, "@main": newest, "@v2.0": second, "@refs/pr/1": second, "@trial/long-name": second}
    wanted[f"@{first}"] = first
    for revision, commit in wanted.items():
        found = find_on_hub(f"{model}{revision}")
        assert (found.id, str(found), found.commit) == (model, f"{model}{revision}", commit)
        directory = checkpoint_directory(f"{model}{revision}")
        assert directory.name == commit
        assert (directory / "config.json").is_file()
    directory = checkpoint_directory(f"{model}@v2.0")
    assert (directory / "README.md").read_text() == "the second commit"
    # Not the commit, by which the cache names the directory.
    assert Base.of(Checkpoint.open(directory)).id == model


def test_the_bytes_of_a_revision_are_said_before_they_are_fetched_and_not_again(
    hub: Hub, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base" / "README.md").write_text("of a tag alone")
    hub.add_commit("base", tmp_path / "base", "v1")
    total = size_text(sum(find_on_hub(f"{model}@v1").files.values()))
    checkpoint_directory(f"{model}@v1")
    line, *_ = capsys.readouterr().err.splitlines()
    assert line == f"fetching acme/base@v1 from the hub: {total} of {total}; the rest is in the cache"
    checkpoint_directory(f"{model}@v1")
    assert "fetching" not in capsys.readouterr().err


def test_a_revision_that_was_fetched_is_found_without_the_hub(
    hub: Hub, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base" / "README.md").write_text("of a tag alone")
    tagged = hub.add_commit("base", tmp_path / "base", "v1")
    checkpoint_directory(f"{model}@v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_on_hub(f"{model}@v1").commit == tagged
    assert checkpoint_directory(f"{model}@v1") == checkpoint_directory(f"{model}@{tagged}")
    with pytest.raises(CheckpointError, match="acme/base@v2: no such directory, and the hub"):
        checkpoint_directory(f"{model}@v2")


@pytest.mark.parametrize("revision", ["v9", "refs/pr/9", "0" * 40, "main/x"])
def test_a_revision_that_the_hub_lacks_is_one_line(hub: Hub, model: str, revision: str) -> None:
    for look_up in (find_on_hub, checkpoint_directory):
        with pytest.raises(CheckpointError) as caught:
            look_up(f"{model}@{revision}")
        assert str(caught.value).startswith(
            f"{model}@{revision}: the hub has {model}, and no revision '{revision}' of it: give a branch, a tag"
        )
        assert "\n" not in str(caught.value)
    assert not hub.fetched()


@pytest.mark.parametrize(
    "source", ["acme/base@", "acme/base@@v1", "acme/base@v 1", "@v1", "acme@/base", "a/b/c@v1"]
)
def test_what_is_no_id_with_a_revision_is_refused_without_the_hub(hub: Hub, source: str) -> None:
    with pytest.raises(CheckpointError, match="give a Hugging Face checkpoint's directory, or a hub id"):
        checkpoint_directory(source)
    assert hub.requests == []


def test_a_directory_with_a_revision_in_its_name_is_a_directory(hub: Hub, model: str, tmp_path: Path) -> None:
    (tmp_path / "base").rename(tmp_path / "base@v1")
    assert checkpoint_directory(str(tmp_path / "base@v1")) == tmp_path / "base@v1"
    assert hub.requests == []


def test_a_model_that_the_hub_lacks_is_one_line(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="acme/none: no such directory, and the hub") as caught:
        find_on_hub("acme/none")
    assert "\n" not in str(caught.value)
