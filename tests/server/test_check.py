"""`peraxis serve --check`: findings about this machine, a base and a registry, and that it makes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch

from deltastore.hub import checkpoint_directory
from deltastore.registry import Registry
from deltastore.registry.object_cache import ObjectCache
from peraxis.cli import run
from tests.deltastore.helpers.stored import publish_file, write_stored
from tests.helpers.hub import asked_hub
from tests.helpers.s3_server import Bucket
from tests.server.helpers.live_server import Artifacts, LiveServer

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PERAXIS_")]:
        monkeypatch.delenv(name)


def examined(capsys: Output, *args: object) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the command on the CPU; return the exit code and the checks by subject."""
    code = run(["serve", "--check", "--device", "cpu", "--json", *map(str, args)])
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is (code == 0)
    return code, {check["subject"]: check for check in document["checks"]}


def test_a_machine_is_checked_without_a_base_and_a_registry(capsys: Output) -> None:
    code, checks = examined(capsys)
    assert code == 0
    assert list(checks) == ["torch", "device", "pinned memory", "options"]
    assert checks["options"]["message"] == "give --base and --registry for more checks"


def test_with_a_base_the_number_of_variants_that_fit_is_told(
    artifacts: Artifacts, tmp_path: Path, capsys: Output
) -> None:
    code, checks = examined(capsys, "--base", artifacts.base, "--registry", tmp_path / "new")
    assert code == 0
    assert list(checks)[3:] == ["base", "capacity", "registry", "disk", "variants"]
    assert checks["capacity"]["message"].startswith("at least 64 slots of ")
    assert "deltas of" in checks["disk"]["message"]
    assert checks["registry"]["message"].endswith("new does not exist yet, and `peraxis serve` creates it")
    assert list(tmp_path.iterdir()) == []


def test_a_check_leaves_nothing_in_the_registry(tmp_path: Path, capsys: Output) -> None:
    registry = Registry(tmp_path / "registry")
    code, checks = examined(capsys, "--registry", registry.root)
    assert (code, checks["registry"]["state"]) == (0, "ok")
    report = registry.check()
    assert (report.findings, report.notes) == ((), ())


def test_versions_of_another_base_are_named(server: LiveServer, artifacts: Artifacts, capsys: Output) -> None:
    other = artifacts.foreign.parent / "others" / "base"
    code, checks = examined(capsys, "--base", other, "--registry", server.registry)
    assert (code, checks["variants"]["state"]) == (0, "note")
    assert "were made from another base" in checks["variants"]["message"]
    code, checks = examined(capsys, "--base", artifacts.base, "--registry", server.registry)
    assert (code, checks["variants"]["state"]) == (0, "ok")


def test_quarantined_versions_are_named_without_a_base(tmp_path: Path, capsys: Output) -> None:
    registry = Registry(tmp_path / "registry")
    write_stored(tmp_path / "a", {})
    registry.quarantine(publish_file(registry, tmp_path / "a", "broken"), "chunk 0 is damaged")
    code, checks = examined(capsys, "--registry", registry.root)
    assert (code, checks["variants"]["state"]) == (0, "note")
    assert checks["variants"]["message"].endswith("push their artifacts again (default/broken@1)")


def test_a_registry_of_another_format_has_failed(tmp_path: Path, capsys: Output) -> None:
    registry = Registry(tmp_path / "registry")
    (registry.root / "format.json").write_text('{"format": 99}')
    code, checks = examined(capsys, "--registry", registry.root)
    assert (code, checks["variants"]["state"]) == (1, "failed")
    assert "run the newer version" in checks["variants"]["message"]


def test_an_unfinished_registry_is_not_finished(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "registry" / "uploads").mkdir(parents=True)
    code, checks = examined(capsys, "--registry", tmp_path / "registry")
    assert (code, checks["variants"]["state"]) == (0, "note")
    assert [path.name for path in (tmp_path / "registry").iterdir()] == ["uploads"]


def test_versions_in_a_bucket_are_checked_and_nothing_is_made(
    bucket: Bucket, artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    arguments = ("--registry", bucket.url, "--base", artifacts.base)
    code, checks = examined(capsys, *arguments)
    assert (code, checks["variants"]["state"]) == (0, "note")
    assert not any(obstore.list(bucket.store()))
    Registry.open(bucket.url, ObjectCache(tmp_path / "cache", 1 << 20))
    code, checks = examined(capsys, *arguments)
    assert (code, checks["variants"]["message"]) == (0, "0 versions")
    assert not (tmp_path / "caches" / "peraxis" / "registry").exists()


def test_a_checkpoint_is_no_place_for_a_registry(artifacts: Artifacts, capsys: Output) -> None:
    before = sorted(artifacts.base.iterdir())
    code, checks = examined(capsys, "--registry", artifacts.base)
    assert (code, checks["registry"]["state"]) == (1, "failed")
    assert "is not a registry" in checks["registry"]["message"]
    assert sorted(artifacts.base.iterdir()) == before


def test_settings_come_from_the_environment_and_the_file_as_for_a_server(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("PERAXIS_BASE", str(artifacts.base))
    (tmp_path / "serve.toml").write_text(f'registry = "{tmp_path / "registry"}"\nmax_gpu_deltas = 3\n')
    code, checks = examined(capsys, "--config", tmp_path / "serve.toml")
    assert code == 0
    assert "options" not in checks
    assert checks["capacity"]["message"].startswith("at least 3 slots of ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--check", "--port", "70000"], "port (from --port): "),
        (["--check", "--base", "no-such-directory"], "base (from --base): there is no directory "),
        (["--check", "--admin-host", "127.0.0.1"], "there is no admin port: give --admin-port"),
        (["--check", "--print-config"], "give --check or --print-config"),
        (["--json"], "give --check, too"),
    ],
)
def test_a_wrong_setting_is_the_same_error_as_of_a_server(
    args: list[str], message: str, capsys: Output
) -> None:
    assert run(["serve", *args]) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert (captured.out + captured.err).count("\n") == 1


def test_a_base_that_cannot_be_read_stops_only_its_own_checks(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "none").mkdir()
    code, checks = examined(capsys, "--base", tmp_path / "none", "--registry", tmp_path / "registry")
    assert (code, checks["base"]["state"]) == (1, "failed")
    assert "capacity" not in checks
    assert checks["registry"]["state"] == "ok"


def test_a_base_of_a_hub_is_checked_where_the_cache_has_it_and_is_not_fetched(
    artifacts: Artifacts, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asked_hub(monkeypatch, tmp_path / "cache") as hub:
        hub.add_directory("base", artifacts.base)
        hub.add_commit("base", artifacts.base, "v1")
        code, checks = examined(capsys, "--base", "acme/base@v1")
        assert (code, checks["base"]["state"]) == (1, "failed")
        assert checks["base"]["message"].startswith("acme/base@v1: ")
        assert "are not in huggingface_hub's cache" in checks["base"]["message"]
        assert not hub.fetched()
        checkpoint_directory("acme/base@v1")
        code, checks = examined(capsys, "--base", "acme/base@v1")
        assert (code, checks["base"]["state"], checks["capacity"]["state"]) == (0, "ok", "ok")


def test_a_registry_that_is_a_file_has_failed(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "file").write_text("")
    code, checks = examined(capsys, "--registry", tmp_path / "file" / "registry")
    assert (code, checks["registry"]["state"]) == (1, "failed")
    assert "is no directory" in checks["registry"]["message"]


def test_a_registry_on_a_full_disk_has_failed(small_disk: Any, capsys: Output) -> None:
    disk = small_disk(1 << 16)
    (disk / "space").write_bytes(bytes(1 << 16))
    code, checks = examined(capsys, "--registry", disk)
    assert (code, checks["registry"]["state"]) == (1, "failed")
    assert "full" in checks["registry"]["message"]


def test_memory_that_is_too_small_has_failed_with_the_settings_to_lower(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("PERAXIS_KV_CACHE_GB", "1000000")
    code, checks = examined(capsys, "--base", artifacts.base)
    assert (code, checks["capacity"]["state"]) == (1, "failed")
    assert "--kv-cache-gb" in checks["capacity"]["message"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_missing_has_failed(capsys: Output) -> None:
    code, checks = examined(capsys, "--device", "cuda")
    assert (code, checks["device"]["state"]) == (1, "failed")


def test_the_lines_are_readable_without_json(capsys: Output) -> None:
    assert run(["serve", "--check", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "ok", "ok", "note"]
