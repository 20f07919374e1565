"""The engine that `--backend` chooses, and the log line that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltastore.errors import SettingsError
from server.processes import with_backend
from server.settings import Settings
from server.settings_sources import load_settings


def settings(directory: Path, **given: object) -> Settings:
    return load_settings({"base": directory, "registry": directory / "registry", **given}).settings


def python_that_says(directory: Path, answer: str, code: int = 0) -> Path:
    """Write a program that stands for an interpreter and answers the question for vLLM."""
    program = directory / "python"
    program.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("answer", "backend", "why"),
    [
        ("", "vllm", "vLLM is installed and there is a CUDA device"),
        ("there is no CUDA device", "native", "there is no CUDA device"),
    ],
)
def test_auto_asks_the_interpreter_that_would_run_vllm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: str, backend: str, why: str
) -> None:
    caplog.set_level("INFO")
    own = settings(tmp_path, engine_python=python_that_says(tmp_path, answer))
    assert with_backend(own).backend == backend
    assert f"the engine is {backend}: {why}" in caplog.text


def test_auto_takes_no_interpreter_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    own = settings(tmp_path, engine_python=python_that_says(tmp_path, "", code=7))
    assert with_backend(own).backend == "native"
    assert "ended with 7" in caplog.text
    (tmp_path / "python").write_bytes(b"\0no program")
    assert with_backend(own).backend == "native"
    assert "does not start" in caplog.text


def test_auto_on_the_cpu_asks_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    own = settings(tmp_path, device="cpu", engine_python=python_that_says(tmp_path, "", code=1))
    assert with_backend(own).backend == "native"
    assert "the engine is native: --device is cpu" in caplog.text


def test_a_chosen_backend_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert with_backend(settings(tmp_path, backend="vllm")).backend == "vllm"
    assert "the engine is vllm, as --backend says" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "vllm", "engine": "inline"}, "run the engine as a process"),
        ({"backend": "native", "engine_python": "/bin/sh"}, "set backend to vllm"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2 and backend auto: set backend to vllm"),
        ({"tensor_parallel_size": 2, "backend": "native"}, "tensor_parallel_size is 2 and backend native"),
        ({"tensor_parallel_size": 0, "backend": "vllm"}, "greater than or equal to 1"),
        ({"engine_python": "/nowhere/python"}, "is no program"),
        ({"engine_python": "/"}, "is no program"),
        ({"engine_python": ""}, "the path is empty"),
        ({"backend": "vlm"}, "vllm"),
    ],
)
def test_what_cannot_run_is_refused_with_the_way_out(
    tmp_path: Path, given: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(tmp_path, **given)
