"""How `make image` gives the build what pip on this machine needs."""

from __future__ import annotations

import re
import runpy
import subprocess
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


def test_each_backend_is_built_from_a_target_with_the_torch_that_its_constraints_pin(
    script: dict[str, Any],
) -> None:
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    targets = set(re.findall(r"^FROM runtime AS (\S+)$", dockerfile, re.MULTILINE))

    for name, backend in script["BACKENDS"].items():
        assert backend.target in targets, name
        stage = dockerfile.split(f" AS environment-{backend.target}\n")[1].split("\nFROM ")[0]
        assert re.search(rf"--constraint {backend.constraints} ", stage), name
        assert re.search(r"^torch==", (ROOT / backend.constraints).read_text(), re.MULTILINE), name


def test_make_image_builds_and_proves_the_backend_that_it_is_given() -> None:
    for backend, target in (("native", "cpu"), ("vllm", "vllm-cpu")):
        shown = subprocess.run(
            ["make", "--dry-run", "image", f"BACKEND={backend}"], cwd=ROOT, capture_output=True, text=True
        ).stdout
        build, proof = [line for line in shown.splitlines() if "docker/" in line]
        assert f"--backend '{backend}' --tag 'localhost/peraxis:{target}'" in build
        assert proof.endswith(f"--backend '{backend}' 'localhost/peraxis:{target}'")
