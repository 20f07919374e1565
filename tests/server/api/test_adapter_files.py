"""Paths that clients name artifacts by: what they open below the allowed directory, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from server.api.lora_adapters import open_artifact
from server.errors import InvalidRequest

CONTENT = b"artifact"


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """Return an allowed directory with artifacts, beside one that is not allowed."""
    directory = tmp_path / "allowed"
    (directory / "one").mkdir(parents=True)
    (directory / "one" / "sql.safetensors").write_bytes(CONTENT)
    (directory / "one" / "README.md").write_text("about it")
    (directory / "sql.safetensors").write_bytes(CONTENT)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "secret.safetensors").write_bytes(b"secret")
    return directory


def content(lora_path: str, lora_dir: Path | None) -> bytes | None:
    file = open_artifact(lora_path, lora_dir)
    if file is None:
        return None
    with file:
        return file.read()


@pytest.mark.parametrize(
    "path", ["sql.safetensors", "./sql.safetensors", "one/sql.safetensors", "one", "one/"]
)
def test_a_path_names_a_file_or_a_directory_with_one_artifact(allowed: Path, path: str) -> None:
    assert content(path, allowed) == CONTENT
    assert content(f"{allowed}/{path}", allowed) == CONTENT


def test_the_allowed_directory_itself_may_be_reached_through_a_link(allowed: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(allowed)
    for root in (tmp_path / "link", allowed):
        assert content(f"{root}/one", tmp_path / "link") == CONTENT


@pytest.mark.parametrize("path", ["org/adapter", "sql.safetensors/x", "x" * 300])
def test_a_relative_path_that_names_nothing_is_no_file(allowed: Path, path: str) -> None:
    assert content(path, allowed) is None


def test_without_an_allowed_directory_no_path_is_a_file() -> None:
    assert content("org/adapter", None) is None


@pytest.mark.parametrize(
    "path",
    [
        "../secret/secret.safetensors",
        "one/../../secret/secret.safetensors",
        "..",
        "one/..",
        "/etc/passwd",
        "//etc/passwd",
        "sql.safetensors\0",
        "x/" * 4096,
    ],
)
def test_a_path_that_leads_out_is_refused(allowed: Path, path: str) -> None:
    for directory in (allowed, None):
        with pytest.raises(InvalidRequest, match="lora_path") as refused:
            content(path, directory)
        assert refused.value.param == "lora_path"


def test_an_absolute_path_beside_the_allowed_directory_is_refused(allowed: Path, tmp_path: Path) -> None:
    (tmp_path / "allowed-too").mkdir()
    for path in (tmp_path / "secret" / "secret.safetensors", tmp_path / "allowed-too", tmp_path):
        with pytest.raises(InvalidRequest, match="--lora-dir"):
            content(str(path), allowed)


def test_an_absolute_path_that_names_nothing_is_refused(allowed: Path) -> None:
    with pytest.raises(InvalidRequest, match="names nothing"):
        content(f"{allowed}/absent", allowed)


@pytest.mark.parametrize("linked", ["link", "link/secret.safetensors", "directory"])
def test_no_symbolic_link_is_followed(allowed: Path, linked: str) -> None:
    (allowed / "link").symlink_to(allowed.parent / "secret")
    (allowed / "directory").mkdir()
    (allowed / "directory" / "x.safetensors").symlink_to(allowed / "sql.safetensors")
    with pytest.raises(InvalidRequest, match="symbolic link"):
        content(linked, allowed)


def test_a_peft_adapter_is_refused_with_the_command_that_makes_an_artifact_of_it(allowed: Path) -> None:
    adapter = allowed / "my adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    command = "peraxis compress --base BASE --finetune 'my adapter' --out 'my adapter'.safetensors"
    with pytest.raises(InvalidRequest) as refused:
        content("my adapter", allowed)
    assert str(refused.value).endswith(command)


@pytest.mark.parametrize("names", [(), ("a.safetensors", "b.safetensors")])
def test_a_directory_must_have_one_artifact(allowed: Path, names: tuple[str, ...]) -> None:
    (allowed / "many").mkdir()
    for name in names:
        (allowed / "many" / name).write_bytes(CONTENT)
    with pytest.raises(InvalidRequest, match=f"{len(names)} .safetensors files"):
        content("many", allowed)


def test_a_named_pipe_is_refused_and_not_waited_for(allowed: Path) -> None:
    os.mkfifo(allowed / "pipe")
    with pytest.raises(InvalidRequest, match="neither a file nor a directory"):
        content("pipe", allowed)
