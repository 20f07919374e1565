"""The server with Prometheus and Grafana in one Compose file, checked by docker-compose and promtool."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.processes import KILL_S
from server.settings import Settings
from server.supervisor.supervisor import LAST_BYTES_S
from tests.docker.test_dockerfile import image_environment
from tests.helpers.debian import missing
from tests.monitoring.helpers.files import DASHBOARDS

DOCKER = Path(__file__).resolve().parents[2] / "docker"


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def resolved(**environment: str) -> subprocess.CompletedProcess[str]:
    """Run docker-compose, or Docker's plugin of it, to resolve the file; skip the test without either; in CI, fail."""
    path = {"PATH": os.environ["PATH"]}
    for program in (["docker-compose"], ["docker", "compose"]):
        if (
            shutil.which(program[0])
            and subprocess.run([*program, "version"], capture_output=True).returncode == 0
        ):
            command = [*program, "--file", str(DOCKER / "compose.yaml"), "config"]
            return subprocess.run(command, env={**path, **environment}, capture_output=True, text=True)
    missing("docker-compose")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the services as docker-compose resolves them."""
    config = resolved(PERAXIS_BASE=str(tmp_path_factory.mktemp("base")), GRAFANA_PASSWORD="secret")
    assert config.returncode == 0, config.stderr
    services: dict[str, Any] = yaml.safe_load(config.stdout)["services"]
    return services


def mounts_of(service: dict[str, Any]) -> dict[str, str]:
    """Return sources by target; a source is a path of this machine or the name of a volume."""
    mounts = {}
    for volume in service["volumes"]:
        # Version 1 writes SOURCE:TARGET:MODE, version 2 a mapping.
        source, target = (
            volume.split(":")[:2] if isinstance(volume, str) else (volume["source"], volume["target"])
        )
        mounts[target] = source
    return mounts


def test_docker_compose_asks_for_what_has_no_default() -> None:
    refused = resolved(GRAFANA_PASSWORD="secret")

    assert refused.returncode != 0
    assert "set it to the base model's directory" in refused.stderr


def test_the_bucket_of_the_shell_and_its_credentials_reach_the_server(tmp_path: Path) -> None:
    given = {
        "PERAXIS_REGISTRY": "s3://bucket/prefix",
        "PERAXIS_AUTH": "none",
        "PERAXIS_ALLOW_UNAUTHENTICATED": "true",
        "AWS_REGION": "eu-central-1",
        "AWS_ENDPOINT_URL": "http://minio.example:9000",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_SESSION_TOKEN": "token",
    }

    config = resolved(PERAXIS_BASE=str(tmp_path), GRAFANA_PASSWORD="secret", **given)

    assert config.returncode == 0, config.stderr
    environment = yaml.safe_load(config.stdout)["services"]["peraxis"]["environment"]
    assert given.items() <= environment.items()


def test_without_a_bucket_the_registry_is_the_volume_of_the_image(services: dict[str, Any]) -> None:
    environment = services["peraxis"]["environment"]

    assert {environment[name] for name in ("PERAXIS_REGISTRY", "PERAXIS_AUTH")} == {
        image_environment()[name] for name in ("PERAXIS_REGISTRY", "PERAXIS_AUTH")
    }


def test_the_server_has_a_volume_wherever_the_image_reads_or_writes(services: dict[str, Any]) -> None:
    environment = image_environment()

    mounts = mounts_of(services["peraxis"])

    assert mounts.keys() == {
        environment[name] for name in ("PERAXIS_BASE", "PERAXIS_REGISTRY", "XDG_CACHE_HOME")
    }


def test_the_server_is_stopped_after_its_own_timeout(services: dict[str, Any]) -> None:
    grace_s = float(services["peraxis"]["stop_grace_period"].removesuffix("s"))

    assert grace_s >= Settings.model_fields["shutdown_timeout"].default + LAST_BYTES_S + 2 * KILL_S


def test_prometheus_and_grafana_mount_files_of_the_repository(services: dict[str, Any]) -> None:
    for name in ("prometheus", "grafana"):
        sources = {Path(source) for source in mounts_of(services[name]).values() if source.startswith("/")}

        # The operator makes the key.
        assert [path for path in sources if not path.exists()] in ([], [DOCKER / "metrics.key"])


def test_prometheus_scrapes_the_admin_port_of_the_server() -> None:
    job = loaded(DOCKER / "prometheus.yaml")["scrape_configs"][0]

    assert job["static_configs"] == [{"targets": [f"peraxis:{image_environment()['PERAXIS_ADMIN_PORT']}"]}]


def test_promtool_takes_the_configuration_with_its_rules(services: dict[str, Any], tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    text = (DOCKER / "prometheus.yaml").read_text()
    mounts = mounts_of(services["prometheus"])
    key = tmp_path / "metrics.key"
    key.write_text("KEY\n")
    for target, source in {**mounts, "/etc/prometheus/metrics.key": str(key)}.items():
        text = text.replace(target, source)
    configuration = tmp_path / "prometheus.yaml"
    configuration.write_text(text)

    checked = subprocess.run([promtool, "check", "config", configuration], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stderr
    assert "1 rule files found" in checked.stdout


def test_grafana_is_provisioned_with_every_dashboard(services: dict[str, Any]) -> None:
    path = loaded(DOCKER / "grafana/dashboards.yaml")["providers"][0]["options"]["path"]

    mounted = Path(mounts_of(services["grafana"])[path])

    assert {each.name for each in mounted.glob("*.json")} == set(DASHBOARDS)
