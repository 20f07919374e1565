"""How `make image` gives the build what pip on this machine needs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    # Not imported: a PyPI package is named docker, too.
    return runpy.run_path(str(ROOT / "docker/build_image.py"))


def test_files_and_indexes_that_pip_is_configured_with_are_mounted(
    script: dict[str, Any], tmp_path: Path
) -> None:
    certificates, wheels, index = tmp_path / "ca.crt", tmp_path / "wheels", tmp_path / "index/simple"
    certificates.touch()
    wheels.mkdir()
    index.mkdir(parents=True)
    settings = {
        "cert": str(certificates),
        "find-links": f"{wheels} https://example.com/wheels {tmp_path}/missing",
        "extra-index-url": f"file://{index}",
        "timeout": "180",
    }

    # Pages of an index of files link to files beside its own directory.
    assert script["local_paths"](settings) == sorted([str(certificates), str(wheels), str(index.parent)])


def test_the_environment_overrides_pips_configuration_files(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = tmp_path / "pip.conf"
    configuration.write_text("[global]\ntimeout = 7\nretries = 2\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    monkeypatch.setenv("PIP_TIMEOUT", "9")

    settings = script["pip_settings"]()

    assert settings["timeout"] == "9"
    assert settings["retries"] == "2"
