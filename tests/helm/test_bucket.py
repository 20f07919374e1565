"""Servers of a registry in a bucket reach it, keep its objects on their nodes, and have no claim for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.helpers.rendering import Object, environment, objects_of, of_kind, rendered, server, the

GIGABYTE = 1_000_000_000


def with_bucket(**s3: Any) -> list[Object]:
    return rendered({"registry": {"s3": {"url": "s3://bucket/prefix", **s3}}})


def ports_of(objects: list[Object]) -> set[int]:
    """Return the ports that the network policy opens to every address."""
    rules = the(objects, "NetworkPolicy")["spec"]["egress"]
    return {port["port"] for rule in rules if "to" not in rule for port in rule["ports"]}


def test_the_bucket_is_the_registry_and_there_is_no_claim_for_it() -> None:
    objects = objects_of("bucket")
    assert environment(server(objects))["PERAXIS_REGISTRY"] == "s3://acme-variants/registry"
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "demo-peraxis-base"


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("100Gi", 100 << 30), ("90G", 90 * GIGABYTE), ("1Ti", 1 << 40), ("90000Mi", 90_000 << 20)],
)
def test_the_cache_keeps_room_for_unfinished_uploads_on_its_volume(size: str, num_bytes: int) -> None:
    objects = with_bucket(cache={"size": size})
    variables = environment(server(objects))
    volumes = the(objects, "StatefulSet")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "registry", "emptyDir": {"sizeLimit": size}} in volumes
    mounts = {each["mountPath"]: each["name"] for each in server(objects)["volumeMounts"]}
    assert mounts[variables["PERAXIS_REGISTRY_CACHE"]] == "registry"
    assert int(variables["PERAXIS_REGISTRY_CACHE_GB"]) == num_bytes // GIGABYTE - 64


def test_credentials_come_from_the_secret() -> None:
    assert server(with_bucket(credentialsSecret="s3-key"))["envFrom"] == [{"secretRef": {"name": "s3-key"}}]


def test_without_a_secret_the_service_account_has_the_role() -> None:
    objects = objects_of("bucket")
    assert "envFrom" not in server(objects)
    assert "eks.amazonaws.com/role-arn" in the(objects, "ServiceAccount")["metadata"]["annotations"]
    assert {80, 443} <= ports_of(objects)


def test_an_endpoint_without_tls_is_allowed_and_its_port_is_open() -> None:
    objects = with_bucket(endpoint="http://minio.storage:9000", credentialsSecret="s3-key", region="local")
    variables = environment(server(objects))
    assert variables["AWS_ENDPOINT_URL"] == "http://minio.storage:9000"
    assert (variables["AWS_ALLOW_HTTP"], variables["AWS_REGION"]) == ("true", "local")
    assert ports_of(objects) == {53, 9000}


def test_an_endpoint_with_tls_allows_no_other() -> None:
    objects = with_bucket(endpoint="https://s3.example", credentialsSecret="s3-key")
    assert "AWS_ALLOW_HTTP" not in environment(server(objects))
    assert ports_of(objects) == {53, 443}


def test_a_registry_on_a_volume_has_neither_a_cache_nor_variables_of_a_store() -> None:
    names = environment(server(objects_of("defaults"))).keys()
    assert not {"PERAXIS_REGISTRY_CACHE", "PERAXIS_REGISTRY_CACHE_GB"} & names
    assert not [name for name in names if name.startswith("AWS_")]
