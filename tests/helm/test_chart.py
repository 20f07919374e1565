"""Every configuration of the chart is linted, packaged and valid for Kubernetes."""

from __future__ import annotations

import tarfile
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
from helm_python import Chart
from helm_python.chart import lint, package

from tests.helm.helpers.rendering import (
    CHART,
    EVERYTHING,
    NAMESPACE,
    ROOT,
    configurations,
    objects_of,
    rendered,
)

CONFIGURATIONS = sorted(configurations())
# The oldest version that the chart allows, and a new one.
KUBERNETES = ("1.30", "1.37")
CUSTOM = {"ServiceMonitor", "PrometheusRule", "HTTPRoute", "ScaledObject", "RayService"}
INFO = 1


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_lint_has_no_warning(configuration: str) -> None:
    report = lint(CHART, configurations()[configuration], strict=True, kube_version="v1.34.0")
    assert report["total_charts_linted"] == 1
    assert not report["errors"]
    assert not [each for each in report["messages"] if each["severity"] > INFO]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_kubernetes_knows_every_field_of_every_object(configuration: str, version: str) -> None:
    objects = [each for each in objects_of(configuration) if each["kind"] not in CUSTOM]
    assert objects
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_objects_have_different_names_and_the_release_s_namespace(configuration: str) -> None:
    objects = objects_of(configuration)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
    assert {each["metadata"]["namespace"] for each in objects} == {NAMESPACE}


def test_a_package_renders_as_the_directory_does(tmp_path: Path) -> None:
    archive = package(CHART, destination=tmp_path)
    with tarfile.open(archive) as file:
        assert "peraxis/values.schema.json" in file.getnames()
    with Chart.load(archive) as packed, Chart.load(CHART) as chart:
        assert packed.render({}, name="demo") == chart.render({}, name="demo")


def test_a_release_of_a_long_name_has_names_that_kubernetes_allows() -> None:
    values = {key: value for key, value in EVERYTHING.items() if key != "monitoring"}
    values |= {"autoscaling": {"enabled": False}}
    for each in rendered(values, release="a" * 53):
        # The pods of a StatefulSet have its name with a hash in a label of 63 characters.
        assert len(each["metadata"]["name"]) <= (52 if each["kind"] == "StatefulSet" else 63)


def test_the_chart_installs_the_server_of_this_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == project["version"]


def test_the_image_is_the_application_s_version_unless_a_tag_is_given() -> None:
    def image(values: dict[str, object]) -> str:
        (found,) = {
            container["image"]
            for each in rendered(values)
            if each["kind"] == "StatefulSet"
            for container in each["spec"]["template"]["spec"]["containers"]
        }
        return str(found)

    assert image({}) == "peraxis:0.1.0"
    assert (
        image({"image": {"repository": "registry.example/peraxis", "tag": "x"}})
        == "registry.example/peraxis:x"
    )
