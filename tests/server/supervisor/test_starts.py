"""Servers that cannot start say why in one line, quickly, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from server.processes import PREFIX, YOUNG_S, runtime_directory
from tests.server.helpers.live_server import (
    ROOT,
    WAIT_S,
    Artifacts,
    clean_environment,
    eventually,
    live_server,
    serve_command,
)


def failed_start(base: Path, directory: Path, **environment: str) -> tuple[int, list[str]]:
    """Start a server that cannot serve; return its exit code and its lines on stderr."""
    command = serve_command(
        "--base", base, "--registry", directory / "registry", "--port", 0, "--dtype", "float32"
    )
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**clean_environment(), "TMPDIR": str(directory), **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert not list(directory.glob(f"{PREFIX}*"))
    return done.returncode, done.stderr.splitlines()


def test_a_base_whose_weights_are_damaged_is_named(artifacts: Artifacts, tmp_path: Path) -> None:
    base = shutil.copytree(artifacts.base, tmp_path / "base")
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, lines = failed_start(base, tmp_path)
    assert code == 1
    assert lines[-1].startswith("error: ")
    assert "model.safetensors" in lines[-1]


def test_an_interpreter_that_cannot_run_the_engine_is_named_at_once(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module >&2\nexit 5\n")
    python.chmod(0o755)
    environment = {"PERAXIS_BACKEND": "vllm", "PERAXIS_ENGINE_PYTHON": str(python)}
    code, lines = failed_start(artifacts.base, tmp_path, **environment)
    assert code == 1
    assert lines.count("no such module") == 1
    assert (
        f"the engine has ended with exit code 5 before it had loaded the base: its last lines say why; {python}"
        in (lines[-1])
    )
    assert lines[-1].endswith("or serve with --backend native")


def test_an_interpreter_with_another_build_of_the_same_version_is_named(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    for package in ("deltastore", "server"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "server/engine/sampler.py").open("a") as source:
        source.write("# Another commit.\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={other} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = {"PERAXIS_BACKEND": "vllm", "PERAXIS_ENGINE_PYTHON": str(python)}
    code, lines = failed_start(artifacts.base, tmp_path, **environment)
    assert code == 1
    (line,) = [line for line in lines if "with code" in line]
    assert line.startswith(f"error: {sys.executable} has peraxis")
    assert "install the server's build there" in line


def test_the_command_for_the_first_key_is_shown_before_the_base_loads(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    base = shutil.copytree(artifacts.base, tmp_path / "base")
    (base / "model.safetensors").unlink()
    _, lines = failed_start(base, tmp_path, PERAXIS_AUTH="keys")
    assert lines[-1].startswith("error: ")
    command = f"peraxis keys create --registry {tmp_path / 'registry'} --tenant NAME --role admin"
    assert sum(command in line for line in lines[:-1]) == 1


def test_a_base_without_a_tokenizer_is_named(artifacts: Artifacts, tmp_path: Path) -> None:
    base = shutil.copytree(artifacts.base, tmp_path / "base")
    for path in base.glob("tokenizer*"):
        path.unlink()
    code, lines = failed_start(base, tmp_path)
    assert code == 1
    assert lines[-1].startswith("error: ")
    assert "tokenizer" in lines[-1]


def test_a_base_whose_generation_config_cannot_be_obeyed_is_named(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    base = shutil.copytree(artifacts.base, tmp_path / "base")
    (base / "generation_config.json").write_text('{"num_beams": 4}')
    code, lines = failed_start(base, tmp_path)
    assert code == 1
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert "generation_config.json" in lines[-1]
    assert "num_beams is 4, which this server cannot obey: leave it out, or set it to 1" in lines[-1]


def test_a_runtime_directory_that_is_a_file_is_named(artifacts: Artifacts, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, lines = failed_start(artifacts.base, tmp_path, XDG_RUNTIME_DIR=str(tmp_path / "file"))
    assert code == 2
    assert "set XDG_RUNTIME_DIR to another one" in lines[-1]


def test_directories_of_servers_that_were_killed_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    stale = tmp_path / f"{PREFIX}stale"
    stale.mkdir()
    old = time.time() - 2 * YOUNG_S
    os.utime(stale, (old, old))
    with runtime_directory() as first:
        os.utime(first, (old, old))
        with runtime_directory() as second:
            assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_base_loads_ends_all_processes(
    artifacts: Artifacts, tmp_path: Path, signal_number: int, code: int
) -> None:
    command = serve_command("--base", artifacts.base, "--registry", tmp_path / "registry", "--port", 0)
    with subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=subprocess.DEVNULL) as starting:
        server = psutil.Process(starting.pid)
        assert eventually(lambda: len(server.children()) == 2)
        children = server.children()
        starting.send_signal(signal_number)
        assert starting.wait(WAIT_S) == code
    assert eventually(lambda: not [each for each in children if each.is_running()])


def test_an_inline_engine_serves_until_a_signal(artifacts: Artifacts, tmp_path: Path) -> None:
    with live_server(artifacts.base, tmp_path / "registry", "--engine", "inline") as server:
        assert server.upload("plain", artifacts.plain).status_code == 201
        assert server.token_ids("plain", max_new_tokens=4)
        assert "peraxis_ready 1.0" in server.client.get("/metrics").text
        assert server.stop() == 0
