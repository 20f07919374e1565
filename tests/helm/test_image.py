"""The chart runs the image of docker/ as it was made: its user, ports, directories and entry point."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from server.settings import ENV_PREFIX
from server.settings_sources import load_settings
from tests.helm.helpers.rendering import (
    ROOT,
    Object,
    configurations,
    containers,
    environment,
    objects_of,
    of_kind,
    pod_templates,
    server,
)

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
# One instruction per line.
INSTRUCTIONS = DOCKERFILE.replace("\\\n", " ")
IMAGE_ENV = dict(
    re.findall(r"\b([A-Z_]+)=(\S+)", " ".join(re.findall(r"^ENV (.*)$", INSTRUCTIONS, re.MULTILINE)))
)


def test_pods_run_as_the_user_of_the_image() -> None:
    (user, group) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[0]
    for configuration in ("everything", "ray"):
        for pod in pod_templates(objects_of(configuration)):
            security = pod["spec"]["securityContext"]
            assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group))


def test_the_server_listens_where_the_image_says() -> None:
    (ports,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)
    container = server(objects_of("defaults"))
    assert {port["containerPort"] for port in container["ports"]} == set(map(int, ports.split()))


def test_the_image_s_caches_lie_on_the_cache_volume() -> None:
    names = ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    for pod in pod_templates(objects_of("everything")):
        for container in containers(pod):
            given = environment(container)
            assert {name: given[name] for name in names} == {name: IMAGE_ENV[name] for name in names}
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts["cache"] == IMAGE_ENV["XDG_CACHE_HOME"]


def test_arguments_go_to_the_image_s_entry_point() -> None:
    # It reaps processes and passes signals on; a `command` would take its place.
    (entry_point,) = re.findall(r"^ENTRYPOINT \[(.*)\]$", DOCKERFILE, re.MULTILINE)
    assert entry_point.endswith('/bin/peraxis"')
    container = server(objects_of("defaults"))
    assert (container["args"], "command" in container) == (["serve"], False)


def set_variables(container: Object, patch: pytest.MonkeyPatch, base: Path) -> None:
    """Set the settings' variables as they are in a container: the image's, and the chart's over them."""
    for name, value in {**IMAGE_ENV, **environment(container)}.items():
        if name.startswith(ENV_PREFIX):
            # The directory must exist.
            patch.setenv(name, str(base) if name == "PERAXIS_BASE" else value)


@pytest.mark.parametrize("configuration", [each for each in sorted(configurations()) if "ray" not in each])
def test_the_server_of_every_configuration_takes_its_settings_in_the_image(
    configuration: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_variables(server(objects_of(configuration)), monkeypatch, tmp_path)
    settings = load_settings({}).settings
    assert (settings.port, settings.admin_port) == (8080, 9090)


@pytest.mark.parametrize("configuration", [each for each in sorted(configurations()) if "ray" in each])
def test_the_application_of_every_configuration_is_built_in_each_of_ray_s_pods(
    configuration: str, tmp_path: Path
) -> None:
    scale = pytest.importorskip("server.scale.app", reason="needs the extra ray: pip install -e '.[ray]'")
    objects = objects_of(configuration)
    (service,) = of_kind(objects, "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    for pod in pod_templates(objects):
        with pytest.MonkeyPatch.context() as patch:
            (container,) = pod["spec"]["containers"]
            set_variables(container, patch, tmp_path)
            scale.app({**application["args"], "base": str(tmp_path)})
