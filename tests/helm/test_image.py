"""The chart runs the image of docker/ as it was made: its user, ports, directories and entry point."""

from __future__ import annotations

import re

from tests.helm.helpers.rendering import ROOT, containers, environment, objects_of, pod_templates, server

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
    names = ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR")
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
