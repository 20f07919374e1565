"""`peraxis serve` before it serves: a failed start is one line on stderr."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from peraxis.cli import run
from server.cli import default_text
from server.settings import Settings
from tests.server.helpers.live_server import Artifacts


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "HOST", "BASE", "REGISTRY", "ADMIN_PORT", "DTYPE", "DEVICE"):
        monkeypatch.delenv(f"PERAXIS_{name}", raising=False)


def test_the_help_shows_the_default_of_every_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)
    assert run(["serve", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split()[1]: line for line in lines if line.startswith("│ --")}
    settings = {f"--{name.replace('_', '-')}": name for name in Settings.model_fields}
    assert {"--port", "--max-gpu-deltas", "--auth"} <= shown.keys() & settings.keys()
    for flag in shown.keys() & settings.keys():
        assert f"[default: ({default_text(settings[flag])})]" in shown[flag]
    assert "[default: (8000)]" in shown["--port"]
    assert "[default: (as many as fit, up to 64)]" in shown["--max-gpu-deltas"]


def failed(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    """Run the command; return its exit code and its one line on stderr."""
    code = run(["serve", *map(str, args)])
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert captured.out == ""
    assert len(lines) == 1
    return code, lines[0]


def test_a_port_in_use_is_named(
    capsys: pytest.CaptureFixture[str], artifacts: Artifacts, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = failed(capsys, "--base", artifacts.base, "--registry", tmp_path / "r", "--port", port)
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line


def test_an_unknown_host_is_named(
    capsys: pytest.CaptureFixture[str], artifacts: Artifacts, tmp_path: Path
) -> None:
    code, line = failed(
        capsys,
        "--base",
        artifacts.base,
        "--registry",
        tmp_path / "r",
        "--host",
        "no.such.invalid",
        "--auth",
        "keys",
    )
    assert code == 2
    assert "cannot listen on no.such.invalid:8000" in line


def test_a_directory_without_a_checkpoint_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, line = failed(capsys, "--base", tmp_path, "--registry", tmp_path / "r", "--port", 0)
    assert code == 1
    assert f"{tmp_path / 'config.json'} does not exist" in line
    assert "damaged" not in line


def test_an_engine_that_cannot_start_says_why_once(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    assert (
        run(["serve", "--base", f"{tmp_path / 'base'}", "--registry", f"{tmp_path / 'r'}", "--port", "0"])
        == 1
    )
    assert capfd.readouterr().err.count("does not exist") == 1


def test_a_checkpoint_is_not_made_into_a_registry(
    capsys: pytest.CaptureFixture[str], artifacts: Artifacts
) -> None:
    before = sorted(artifacts.base.iterdir())
    code, line = failed(capsys, "--base", artifacts.base, "--registry", artifacts.base, "--port", 0)
    assert code == 2
    assert f"{artifacts.base} is not a registry" in line
    assert sorted(artifacts.base.iterdir()) == before


def test_a_registry_that_is_a_file_is_named(
    capsys: pytest.CaptureFixture[str], artifacts: Artifacts, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, line = failed(capsys, "--base", artifacts.base, "--registry", tmp_path / "file", "--port", 0)
    assert code == 2
    assert f"{tmp_path / 'file'} is a file and not a registry" in line


def test_a_missing_setting_is_named_with_every_way_to_set_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = failed(capsys)
    assert code == 2
    assert line == "error: base is missing: give --base, PERAXIS_BASE or base in a --config file"


def test_with_json_the_error_is_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port", "70000", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"]


def test_print_config_shows_each_value_and_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "peraxis.toml"
    config.write_text('registry = "here"\nport = 1\nmax_queue = 3\n')
    monkeypatch.setenv("PERAXIS_PORT", "9000")
    monkeypatch.setenv("PERAXIS_MAX_QUEUE", "5")
    args = ["--base", str(tmp_path), "--max-queue", "7", "--config", str(config), "--print-config"]
    assert run(["serve", *args]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f'base = "{tmp_path}"  # from --base' in lines
    assert "max_queue = 7  # from --max-queue" in lines
    assert "port = 9000  # from PERAXIS_PORT" in lines
    assert 'registry = "here"  # from the configuration file' in lines
    assert 'device = "auto"  # default' in lines
