"""The commands `peraxis registry ls|rm|gc|check`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deltastore.registry import Registry
from peraxis.cli import run
from tests.deltastore.helpers.crash_storage import artifact, digest_of, make_world, push

Output = pytest.CaptureFixture[str]
COLLECTED = sorted([digest_of(5), digest_of(7)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_world(tmp_path / "registry")
    return tmp_path / "registry"


def test_ls_has_a_line_per_version_and_marks_active_and_quarantined_ones(root: Path, capsys: Output) -> None:
    assert run(["registry", "ls", "--registry", str(root)]) == 0
    titles, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [dict(zip(titles, line, strict=True)) for line in lines]
    found = [(row["OWNER"], row["NAME"], row["VERSION"], row["ACTIVE"]) for row in rows]
    assert found[:3] == [
        ("default", "a", "1", "-"),
        ("default", "a", "2", "active"),
        ("default", "a", "3", "-"),
    ]
    assert rows[1]["DIGEST"] == digest_of(2)[:12]
    assert [row["NAME"] for row in rows if row["ACTIVE"] == "active"] == [
        "a",
        "b",
        "pruned",
        "sick",
        "gone",
        "c",
    ]
    assert [row["NAME"] for row in rows if row["STATE"] == "quarantined"] == ["sick"]


def test_ls_of_an_empty_registry_says_so_on_stderr(tmp_path: Path, capsys: Output) -> None:
    Registry(tmp_path)
    assert run(["registry", "ls", "--registry", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "no variants\n"


def test_ls_gives_the_records_as_json(root: Path, capsys: Output) -> None:
    assert run(["registry", "ls", "--json", "--registry", str(root)]) == 0
    variants = {(v["tenant"], v["name"]): v for v in json.loads(capsys.readouterr().out)}
    assert variants["default", "a"]["active"] == 2
    assert [record["digest"] for record in variants["default", "a"]["versions"]] == [
        digest_of(seed) for seed in (1, 2, 3)
    ]


def test_rm_deletes_a_tenant_s_variant_or_version_without_a_server(root: Path, capsys: Output) -> None:
    delete = ["registry", "rm", "--tenant", "default", "--registry", str(root)]
    assert run([*delete, "a@1"]) == 0
    assert [record.version for record in Registry(root).variant("default", "a").versions] == [2, 3]
    assert run([*delete, "a"]) == 0
    assert "a" not in {variant.name for variant in Registry(root).variants("default")}
    assert run([*delete, "a"]) == 1
    assert run([*delete, "a@latest"]) == 2
    assert "names no version" in capsys.readouterr().err


def test_gc_tells_what_it_would_remove_and_then_removes_it(root: Path, capsys: Output) -> None:
    assert run(["registry", "gc", "--dry-run", "--registry", str(root)]) == 0
    assert f"would remove object {digest_of(5)}" in capsys.readouterr().out
    assert (root / "objects" / digest_of(5)).exists()
    assert run(["registry", "gc", "--json", "--registry", str(root)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["objects"], report["num_partials"], report["dry_run"]) == (COLLECTED, 1, False)
    assert not (root / "objects" / digest_of(5)).exists()


def test_check_says_clean_and_exits_with_zero(root: Path, capsys: Output) -> None:
    assert run(["registry", "check", "--registry", str(root)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "5 objects, 9 versions: clean"


@pytest.mark.parametrize("as_json", [False, True])
def test_check_exits_with_one_and_names_what_it_found(as_json: bool, root: Path, capsys: Output) -> None:
    damaged = root / "objects" / digest_of(1)
    damaged.write_bytes(b"rotten")
    assert run(["registry", "check", "--registry", str(root), *["--json"] * as_json]) == 1
    out = capsys.readouterr().out
    if as_json:
        report = json.loads(out)
        assert (report["clean"], [finding["path"] for finding in report["findings"]]) == (
            False,
            [str(damaged)],
        )
    else:
        assert f"FOUND: {damaged}: its bytes have the digest" in out
        assert out.splitlines()[-1].endswith("1 findings")


def test_gc_on_a_damaged_registry_fails_in_one_line(root: Path, capsys: Output) -> None:
    (root / "variants" / "default" / "a" / "2.json").write_bytes(b"")
    assert run(["registry", "gc", "--registry", str(root)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing was collected" in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["ls", "gc", "check"])
def test_a_directory_that_is_no_registry_is_a_wrong_argument_and_stays_untouched(
    command: str, tmp_path: Path, capsys: Output
) -> None:
    assert run(["registry", command, "--registry", str(tmp_path)]) == 2
    assert f"{tmp_path} is not a registry" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_directory_can_come_from_the_environment(
    root: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERAXIS_REGISTRY", str(root))
    assert run(["registry", "check"]) == 0
    assert "clean" in capsys.readouterr().out


def test_the_command_works_beside_a_server_that_writes(root: Path) -> None:
    registry = Registry(root)
    with registry.open_upload(None) as upload:
        upload.write(artifact(9))
        command = [sys.executable, "-m", "peraxis", "registry", "gc", "--json", "--registry", str(root)]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
        )
        # The abandoned upload; the running one is locked.
        assert json.loads(done.stdout)["num_partials"] == 1
        assert upload.seal().path.exists()
    assert push(registry, artifact(9), "a").record.version == 4
