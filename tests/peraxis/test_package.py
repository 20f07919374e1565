"""Importing `peraxis`: what it loads, and what it says of modules with the names of its packages."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import peraxis

PACKAGES = ("server", "client", "deltastore", "compressor")


def run(*args: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a directory, which it searches for modules first."""
    return subprocess.run([sys.executable, *args], cwd=directory, capture_output=True, text=True, check=False)


def test_the_import_loads_no_other_package_and_none_of_its_own_modules(tmp_path: Path) -> None:
    program = f"import sys, peraxis; print([*{{*sys.modules}} & {{*{PACKAGES!r}, 'torch', 'typer', 'peraxis.cli'}}])"
    assert run("-c", program, directory=tmp_path).stdout == "[]\n"


def test_the_version_is_that_of_the_package() -> None:
    assert peraxis.__version__ == version("peraxis")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        peraxis.nothing  # noqa: B018


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("is_package", [False, True], ids=["file", "package"])
def test_a_module_of_the_working_directory_in_place_of_a_package_is_named(
    name: str, is_package: bool, tmp_path: Path
) -> None:
    file = tmp_path / name / "__init__.py" if is_package else tmp_path / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit('was imported')\n")
    message = f"{file} is imported in place of Peraxis' own package {name!r}: rename it"
    for args in (["-c", "import peraxis"], ["-m", "peraxis", "version"]):
        done = run(*args, directory=tmp_path)
        assert done.returncode == 1
        assert message in done.stderr
        assert run("-P", *args, directory=tmp_path).returncode == 0
