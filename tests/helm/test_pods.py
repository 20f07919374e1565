"""Pods run without rights, write where they may, and start, serve and end as the server needs."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

from server.api.openapi import routes_of
from server.app import PUBLIC_ROUTERS
from server.supervisor.supervisor import LAST_BYTES_S
from tests.helm.helpers.rendering import (
    NAME,
    Object,
    configurations,
    containers,
    environment,
    objects_of,
    pod_templates,
    rendered,
    server,
    the,
)

CONFIGURATIONS = sorted(configurations())
SERVING = [each for each in CONFIGURATIONS if "ray" not in each]
# As the Pod Security Standard "restricted" lists them.
ALLOWED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


def every_container() -> list[Any]:
    return [
        pytest.param(pod, container, id=f"{configuration}-{container['name']}")
        for configuration in CONFIGURATIONS
        for pod in pod_templates(objects_of(configuration))
        for container in containers(pod)
    ]


@pytest.mark.parametrize(("pod", "container"), every_container())
def test_the_standard_restricted_admits_every_container(pod: Object, container: Object) -> None:
    spec, security = pod["spec"], container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["privileged"] is False
    assert security["runAsNonRoot"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert all(volume.keys() - {"name"} <= ALLOWED_VOLUMES for volume in spec["volumes"])
    assert not [port for port in container.get("ports", []) if "hostPort" in port]


@pytest.mark.parametrize(("pod", "container"), every_container())
def test_a_container_writes_to_volumes_alone(pod: Object, container: Object) -> None:
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    variables = environment(container)
    libraries = ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    for name in ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", *libraries):
        path = PurePosixPath(variables[name])
        assert {str(path), *map(str, path.parents)} & writable, name


@pytest.mark.parametrize(("pod", "container"), every_container())
def test_every_mount_has_its_volume(pod: Object, container: Object) -> None:
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    templates = {"cache"} if "cache" not in volumes else set()
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes | templates


@pytest.mark.parametrize(("pod", "container"), every_container())
def test_no_variable_of_a_service_is_read_as_a_setting(pod: Object, container: Object) -> None:
    # A Service named peraxis would set PERAXIS_PORT to an address.
    assert pod["spec"]["enableServiceLinks"] is False


def test_the_job_of_the_first_key_alone_has_a_token_of_the_kubernetes_api() -> None:
    for configuration in SERVING:
        objects = objects_of(configuration)
        trusted = [pod for pod in pod_templates(objects) if pod["spec"]["automountServiceAccountToken"]]
        components = [pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in trusted]
        assert components == (["first-key"] if configuration == "everything" else [])


def test_the_base_is_read_only_to_all_but_its_download() -> None:
    for configuration in CONFIGURATIONS:
        for pod in pod_templates(objects_of(configuration)):
            for container in containers(pod):
                mounts = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/base"]
                assert all(
                    mount.get("readOnly", False) != (container["name"] == "download-base") for mount in mounts
                )


def test_a_volume_that_is_only_read_is_claimed_so() -> None:
    objects = objects_of("existing-claims")
    volumes = the(objects, "StatefulSet")["spec"]["template"]["spec"]["volumes"]
    assert {"claimName": "checkpoints", "readOnly": True} in [
        each.get("persistentVolumeClaim") for each in volumes
    ]


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_probes_ask_for_routes_that_need_no_key(probe: str) -> None:
    get = server(objects_of("defaults"))[probe]["httpGet"]
    routes = {route.path for router in PUBLIC_ROUTERS for route in routes_of(router)}
    assert get["path"] in routes
    assert get["port"] == "http"
    assert get["path"] == ("/health" if probe == "livenessProbe" else "/ready")


def test_a_base_has_the_time_to_load_that_the_values_give() -> None:
    probe = server(rendered({"probes": {"startupSeconds": 3601}}))["startupProbe"]
    assert 3601 <= probe["periodSeconds"] * probe["failureThreshold"] < 3606


def test_an_engine_that_restarts_is_no_reason_to_end_the_pod() -> None:
    probe = server(objects_of("defaults"))["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 120


@pytest.mark.parametrize("configuration", SERVING)
def test_a_pod_has_the_time_to_drain(configuration: str) -> None:
    spec = the(objects_of(configuration), "StatefulSet")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = float(environment(container)["PERAXIS_SHUTDOWN_TIMEOUT"])
    assert before > 0
    assert spec["terminationGracePeriodSeconds"] > before + drain + LAST_BYTES_S


def test_a_longer_drain_makes_a_longer_grace_period() -> None:
    values = {"settings": {"shutdown_timeout": 600.5}, "preStopSeconds": 30}
    spec = the(rendered(values), "StatefulSet")["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 30 + 601 + 20


def test_the_ports_are_those_that_the_server_listens_on() -> None:
    container = server(objects_of("defaults"))
    variables = environment(container)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": int(variables["PERAXIS_PORT"]), "admin": int(variables["PERAXIS_ADMIN_PORT"])}
    assert variables["PERAXIS_HOST"] == "0.0.0.0"


def test_threads_are_counted_by_the_limit_of_cpus() -> None:
    (variable,) = [
        each for each in server(objects_of("defaults"))["env"] if each["name"] == "OMP_NUM_THREADS"
    ]
    assert variable["valueFrom"]["resourceFieldRef"] == {"resource": "limits.cpu", "divisor": "1"}
    assert environment(server(rendered({"ompNumThreads": 6})))["OMP_NUM_THREADS"] == "6"


def test_a_gpu_is_asked_for_and_its_nodes_are_tolerated() -> None:
    spec = the(objects_of("one-gpu"), "StatefulSet")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert environment(container)["PERAXIS_DEVICE"] == "cuda"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    assert "nvidia.com/gpu" not in server(objects_of("cpu"))["resources"]["limits"]


def test_an_engine_with_vllm_gets_the_gpu_the_nodes_and_the_time_that_the_values_give() -> None:
    spec = the(objects_of("gpu-vllm"), "StatefulSet")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    variables = environment(container)
    assert (variables["PERAXIS_BACKEND"], variables["PERAXIS_DEVICE"]) == ("vllm", "cuda")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["nodeSelector"]
    assert [each["key"] for each in spec["tolerations"]] == ["nvidia.com/gpu", "dedicated"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600


def test_a_server_of_several_ranks_gets_a_gpu_for_each() -> None:
    objects = rendered(
        {
            "gpu": {"enabled": True},
            "settings": {"backend": "vllm", "tensor_parallel_size": 4},
            "shm": {"size": "8Gi"},
        }
    )
    assert server(objects)["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert environment(server(objects))["PERAXIS_TENSOR_PARALLEL_SIZE"] == "4"


def test_shared_memory_is_a_volume_in_memory_where_a_size_is_given() -> None:
    spec = the(rendered({"shm": {"size": "8Gi"}}), "StatefulSet")["spec"]["template"]["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in spec["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]
    assert "shm" not in [
        volume["name"]
        for volume in the(objects_of("defaults"), "StatefulSet")["spec"]["template"]["spec"]["volumes"]
    ]


def test_servers_are_spread_by_their_own_labels() -> None:
    template = the(objects_of("replicas"), "StatefulSet")["spec"]["template"]
    constraints = template["spec"]["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in constraints] == [
        "topology.kubernetes.io/zone",
        "kubernetes.io/hostname",
    ]
    for each in constraints:
        assert each["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_a_cache_of_its_own_ends_with_its_server() -> None:
    spec = the(objects_of("one-gpu"), "StatefulSet")["spec"]
    assert [each["metadata"]["name"] for each in spec["volumeClaimTemplates"]] == ["cache"]
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Delete"}
    assert "cache" not in [volume["name"] for volume in spec["template"]["spec"]["volumes"]]


def test_a_new_chart_with_the_same_image_restarts_no_server() -> None:
    labels = the(objects_of("defaults"), "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert not [value for value in labels.values() if "0.1.0" in value]


def test_an_uninstalled_chart_keeps_its_volumes() -> None:
    for purpose in ("base", "registry"):
        claim = the(objects_of("defaults"), "PersistentVolumeClaim", f"{NAME}-{purpose}")
        assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
