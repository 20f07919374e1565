"""`peraxis serve` before it serves: a failed start is one line on stderr."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from peraxis.cli import run
from server.settings import Settings
from tests.helpers.hub import asked_hub, running_hub
from tests.server.helpers.live_server import Artifacts, live_server


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "HOST", "BASE", "REGISTRY", "ADMIN_PORT", "DTYPE", "DEVICE"):
        monkeypatch.delenv(f"PERAXIS_{name}", raising=False)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the lines of the help by flag."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)
    assert run(["serve", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {f"--{line.partition(' --')[2].split()[0]}": line for line in lines if " --" in line[:8]}


def test_every_setting_but_the_table_of_limits_has_a_flag_with_its_help(shown: dict[str, str]) -> None:
    settings = {f"--{name.replace('_', '-')}": field for name, field in Settings.model_fields.items()}
    assert settings.keys() - shown.keys() == {"--default-limits"}
    assert shown.keys() - settings.keys() == {"--config", "--print-config", "--check", "--json", "--help"}
    for flag in shown.keys() & settings.keys():
        assert str(settings[flag].description) in shown[flag]


def test_the_help_shows_defaults_choices_and_what_is_required(shown: dict[str, str]) -> None:
    assert "[default: 8000]" in shown["--port"]
    assert "[default: (as many as fit, up to 64)]" in shown["--max-gpu-deltas"]
    assert "[default: none]" in shown["--auth"]
    assert "[default:" not in shown["--otlp-endpoint"]
    assert "<auto|cpu|cuda>" in shown["--device"]
    assert [flag for flag, line in shown.items() if "[required]" in line] == ["--base", "--registry"]


def test_the_flags_stand_in_panels(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    titles = [line.split("─ ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("╭")]
    assert [title.partition(" ─")[0] for title in titles] == [
        "Options",
        "Base and registry",
        "Memory",
        "Requests",
        "Tenants and access",
        "Network",
        "Processes",
        "Logging",
    ]


def test_a_choice_is_checked_wherever_it_comes_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = ("--base", tmp_path, "--registry", tmp_path / "r")
    wanted = "input should be 'auto', 'cpu' or 'cuda', got 'tpu'"
    assert failed(capsys, *args, "--device", "tpu") == (2, f"error: device (from --device): {wanted}")
    monkeypatch.setenv("PERAXIS_DEVICE", "tpu")
    assert failed(capsys, *args) == (2, f"error: device (from PERAXIS_DEVICE): {wanted}")


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


def test_a_flag_that_says_no_overrides_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERAXIS_LOG_PROMPTS", "1")
    place = ["--base", str(tmp_path), "--registry", str(tmp_path / "r"), "--print-config"]
    assert run(["serve", *place, "--no-log-prompts"]) == 0
    assert "log_prompts = false  # from --log-prompts" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--base", "--source-dir", "--registry-cache"])
def test_an_empty_path_of_a_flag_is_refused(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--base", str(tmp_path), "--registry", str(tmp_path / "r"), "--print-config"]
    assert run(["serve", *place, flag, ""]) != 0
    assert "path is empty: give a directory" in capsys.readouterr().err


def test_a_base_of_a_hub_is_fetched_at_start_and_served(artifacts: Artifacts, tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.add_directory("base", artifacts.base)
        commit = hub.add_commit("base", artifacts.base, "v1")
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        with live_server(
            Path("acme/base@v1"), tmp_path / "registry", environment=environment, working_directory=tmp_path
        ) as server:
            assert "fetching acme/base@v1 from the hub: " in server.log.read_text()
            assert server.upload("mine", artifacts.plain).status_code == 201
            assert server.generate("mine", prompt="hello", max_new_tokens=2).status_code == 200
    assert [path.name for path in (tmp_path / "cache" / "models--acme--base" / "snapshots").iterdir()] == [
        commit
    ]


def test_a_revision_of_a_base_that_the_hub_lacks_is_named_before_a_registry_is_made(
    artifacts: Artifacts, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with asked_hub(monkeypatch, tmp_path / "cache") as hub:
        hub.add_directory("base", artifacts.base)
        code, line = failed(capsys, "--base", "acme/base@v9", "--registry", tmp_path / "registry")
    assert code == 1
    assert line.startswith(
        "error: acme/base@v9: the hub has acme/base, and no revision 'v9' of it: give a branch"
    )
    assert not (tmp_path / "registry").exists()


def test_print_config_shows_the_id_of_a_base_and_fetches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with asked_hub(monkeypatch, tmp_path / "cache") as hub:
        assert run(["serve", "--base", "acme/base@v1", "--registry", "r", "--print-config"]) == 0
        assert 'base = "acme/base@v1"  # from --base' in capsys.readouterr().out
        assert hub.requests == []
