"""The chart rendered by Helm's own engine, as objects that tests can ask."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "peraxis"
EXAMPLES = sorted((ROOT / "helm" / "examples").glob("*.yaml"))
NAME = "demo-peraxis"
NAMESPACE = "llm"

Object = dict[str, Any]
Values = dict[str, Any]

# Every optional object at once, where one does not exclude another.
EVERYTHING: Values = {
    "replicaCount": 2,
    "base": {"accessModes": ["ReadWriteMany"], "download": {"repository": "org/model"}},
    "registry": {"accessModes": ["ReadWriteMany"]},
    "adminKey": {"create": True, "secretName": "admin-key"},
    "metricsKey": {"secretName": "metrics-key"},
    "autoscaling": {"enabled": True},
    "ingress": {"enabled": True, "hosts": [{"host": "a.example", "path": "/", "pathType": "Prefix"}]},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    "monitoring": {
        "serviceMonitor": {"enabled": True},
        "alerts": {"enabled": True},
        "dashboards": {"enabled": True},
    },
    "compressor": {"enabled": True, "variant": "instruct", "finetune": {"existingClaim": "tuned"}},
}
RAY: Values = {
    "base": {"accessModes": ["ReadWriteMany"], "download": {"repository": "org/model"}},
    "registry": {"accessModes": ["ReadWriteMany"]},
    "ray": {"enabled": True},
}


def example(path: Path) -> Values:
    """Return the values of an example."""
    values: Values = yaml.safe_load(path.read_text())
    return values


def configurations() -> dict[str, Values]:
    """Return the default values, every example and two that have all that there is, by name."""
    return {"defaults": {}, "everything": EVERYTHING, "ray-and-download": RAY} | {
        path.stem: example(path) for path in EXAMPLES
    }


def rendered(values: Values | None = None, release: str = "demo") -> list[Object]:
    """Render the chart and return its objects.

    Raises:
        HelmError: the values are refused; the message says why.
    """
    with Chart.load(CHART) as chart:
        manifests = chart.render(values or {}, name=release, namespace=NAMESPACE)
    texts = [text for path, text in manifests.items() if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def notes(values: Values | None = None) -> str:
    """Return what `helm install` prints."""
    with Chart.load(CHART) as chart:
        return chart.render(values or {}, name="demo", namespace=NAMESPACE)["peraxis/templates/NOTES.txt"]


@cache
def objects_of(configuration: str) -> list[Object]:
    """Return the objects of a configuration. Do not change them."""
    return rendered(configurations()[configuration])


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def the(objects: list[Object], kind: str, name: str = NAME) -> Object:
    """Return the one object of a kind and name."""
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def pod_templates(objects: list[Object]) -> Iterator[Object]:
    """Yield the template of every pod, of Ray's, too."""
    for each in objects:
        if each["kind"] in ("StatefulSet", "Job"):
            yield each["spec"]["template"]
        elif each["kind"] == "RayService":
            cluster = each["spec"]["rayClusterConfig"]
            yield cluster["headGroupSpec"]["template"]
            yield from (group["template"] for group in cluster["workerGroupSpecs"])


def containers(pod: Object) -> list[Object]:
    """Return the containers of a pod, those that run first included."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def server(objects: list[Object]) -> Object:
    """Return the container of the StatefulSet that serves."""
    (container,) = the(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    return dict(container)


def environment(container: Object) -> dict[str, str]:
    """Return the variables of a container whose values are in the manifest."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}
