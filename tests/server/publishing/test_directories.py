"""Opening artifacts below allowed directories: nothing outside of them, whatever a path or a link says."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from server.errors import InvalidRequest
from server.publishing.directories import open_artifact


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    directory = tmp_path / "allowed"
    (directory / "inner").mkdir(parents=True)
    (directory / "inner" / "delta.safetensors").write_bytes(b"inside")
    (tmp_path / "secret.safetensors").write_bytes(b"outside")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "delta.safetensors").write_bytes(b"outside")
    return directory


def content_of(path: Path | str, allowed: Path) -> bytes:
    descriptor = open_artifact(str(path), [allowed])
    try:
        return os.pread(descriptor, 100, 0)
    finally:
        os.close(descriptor)


def refusal_of(path: Path | str, allowed: Path) -> str:
    with pytest.raises(InvalidRequest) as refused:
        open_artifact(str(path), [allowed])
    assert refused.value.param == "source"
    return str(refused.value).partition(" is no artifact")[2]


def test_a_file_below_an_allowed_directory_is_opened(allowed: Path) -> None:
    path = allowed / "inner" / "delta.safetensors"
    assert content_of(path, allowed) == b"inside"
    descriptor = open_artifact(str(path), [allowed.parent / "allowed-not", allowed])
    assert os.fstat(descriptor).st_size == len(b"inside")
    os.close(descriptor)


def test_a_directory_stands_for_its_one_artifact(allowed: Path) -> None:
    (allowed / "inner" / "README.md").write_text("text")
    assert content_of(allowed / "inner", allowed) == b"inside"
    assert content_of(f"{allowed}//inner/", allowed) == b"inside"


def test_a_directory_with_two_artifacts_is_refused(allowed: Path) -> None:
    (allowed / "inner" / "other.safetensors").write_bytes(b"inside")
    assert refusal_of(allowed / "inner", allowed)


@pytest.mark.parametrize(
    "path",
    [
        "{allowed}/../secret.safetensors",
        "{allowed}/inner/../../secret.safetensors",
        "{allowed}/inner/./delta.safetensors",
        "{allowed}-not/delta.safetensors",
        "{outside}/secret.safetensors",
        "/etc/passwd",
        "inner/delta.safetensors",
        "{allowed}/absent",
        "{allowed}/inner/delta.safetensors/x",
        "{allowed}/inner/delta.safetensors\0",
        "{allowed}",
        "",
        "/",
    ],
)
def test_what_is_outside_is_refused_with_the_words_for_what_is_absent(allowed: Path, path: str) -> None:
    refused = refusal_of(path.format(allowed=allowed, outside=allowed.parent), allowed)
    assert refused == refusal_of(allowed / "absent", allowed)


@pytest.mark.parametrize("target", ["secret.safetensors", "allowed/inner/delta.safetensors"])
def test_no_symbolic_link_to_a_file_is_followed(allowed: Path, target: str) -> None:
    (allowed / "link.safetensors").symlink_to(allowed.parent / target)
    assert refusal_of(allowed / "link.safetensors", allowed)
    assert refusal_of(allowed, allowed)


def test_no_symbolic_link_to_a_directory_is_followed(allowed: Path) -> None:
    (allowed / "link").symlink_to(allowed.parent)
    assert refusal_of(allowed / "link" / "secret.safetensors", allowed)


def test_an_allowed_directory_may_be_a_link_of_the_operator(allowed: Path) -> None:
    link = allowed.parent / "link"
    link.symlink_to(allowed)
    assert content_of(link / "inner", link) == b"inside"


def test_a_pipe_is_refused_at_once(allowed: Path) -> None:
    os.mkfifo(allowed / "pipe.safetensors")
    assert refusal_of(allowed / "pipe.safetensors", allowed)
    assert refusal_of(allowed, allowed)


def test_a_directory_that_is_replaced_by_a_link_meanwhile_leads_nowhere(allowed: Path) -> None:
    """Swap a directory with a link to one outside, again and again, while its artifact is opened."""
    outside, inner, spare = allowed.parent / "allowed-not", allowed / "inner", allowed / "spare"
    stopped = threading.Event()

    def swap() -> None:
        while not stopped.is_set():
            inner.rename(spare)
            inner.symlink_to(outside)
            inner.unlink()
            spare.rename(inner)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(2000):
            try:
                assert content_of(inner / "delta.safetensors", allowed) == b"inside"
            except InvalidRequest:
                continue
    finally:
        stopped.set()
        swapping.join()
