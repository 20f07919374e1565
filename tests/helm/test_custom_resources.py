"""Objects of other projects' definitions fit their schemas, and the objects of the chart that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from server.settings import Settings
from tests.helm.helpers.rendering import (
    CHART,
    NAME,
    NAMESPACE,
    ROOT,
    Object,
    configurations,
    objects_of,
    of_kind,
    pod_templates,
    rendered,
    the,
)

SCHEMAS = Path(__file__).resolve().parent / "schemas"
KINDS = ("ServiceMonitor", "PrometheusRule", "HTTPRoute", "ScaledObject", "RayService")


def schema_of(kind: str) -> Any:
    return json.loads((SCHEMAS / f"{kind.lower()}.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_every_object_fits_the_schema_of_its_project(kind: str) -> None:
    validator = jsonschema_rs.validator_for(schema_of(kind))
    objects = [each for name in configurations() for each in of_kind(objects_of(name), kind)]
    assert objects
    for each in objects:
        validator.validate(each)


@pytest.mark.parametrize(("kind", "field"), [("ServiceMonitor", "endpoints"), ("ScaledObject", "triggers")])
def test_the_schemas_refuse_a_field_that_they_do_not_know(kind: str, field: str) -> None:
    validator = jsonschema_rs.validator_for(schema_of(kind))
    (good,) = of_kind(objects_of("everything"), kind)
    bad = {**good, "spec": {**good["spec"], field: [{**good["spec"][field][0], "unknown": 1}]}}
    assert validator.is_valid(good)
    assert not validator.is_valid(bad)


def test_nothing_of_another_project_is_made_by_default() -> None:
    assert not {each["kind"] for each in objects_of("defaults")} & {*KINDS, "Ingress", "ConfigMap", "Job"}


def test_prometheus_finds_the_admin_service_and_sends_its_own_key() -> None:
    objects = objects_of("everything")
    monitor = the(objects, "ServiceMonitor")["spec"]
    service = the(objects, "Service", f"{NAME}-admin")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"] == {
        "type": "Bearer",
        "credentials": {"name": "metrics-key", "key": "key"},
    }
    # The public Service shows no metrics.
    public = the(objects, "Service")["metadata"]["labels"]
    assert not monitor["selector"]["matchLabels"].items() <= public.items()


def test_without_keys_prometheus_sends_none() -> None:
    values = {
        "settings": {"auth": "none", "allow_unauthenticated": True},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    }
    (endpoint,) = the(rendered(values), "ServiceMonitor")["spec"]["endpoints"]
    assert "authorization" not in endpoint


def test_servers_are_scaled_by_their_requests() -> None:
    objects = objects_of("everything")
    scaled = the(objects, "ScaledObject")["spec"]
    target = the(objects, "StatefulSet")
    assert scaled["scaleTargetRef"] == {
        "apiVersion": target["apiVersion"],
        "kind": target["kind"],
        "name": target["metadata"]["name"],
    }
    # The number of replicas is KEDA's, also when the chart is upgraded.
    assert "replicas" not in target["spec"]
    asked = {each["metadata"]["query"]: each["metadata"]["threshold"] for each in scaled["triggers"]}
    # Running requests keep a busy server whose queue is empty.
    assert asked == {
        f'sum(peraxis_num_requests_{state}{{namespace="{NAMESPACE}",job="{NAME}-admin"}})': threshold
        for state, threshold in (("running", "48"), ("waiting", "8"))
    }
    reference = (ROOT / "docs" / "reference.md").read_text()
    assert all(f"`peraxis_num_requests_{state}`" in reference for state in ("running", "waiting"))


def test_a_server_runs_more_requests_than_a_new_one_is_made_for() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["autoscaling"]
    assert defaults["runningRequests"] < Settings.model_fields["max_num_seqs"].default


def test_a_route_leads_to_the_public_service() -> None:
    objects = objects_of("gateway")
    (rule,) = the(objects, "HTTPRoute")["spec"]["rules"]
    service = the(objects, "Service")
    assert rule["backendRefs"] == [{"name": NAME, "port": service["spec"]["ports"][0]["port"]}]
    assert rule["timeouts"] == {"request": "0s"}


def test_a_route_may_lead_to_a_pool_of_endpoints() -> None:
    objects = objects_of("llm-d")
    (rule,) = the(objects, "HTTPRoute")["spec"]["rules"]
    assert [each["kind"] for each in rule["backendRefs"]] == ["InferencePool"]
    labels = the(objects, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert labels["app"] == "peraxis-pool"


def ray_service(values: dict[str, Any] | None = None) -> tuple[Object, Any]:
    objects = objects_of("ray") if values is None else rendered(values)
    service = the(objects, "RayService")
    return service, yaml.safe_load(service["spec"]["serveConfigV2"])


def test_ray_builds_the_application_from_the_settings() -> None:
    _, config = ray_service()
    (application,) = config["applications"]
    assert application["import_path"] == "server.scale.app:app"
    settings = {name: value for name, value in application["args"].items() if name in Settings.model_fields}
    assert settings == application["args"]
    assert (settings["base"], settings["registry"], settings["device"]) == ("/base", "/registry", "cuda")


def test_ray_s_arguments_override_the_settings_and_large_numbers_stay_whole() -> None:
    values = {
        **configurations()["ray-and-download"],
        "settings": {"max_connections": 1_000_000, "slot_headroom": 1.5, "max_host_cache_gb": 4},
        "ray": {
            "enabled": True,
            "importPath": "other.app:make",
            "args": {"max_host_cache_gb": 0, "log_format": "text"},
        },
    }
    _, config = ray_service(values)
    (application,) = config["applications"]
    assert application["import_path"] == "other.app:make"
    args = application["args"]
    assert (args["max_connections"], args["slot_headroom"]) == (1_000_000, 1.5)
    assert isinstance(args["max_connections"], int)
    assert (args["max_host_cache_gb"], args["log_format"], args["auth"]) == (0, "text", "keys")


def test_ray_serve_accepts_the_configuration() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="needs the extra ray: pip install -e '.[ray]'")
    for values in (None, configurations()["ray-and-download"]):
        _, config = ray_service(values)
        (application,) = schema.ServeDeploySchema.model_validate(config).applications
        assert [each.name for each in application.deployments] == ["Engine", "Ingress", "Shared"]


def test_ray_scales_engines_by_the_requests_that_one_runs_at_a_time() -> None:
    def engines(ray: dict[str, Any], settings: dict[str, Any]) -> Any:
        values = {
            **configurations()["ray-and-download"],
            "ray": {"enabled": True, **ray},
            "settings": settings,
        }
        _, config = ray_service(values)
        return config["applications"][0]["deployments"][0]["autoscaling_config"]

    default = Settings.model_fields["max_num_seqs"].default
    assert engines({}, {})["target_ongoing_requests"] == default
    assert engines({}, {"max_num_seqs": 16})["target_ongoing_requests"] == 16
    given = engines({"targetOngoingRequests": 5, "minWorkers": 2, "maxWorkers": 6}, {"max_num_seqs": 16})
    assert (given["target_ongoing_requests"], given["min_replicas"], given["max_replicas"]) == (5, 2, 6)


def test_a_deployment_of_the_operator_takes_the_place_of_the_chart_s() -> None:
    own = {"name": "Engine", "num_replicas": 3}
    values = {**configurations()["ray-and-download"], "ray": {"enabled": True, "deployments": [own]}}
    _, config = ray_service(values)
    names = {each["name"]: each for each in config["applications"][0]["deployments"]}
    assert names["Engine"] == own
    assert sorted(names) == ["Engine", "Ingress", "Shared"]


def test_ray_takes_the_place_of_the_stateful_set_under_the_same_name_and_port() -> None:
    objects = objects_of("ray")
    kinds = {each["kind"] for each in objects}
    assert not kinds & {"StatefulSet", "Service", "ScaledObject", "PodDisruptionBudget"}
    serving = the(objects, "RayService")["spec"]["serveService"]
    public = the(objects_of("defaults"), "Service")
    assert serving["metadata"]["name"] == public["metadata"]["name"]
    assert serving["spec"]["ports"][0]["port"] == public["spec"]["ports"][0]["port"]


@pytest.mark.parametrize("configuration", ["ray", "ray-and-download"])
def test_ray_asks_all_who_reach_its_ports_for_a_token_and_offers_none_to_its_clients(
    configuration: str,
) -> None:
    cluster = the(objects_of(configuration), "RayService")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    # The oldest version with tokens.
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0)
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert {port["name"] for port in head["ports"]} == {"gcs-server", "dashboard", "serve"}
    (policy,) = of_kind(objects_of(configuration), "NetworkPolicy")
    named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
    assert named == {"serve", "dashboard"}


def test_ray_s_autoscaler_alone_has_the_account_that_kuberay_makes() -> None:
    def head(*, autoscaler: bool) -> Any:
        values = {**configurations()["ray-and-download"], "ray": {"enabled": True, "autoscaler": autoscaler}}
        return next(iter(pod_templates(rendered(values))))["spec"]

    assert "serviceAccountName" not in head(autoscaler=True)
    assert head(autoscaler=False)["automountServiceAccountToken"] is False


def test_ray_s_autoscaler_container_is_restricted_too() -> None:
    options = the(objects_of("ray"), "RayService")["spec"]["rayClusterConfig"]["autoscalerOptions"]
    (container, *_) = next(iter(pod_templates(objects_of("ray"))))["spec"]["containers"]
    assert options["securityContext"] == container["securityContext"]
