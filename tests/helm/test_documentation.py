"""The guide's values are those of the chart, its examples exist and its numbers are those of the code."""

from __future__ import annotations

import importlib
import re
import shlex
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from peraxis.cli import COMMANDS
from server.settings import Settings
from tests.helm.helpers.rendering import (
    CHART,
    EXAMPLES,
    NAME,
    ROOT,
    configurations,
    environment,
    objects_of,
    rendered,
    server,
    the,
)

GUIDE = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text()
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def section(title: str) -> str:
    """Return the text below a heading, to the next of its rank."""
    return re.split(r"^## ", GUIDE, flags=re.MULTILINE)[[*headings()].index(title) + 1]


def headings() -> list[str]:
    return re.findall(r"^## (.+)$", GUIDE, flags=re.MULTILINE)


def value_at(path: str) -> Any:
    value: Any = DEFAULTS
    for name in path.split("."):
        value = value[name]
    return value


def test_the_table_of_values_has_the_defaults_of_the_chart() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|.*\| (?:`(.*)`)? \|$", section("Values"), flags=re.MULTILINE)
    assert len(rows) > 20
    for path, default in rows:
        if isinstance(value_at(path), dict):
            assert not default, path
        else:
            assert yaml.safe_load(default) == value_at(path), path


def test_every_value_that_the_guide_names_exists() -> None:
    tables = "|".join(name for name, value in DEFAULTS.items() if isinstance(value, dict))
    named = re.findall(rf"`((?:{tables})\.(?!yaml)[A-Za-z_.]+)`", GUIDE)
    assert named
    for path in named:
        table, name = path.split(".", 1)
        assert name in Settings.model_fields if table == "settings" else value_at(path) is not None, path


def test_the_guide_names_every_example() -> None:
    introduction = GUIDE.split("\n## ")[0]
    assert set(re.findall(r"`([\w-]+\.yaml)`", introduction)) == {path.name for path in EXAMPLES}


def test_the_guide_s_ports_are_the_chart_s() -> None:
    variables = environment(server(objects_of("defaults")))
    text = section("Network")
    public = the(objects_of("defaults"), "Service")["spec"]["ports"][0]["port"]
    assert f"| {variables['PERAXIS_PORT']} (Service `peraxis`, port {public}) |" in text
    assert f"| {variables['PERAXIS_ADMIN_PORT']} (headless Service `peraxis-admin`) |" in text


def test_the_release_of_the_guide_has_the_names_that_it_uses() -> None:
    names = {each["metadata"]["name"] for each in rendered(release="peraxis")}
    assert {"peraxis", "peraxis-admin", "peraxis-base", "peraxis-registry"} == names


def test_every_value_that_a_command_of_the_guide_sets_exists() -> None:
    given = [each for setting in re.findall(r"--set ([\w.,=$]+)", GUIDE) for each in setting.split(",")]
    assert given
    for each in given:
        path, value = each.split("=")
        assert isinstance(yaml.safe_load(value), type(value_at(path))), each


def test_the_commands_of_the_guide_have_the_options_that_it_gives() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE, flags=re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("peraxis ")]
    assert len(commands) > 2
    for line in commands:
        name, *arguments = shlex.split(line)[1:]
        entry = COMMANDS[name]
        command: Any = get_command(importlib.import_module(entry.module).app)
        if entry.is_group:
            name = arguments.pop(0)
        command = getattr(command, "commands", {}).get(name, command)
        assert command.make_context("peraxis", arguments)


def _guide_s_objects() -> list[dict[str, Any]]:
    texts = re.findall(r"<<EOF\n(.*?)^EOF", GUIDE, flags=re.MULTILINE | re.DOTALL)
    return [one for text in texts for one in yaml.safe_load_all(text)]


def test_the_guide_s_objects_are_valid() -> None:
    objects = _guide_s_objects()
    assert {"Pod", "PersistentVolumeClaim"} == {one["kind"] for one in objects}
    for one in objects:
        kubernetes_validate.validate(one, "1.37", strict=True)


def test_the_guide_s_pods_fit_a_restricted_namespace() -> None:
    expected = server(objects_of("defaults"))["securityContext"]
    chart = the(objects_of("defaults"), "StatefulSet")["spec"]["template"]["spec"]["securityContext"]
    for pod in (one for one in _guide_s_objects() if one["kind"] == "Pod"):
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"].items() <= expected.items()
        assert {"allowPrivilegeEscalation", "capabilities"} <= container["securityContext"].keys()
        assert pod["spec"]["securityContext"].items() <= chart.items()
        assert {"runAsNonRoot", "seccompProfile"} <= pod["spec"]["securityContext"].keys()


def test_the_guide_s_pods_mount_claims_of_the_chart_or_of_the_guide() -> None:
    objects = _guide_s_objects()
    claims = [one for one in [*objects, *objects_of("one-gpu")] if one["kind"] == "PersistentVolumeClaim"]
    # The guide's release is called peraxis.
    known = {one["metadata"]["name"].replace(NAME, "peraxis") for one in claims}
    for pod in (one for one in objects if one["kind"] == "Pod"):
        volumes = [volume for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
        assert volumes
        assert {volume["persistentVolumeClaim"]["claimName"] for volume in volumes} <= known


@pytest.mark.parametrize(("value", "role"), [("metricsKey", "metrics"), ("publishKey", "publish")])
def test_the_first_keys_of_the_guide_are_the_secrets_of_the_examples(value: str, role: str) -> None:
    secrets = {configurations()[path.stem].get(value, {}).get("secretName") for path in EXAMPLES}
    (named,) = secrets - {None}
    assert (
        f"--role {role} | tr -d '\\n' \\\n"
        f"  | kubectl -n llm create secret generic {named} --from-file={DEFAULTS[value]['secretKey']}=/dev/stdin"
    ) in GUIDE
