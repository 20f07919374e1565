"""bootstrap.py: where torch comes from, what installs it, and environments that cannot be used."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import bootstrap

ROOT = Path(bootstrap.__file__).parent


class Index(BaseHTTPRequestHandler):
    """A package index that knows torch alone."""

    def do_HEAD(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # Its thread may be slow to run beside other work.
    monkeypatch.setattr(bootstrap, "ANSWER_S", 240.0)
    with HTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_machine_without_a_gpu_takes_the_index_of_cpu_builds(server: str) -> None:
    assert bootstrap.torch_index({}, False, f"{server}/whl/cpu") == f"{server}/whl/cpu"


def test_a_machine_with_a_gpu_asks_no_index() -> None:
    assert bootstrap.torch_index({}, True, "http://never.invalid") is None


@pytest.mark.parametrize(("chosen", "index"), [("https://mine/simple", "https://mine/simple"), ("", None)])
def test_torch_index_overrides_what_the_machine_has(chosen: str, index: str | None, server: str) -> None:
    for has_gpu in (False, True):
        assert bootstrap.torch_index({"TORCH_INDEX": chosen}, has_gpu, f"{server}/whl/cpu") == index


def test_an_index_without_torch_is_left_with_a_line(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bootstrap.torch_index({}, False, f"{server}/other") is None
    assert f"{server}/other does not answer: torch comes from pip's default" in capsys.readouterr().err


def test_an_index_that_accepts_and_never_answers_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert bootstrap.torch_index({}, False, f"http://127.0.0.1:{silent.getsockname()[1]}") is None


def test_uv_installs_only_where_pip_has_no_settings() -> None:
    python = Path(".venv/bin/python")
    assert bootstrap.installer(python, "/usr/bin/uv", [])[:3] == ["/usr/bin/uv", "pip", "install"]
    for uv, settings in ((None, []), ("/usr/bin/uv", ["PIP_INDEX_URL"])):
        assert bootstrap.installer(python, uv, settings)[:3] == [str(python), "-m", "pip"]


def test_an_environment_without_a_python_that_starts_is_named_and_kept(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/nowhere/python3")
    with pytest.raises(
        SystemExit, match=r"has no Python that starts and 3\.11 is needed: remove it, or name another"
    ):
        bootstrap.make_venv(tmp_path)
    assert (tmp_path / "bin" / "python").is_symlink()


def test_an_environment_of_an_old_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho 3 9\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=r"has Python 3\.9 and 3\.11 is needed"):
        bootstrap.make_venv(tmp_path)


def test_an_environment_without_pip_gets_it(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = bootstrap.make_venv(venv)
    assert subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode == 0


def test_a_step_that_fails_says_what_it_needs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bootstrap.py"), str(tmp_path / "bin"), "runtime"]
    (tmp_path / "bin").write_text("a file, no directory")
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 1
    assert "has no Python that starts" in ended.stderr


def test_dev_is_what_checks_tests_and_operations_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["dev"] == ["peraxis[check,ops,test]"]
