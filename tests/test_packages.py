"""Debian packages of tests: `make test` says what it installs, and a test without its program says what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.debian import debian_tool

ROOT = Path(__file__).resolve().parent.parent


def make_packages(
    directory: Path, *options: str, target: str = "packages", programs: tuple[str, ...] = ()
) -> str:
    """Run a target as a root who has apt-get and of the programs a few; return what is printed."""
    for name in ("sh", "make", *programs):
        (directory / name).symlink_to(shutil.which(name) or name)
    for name, line in (("id", "echo 0"), ("apt-get", 'echo "apt-get $@"')):
        program = directory / name
        program.write_text(f"#!{shutil.which('sh')}\n{line}\n")
        program.chmod(0o755)
    command = [str(directory / "make"), target, *options]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": str(directory)}, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.skipif(Path("/run/systemd/system").exists(), reason="nothing is installed where systemd runs")
def test_root_is_told_of_the_packages_before_they_are_installed(tmp_path: Path) -> None:
    told, *done = make_packages(tmp_path).splitlines()
    assert told.startswith(
        "installing Debian packages for tests: prometheus docker-compose chromium (PACKAGES=no "
    )
    assert done[-1].endswith("prometheus docker-compose chromium")
    assert all(line.startswith("apt-get ") for line in done)


@pytest.mark.skipif(Path("/run/systemd/system").exists(), reason="nothing is installed where systemd runs")
def test_packages_of_programs_that_are_there_are_not_installed(tmp_path: Path) -> None:
    printed = make_packages(tmp_path, target="client-packages", programs=("curl",))
    assert printed.splitlines()[-1].endswith("--no-install-recommends default-jdk-headless nodejs npm")


def test_no_package_is_installed_if_asked_not_to(tmp_path: Path) -> None:
    printed = make_packages(tmp_path, "PACKAGES=no")
    assert "apt-get" not in printed
    assert "their tests skip: `make packages` as root installs prometheus docker-compose chromium" in printed


def test_a_test_without_its_program_skips_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="make packages"):
        debian_tool("no-such-program")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="make packages"):
        debian_tool("no-such-program")
