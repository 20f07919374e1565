"""Services, policies, routes and the budget choose the pods that they are for, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.helpers.rendering import (
    NAME,
    Object,
    configurations,
    objects_of,
    of_kind,
    pod_templates,
    rendered,
    the,
)

CONFIGURATIONS = sorted(configurations())
SERVING = [each for each in CONFIGURATIONS if "ray" not in each]


def matches(selector: dict[str, str], pod: Object) -> bool:
    labels: dict[str, str] = pod["metadata"]["labels"]
    return selector.items() <= labels.items()


def components(objects: list[Object], selector: dict[str, str]) -> set[str]:
    """Return the components of the pods that a selector matches."""
    found = [pod for pod in pod_templates(objects) if matches(selector, pod)]
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in found}


@pytest.mark.parametrize("configuration", SERVING)
def test_services_send_to_servers_alone(configuration: str) -> None:
    objects = objects_of(configuration)
    template = the(objects, "StatefulSet")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    for service in of_kind(objects, "Service"):
        assert components(objects, service["spec"]["selector"]) == {"server"}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_the_public_service_has_no_port_of_administration() -> None:
    (port,) = the(objects_of("defaults"), "Service")["spec"]["ports"]
    assert port["targetPort"] == "http"


def test_the_admin_service_names_every_server_before_it_is_ready() -> None:
    objects = objects_of("defaults")
    admin = the(objects, "Service", f"{NAME}-admin")["spec"]
    assert admin["clusterIP"] == "None"
    assert admin["publishNotReadyAddresses"] is True
    assert the(objects, "StatefulSet")["spec"]["serviceName"] == f"{NAME}-admin"


@pytest.mark.parametrize("configuration", SERVING)
def test_a_stateful_set_and_its_budget_select_its_pods(configuration: str) -> None:
    objects = objects_of(configuration)
    stateful_set = the(objects, "StatefulSet")["spec"]
    selectors = [stateful_set["selector"]["matchLabels"]]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in of_kind(objects, "PodDisruptionBudget")]
    assert all(components(objects, selector) == {"server"} for selector in selectors)


def test_a_budget_exists_where_there_may_be_more_than_one_server() -> None:
    assert not of_kind(objects_of("one-gpu"), "PodDisruptionBudget")
    for configuration in ("replicas", "existing-claims", "gateway"):
        assert the(objects_of(configuration), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def ingress_of(objects: list[Object], port: str) -> list[Any]:
    """Return the peers that the network policy admits to a port; an empty list stands for all."""
    rules = the(objects, "NetworkPolicy")["spec"]["ingress"]
    (rule,) = [rule for rule in rules if [each["port"] for each in rule.get("ports", [])] == [port]]
    return list(rule.get("from", []))


@pytest.mark.parametrize(
    "configuration", [each for each in SERVING if each not in ("everything", "existing-claims")]
)
def test_the_admin_port_is_open_to_the_namespaces_of_monitoring_alone(configuration: str) -> None:
    given = (
        configurations()[configuration].get("networkPolicy", {}).get("monitoringNamespaces", ["monitoring"])
    )
    peers = ingress_of(objects_of(configuration), "admin")
    names = [peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for peer in peers]
    assert names == [each if isinstance(each, str) else each["namespace"] for each in given]


@pytest.mark.parametrize("configuration", SERVING)
def test_without_keys_the_admin_port_is_open_to_chosen_pods_alone(configuration: str) -> None:
    if configurations()[configuration].get("settings", {}).get("auth", "keys") == "none":
        assert all(peer["podSelector"] for peer in ingress_of(objects_of(configuration), "admin"))


def test_pods_that_reach_the_admin_port_are_chosen_by_their_namespace_and_labels_together() -> None:
    picker, _ = ingress_of(objects_of("llm-d"), "admin")
    assert picker == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "llm"}},
        "podSelector": {"matchLabels": {"inferencepool": "peraxis-pool-epp"}},
    }


def test_the_compressor_of_the_release_reaches_the_admin_port_too() -> None:
    objects = objects_of("existing-claims")
    _, peer = ingress_of(objects, "admin")
    # Without a selector of namespaces, a peer is of the policy's own.
    assert peer.keys() == {"podSelector"}
    assert components(objects, peer["podSelector"]["matchLabels"]) == {"compressor"}


def test_the_public_port_is_open_to_all_unless_peers_are_given() -> None:
    assert ingress_of(objects_of("defaults"), "http") == []
    (peer,) = ingress_of(objects_of("gateway"), "http")
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "gateways"}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_policy_holds_for_every_pod_in_both_directions(configuration: str) -> None:
    objects = objects_of(configuration)
    policy = the(objects, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert all(matches(policy["podSelector"]["matchLabels"], pod) for pod in pod_templates(objects))


def test_pods_reach_the_internet_only_to_fetch_from_the_hub() -> None:
    def ports(values: dict[str, Any]) -> set[int]:
        rules = the(rendered(values), "NetworkPolicy")["spec"]["egress"]
        return {port["port"] for rule in rules for port in rule.get("ports", [])}

    assert ports({}) == {53}
    assert ports({"base": {"download": {"repository": "org/model"}}}) == {53, 443}
    assert ports({"networkPolicy": {"egress": [{"ports": [{"port": 4318}]}]}}) == {53, 4318}


def test_an_ingress_leads_to_the_public_service() -> None:
    objects = objects_of("replicas")
    (rule,) = the(objects, "Ingress")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service = the(objects, "Service")
    assert path["backend"]["service"] == {
        "name": service["metadata"]["name"],
        "port": {"number": service["spec"]["ports"][0]["port"]},
    }
