"""Values that are unknown, missing, wrong or contradictory are refused by name; settings are those of the server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, HelmError
from helm_python.errors import HelmValuesError

from docs.chart_settings import OWNED_BY_CHART, SCHEMA, settings_schema
from server.settings import ENV_PREFIX, Settings
from server.settings_sources import load_settings
from tests.helm.helpers.rendering import (
    CHART,
    RAY,
    configurations,
    environment,
    notes,
    objects_of,
    rendered,
    server,
)

SERVING = sorted(each for each in configurations() if "ray" not in each)
MANY = {"accessModes": ["ReadWriteMany"]}
BUCKET: dict[str, Any] = {"registry": {"s3": {"url": "s3://bucket/prefix"}}}


def with_bucket(**registry: str) -> dict[str, Any]:
    """Return the values of a registry in a bucket with more values of the registry."""
    return {**BUCKET, "registry": {**BUCKET["registry"], **registry}}


def nested(path: str, value: object) -> dict[str, Any]:
    """Return values with one value at a path of names with dots between them."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def paths_of(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the path of every value that is a table or stands in one."""
    paths = []
    for name, value in values.items():
        paths.append(f"{prefix}{name}")
        if isinstance(value, dict):
            paths += paths_of(value, f"{prefix}{name}.")
    return paths


DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
# Tables whose names are the operator's: labels, amounts, and what Kubernetes or Ray describe.
FREE = (
    "resources",
    "labels",
    "annotations",
    "affinity",
    "ray.args",
    "ray.head",
    "podAnnotations",
    "podLabels",
    "nodeSelector",
)
TABLES = [
    path
    for path in ["", *paths_of(DEFAULTS)]
    if not path.endswith(FREE) and not any(f"{free}." in f"{path}." for free in FREE)
]


def value_at(path: str) -> Any:
    value: Any = DEFAULTS
    for name in filter(None, path.split(".")):
        value = value[name]
    return value


def refusal(values: dict[str, Any]) -> str:
    with Chart.load(CHART) as chart, pytest.raises(HelmValuesError) as caught:
        chart.validate_schema(values)
    return str(caught.value)


@pytest.mark.parametrize(
    "table", [path for path in TABLES if isinstance(value_at(path), dict) and "thresholds" not in path]
)
def test_an_unknown_value_is_named(table: str) -> None:
    message = refusal(nested(f"{table}.mistyped".strip("."), 1))
    place = f"/{table.replace('.', '/')}" if table else ""
    assert f"at '{place}': additional properties 'mistyped'" in message


# A setting has its default in the server, and a security context none at all.
@pytest.mark.parametrize(
    "path", [path for path in TABLES if path and not path.startswith(("settings.log", "podSecurityContext."))]
)
def test_a_missing_value_is_named(path: str) -> None:
    # null takes a default away.
    *_, name = path.split(".")
    assert f"'{name}'" in refusal(nested(path, None))


@pytest.mark.parametrize(
    "path",
    [path for path in TABLES if path and not isinstance(value_at(path), dict)],
)
def test_a_value_of_another_type_is_named(path: str) -> None:
    assert f"'/{path.replace('.', '/')}'" in refusal(nested(path, {"a": "table"}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("replicaCount", -1),
        ("replicaCount", 1.5),
        ("image.repository", ""),
        ("image.pullPolicy", "Sometimes"),
        ("base.size", "40 gigabytes"),
        ("base.accessModes", []),
        ("base.download.repository", "just-a-name"),
        ("registry.accessModes", ["ReadWriteAlways"]),
        ("registry.subPath", "/absolute"),
        ("service.port", 70000),
        ("preStopSeconds", 0),
        ("shm.size", "8GB"),
        ("probes.startupSeconds", 1),
        ("podSecurityContext.runAsUser", 0),
        ("settings.max_gpu_deltas", 1),
        ("settings.device", "tpu"),
        ("settings.port", 1),
        ("settings.base", "/elsewhere"),
        ("settings.default_limits", {"requests_per_second": 1}),
        ("monitoring.serviceMonitor.interval", "15"),
        ("monitoring.runbookUrl", "runbook"),
        ("compressor.variant", "../escape"),
        ("ray.importPath", "no colon"),
        ("registry.size", "0Gi"),
        ("resources.limits", {"memory": "32GB"}),
        ("fullnameOverride", "a" * 41),
        ("image.repository", "registry.example.com/peraxis:0.1.0"),
        ("adminKey.secretKey", "a/b"),
        ("metricsKey.secretKey", "a/b"),
        ("cache.storageClassName", "Fast SSD"),
        ("ingress.hosts", [{"host": "https://a.example", "path": "/", "pathType": "Prefix"}]),
        ("ingress.tls", [{"secret": "certificate"}]),
        ("httpRoute.parentRefs", [{"gateway": "public"}]),
        ("httpRoute.hostnames", ["not a name"]),
        ("networkPolicy.publicFrom", [{"namespaces": {}}]),
        ("tolerations", [{"name": "gpu"}]),
        ("affinity", {"nodes": {}}),
        ("topologySpreadConstraints", [{"maxSkew": 1}]),
        ("extraVolumeMounts", [{"name": "certificates", "mountPath": "relative"}]),
        ("extraEnv", [{"name": "PERAXIS_PORT", "value": "1"}]),
    ],
)
def test_a_value_out_of_bounds_is_named(path: str, value: object) -> None:
    assert path.split(".")[-1] in refusal(nested(path, value))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicaCount": 2}, ["registry.accessModes", "ReadWriteMany", "2 servers"]),
        ({"replicaCount": 2, "registry": MANY}, ["base.accessModes", "ReadOnlyMany"]),
        ({"autoscaling": {"enabled": True}}, ["registry.accessModes", "4 servers"]),
        ({"ray": {"enabled": True}}, ["registry.accessModes", "4 servers"]),
        (
            {"base": {"accessModes": ["ReadOnlyMany"], "download": {"repository": "a/b"}}},
            ["base.accessModes", "base.download.repository"],
        ),
        ({"registry": {"accessModes": ["ReadOnlyMany"]}}, ["registry.accessModes", "read-only"]),
        ({"base": {"accessModes": ["ReadOnlyMany"]}}, ["base.accessModes", "base.existingClaim"]),
        (
            {"base": {"existingClaim": "one"}, "registry": {"existingClaim": "one"}},
            ["base.existingClaim", "registry.existingClaim", "base.subPath"],
        ),
        ({"base": {"subPath": "a/../../b"}}, ["base.subPath", ".."]),
        (
            {"base": {"download": {"tokenSecretName": "hub"}}},
            ["tokenSecretName", "base.download.repository"],
        ),
        ({"gpu": {"enabled": True}, "settings": {"device": "cpu"}}, ["gpu.enabled", "settings.device"]),
        ({"settings": {"device": "cuda"}}, ["settings.device", "gpu.enabled"]),
        (
            {"settings": {"backend": "native", "engine_python": "/opt/engine/bin/python"}},
            ["settings.engine_python", "settings.backend"],
        ),
        ({"podLabels": {"app.kubernetes.io/name": "other"}}, ["podLabels", "app.kubernetes.io/name"]),
        ({"extraEnv": [{"name": "OMP_NUM_THREADS", "value": "2"}]}, ["extraEnv", "ompNumThreads"]),
        ({"extraVolumes": [{"name": "registry", "emptyDir": {}}]}, ["extraVolumes", "registry"]),
        ({"extraVolumeMounts": [{"name": "a", "mountPath": "/a"}]}, ["extraVolumeMounts", "extraVolumes"]),
        (
            {"monitoring": {"serviceMonitor": {"interval": "1s", "scrapeTimeout": "1m"}}},
            ["serviceMonitor.scrapeTimeout", "1m", "serviceMonitor.interval"],
        ),
        (
            {"replicaCount": 0, "adminKey": {"create": True}},
            ["adminKey.create", "replicaCount"],
        ),
        ({"compressor": {"args": ["--out=/elsewhere"]}}, ["compressor.args", "--out=/elsewhere"]),
        ({"settings": {"auth": "none"}}, ["settings.auth", "allow_unauthenticated"]),
        (
            {"settings": {"auth": "none", "allow_unauthenticated": True}, "adminKey": {"create": True}},
            ["adminKey.create", "settings.auth"],
        ),
        ({"monitoring": {"serviceMonitor": {"enabled": True}}}, ["metricsKey.secretName"]),
        (
            {"adminKey": {"secretName": "key"}, "monitoring": {"serviceMonitor": {"enabled": True}}},
            ["metricsKey.secretName", "role metrics"],
        ),
        ({"compressor": {"enabled": True}}, ["compressor.enabled", "publishKey.secretName", "role publish"]),
        (
            {"publishKey": {"secretName": "key"}, "compressor": {"enabled": True}},
            ["compressor.enabled", "compressor.variant"],
        ),
        (
            {"publishKey": {"secretName": "key"}, "compressor": {"enabled": True, "variant": "a"}},
            ["compressor.finetune.existingClaim"],
        ),
        ({"ingress": {"enabled": True}}, ["ingress.hosts"]),
        ({"httpRoute": {"enabled": True}}, ["httpRoute.parentRefs"]),
        (
            {"base": MANY, "registry": MANY, "autoscaling": {"enabled": True}},
            ["monitoring.serviceMonitor.enabled"],
        ),
        (
            {
                "base": MANY,
                "registry": MANY,
                "adminKey": {"secretName": "key"},
                "monitoring": {"serviceMonitor": {"enabled": True}},
                "autoscaling": {"enabled": True, "runningRequests": 16},
                "settings": {"max_num_seqs": 16},
            },
            ["autoscaling.runningRequests", "settings.max_num_seqs"],
        ),
        (with_bucket(existingClaim="claim"), ["registry.s3.url", "registry.existingClaim"]),
        (with_bucket(subPath="path"), ["registry.s3.url", "registry.subPath"]),
        ({**BUCKET, "base": MANY, "ray": {"enabled": True}}, ["registry.s3.url", "ray.enabled"]),
        (
            {**BUCKET, "settings": {"max_upload_gb": 40}},
            ["registry.s3.cache.size", "settings.max_upload_gb"],
        ),
        *(
            ({"registry": {"s3": {name: value}}}, [f"registry.s3.{name}", "registry.s3.url"])
            for name, value in (
                ("endpoint", "https://s3.example"),
                ("region", "eu-1"),
                ("credentialsSecret", "key"),
            )
        ),
        ({"autoscaling": {"minReplicas": 9}}, ["autoscaling.minReplicas", "autoscaling.maxReplicas"]),
        ({**RAY, "ray": {"enabled": True, "minWorkers": 9}}, ["ray.minWorkers", "ray.maxWorkers"]),
        ({**RAY, "autoscaling": {"enabled": True}}, ["ray.enabled", "autoscaling.enabled"]),
        ({**RAY, "replicaCount": 3}, ["ray.enabled", "replicaCount 3", "ray.minWorkers"]),
        ({**RAY, "cache": {"persistent": True}}, ["ray.enabled", "cache.persistent"]),
        ({**RAY, "shm": {"size": "8Gi"}}, ["ray.enabled", "shm.size", "ray.shmSize"]),
        ({**RAY, "compressor": {"enabled": True}}, ["ray.enabled", "compressor.enabled"]),
        ({**RAY, "monitoring": {"alerts": {"enabled": True}}}, ["ray.enabled", "alerts.enabled"]),
        (
            {**RAY, "monitoring": {"serviceMonitor": {"enabled": True}}},
            ["ray.enabled", "serviceMonitor.enabled"],
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_the_way_out(
    values: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(HelmError) as caught:
        rendered(values)
    assert all(word in str(caught.value) for word in words), caught.value


def test_names_that_look_like_numbers_stay_text() -> None:
    volumes = {"existingClaim": "123", "subPath": "5"}
    objects = rendered({"base": volumes, "registry": {**volumes, "subPath": "6"}, "priorityClassName": "0"})
    pod = next(each for each in objects if each["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "0"
    claims = [
        each["persistentVolumeClaim"]["claimName"]
        for each in pod["volumes"]
        if "persistentVolumeClaim" in each
    ]
    assert claims == ["123", "123"]
    assert [each["subPath"] for each in pod["containers"][0]["volumeMounts"] if "subPath" in each] == [
        "5",
        "6",
    ]


def test_the_schema_has_every_setting_of_the_server_with_its_bounds() -> None:
    assert json.loads(SCHEMA.read_text())["properties"]["settings"] == settings_schema(), (
        "run `make reference`"
    )


def test_the_chart_itself_sets_the_settings_that_are_no_values() -> None:
    # Some belong to a registry in a bucket.
    given = environment(server(objects_of("bucket")))
    assert {f"{ENV_PREFIX}{name.upper()}" for name in OWNED_BY_CHART} <= given.keys()
    assert not OWNED_BY_CHART & settings_schema()["properties"].keys()


@pytest.mark.parametrize("configuration", SERVING)
def test_the_server_takes_the_variables_of_every_configuration(
    configuration: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {
        name: value
        for name, value in environment(server(objects_of(configuration))).items()
        if name.startswith(ENV_PREFIX)
    }
    assert {name.removeprefix(ENV_PREFIX).lower() for name in given} <= Settings.model_fields.keys()
    for name, value in given.items():
        # The directory must exist.
        monkeypatch.setenv(name, str(tmp_path) if name == "PERAXIS_BASE" else value)
    settings = load_settings({}).settings
    for name, value in configurations()[configuration].get("settings", {}).items():
        assert getattr(settings, name) == value


def test_every_kind_of_setting_arrives_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    settings = {
        "max_connections": 1_000_000,
        "max_gpu_deltas": 65536,
        "slot_headroom": 1.15,
        "max_host_cache_gb": 0,
        "log_prompts": True,
        "source_dir": f"{first}{os.pathsep}{second}",
        "default_limits": {"requests_per_minute": 60, "max_stored_bytes": 5_000_000_000_000},
    }
    for name, value in environment(server(rendered({"settings": settings}))).items():
        if name.startswith(ENV_PREFIX):
            monkeypatch.setenv(name, str(tmp_path) if name == "PERAXIS_BASE" else value)
    loaded = load_settings({}).settings
    assert (loaded.max_connections, loaded.max_gpu_deltas) == (1_000_000, 65536)
    assert (loaded.slot_headroom, loaded.max_host_cache_gb) == (1.15, 0)
    assert loaded.log_prompts
    assert loaded.source_dir == (first, second)
    assert loaded.default_limits.max_stored_bytes == 5_000_000_000_000


def test_the_notes_say_what_is_still_to_do() -> None:
    text = notes()
    assert "demo-peraxis-base is empty" in text
    assert "exec demo-peraxis-0 -c server" in text
    assert "keys create --registry /registry" in text
    assert "create secret generic demo-peraxis-admin-key" in text
    assert "is empty" not in notes(configurations()["one-gpu"])
    assert "keys create" not in notes(configurations()["llm-d"])
    assert "--role metrics" in notes(configurations()["one-gpu"])
    assert "keys create --registry s3://acme-variants/registry" in notes(configurations()["bucket"])
    made = notes({"adminKey": {"create": True}})
    assert "keys create" not in made
    assert "get secret demo-peraxis-admin-key -o jsonpath='{.data.key}'" in made


def test_the_notes_of_ray_name_its_head() -> None:
    assert "component=ray-head -o name) -c ray-head" in notes(configurations()["ray"])
