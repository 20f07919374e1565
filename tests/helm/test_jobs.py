"""The download of a base and the compressor run commands that exist, in the order that they need."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub.cli.hf import app as hf_app
from typer.main import get_command, get_group

from client.push import app as push_app
from compressor.cli import app as compress_app
from tests.helm.helpers.rendering import (
    EVERYTHING,
    NAME,
    Object,
    environment,
    objects_of,
    of_kind,
    rendered,
    the,
)


def job(values: dict[str, Any] | None = None) -> Object:
    jobs = of_kind(objects_of("existing-claims") if values is None else rendered(values), "Job")
    (found,) = [
        each for each in jobs if each["metadata"]["labels"]["app.kubernetes.io/component"] == "compressor"
    ]
    return found


def compressing(**changes: object) -> dict[str, Any]:
    """Return values with a compressor, and changes of its own values."""
    return {**EVERYTHING, "compressor": {**EVERYTHING["compressor"], **changes}}


def parsed(command: Any, arguments: list[str]) -> dict[str, Any]:
    """Return what a command makes of arguments, by the names of its options without their dashes.

    Raises:
        UsageError: the command does not take them.
    """
    values = command.make_context("peraxis", list(arguments)).params
    return {
        option.opts[0].lstrip("-"): values[option.name] for option in command.params if option.name in values
    }


def test_the_compressor_gives_options_that_compress_has() -> None:
    (container,) = job()["spec"]["template"]["spec"]["initContainers"]
    name, *options = container["args"]
    assert "command" not in container
    given = parsed(get_group(compress_app).commands[name], options)
    assert (given["base"], given["finetune"]) == ("/base", "/finetune")
    assert (given["budget"], given["min-agreement"], given["resume"]) == (1.1, 0.9, True)
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/base", "/finetune", str(Path(given["out"]).parent)} <= paths


def test_what_was_compressed_is_published_through_the_admin_port(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job()["spec"]["template"]["spec"]
    (compress,), (publish,) = spec["initContainers"], spec["containers"]
    name, *options = publish["args"]
    assert (name, "command" in publish) == ("push", False)
    for variable, value in environment(publish).items():
        monkeypatch.setenv(variable, value)
    given = parsed(get_command(push_app), options)
    assert f"--out={given['source']}" in compress["args"]
    assert (given["name"], given["tenant"], given["activate"]) == ("support-de", "support", True)
    # The server may take longer to start than the compressor.
    assert given["wait"] == 600
    (port,) = the(objects_of("existing-claims"), "Service", f"{NAME}-admin")["spec"]["ports"]
    assert given["url"] == f"http://{NAME}-admin:{port['port']}"
    (key,) = [each for each in publish["env"] if each["name"] == "PERAXIS_API_KEY"]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "peraxis-publish-key", "key": "key"}


def test_the_key_is_in_the_pod_that_publishes_alone() -> None:
    (container,) = job()["spec"]["template"]["spec"]["initContainers"]
    assert "PERAXIS_API_KEY" not in [each["name"] for each in container["env"]]


def test_other_values_are_another_job() -> None:
    # A Job that exists cannot be changed.
    names = [job(compressing(args=args))["metadata"]["name"] for args in ([], ["--seed=1"], [])]
    assert names[0] == names[2] != names[1]


def test_a_base_of_one_node_is_compressed_on_the_node_of_the_server() -> None:
    values = compressing()
    values |= {"replicaCount": 1, "autoscaling": {"enabled": False}, "base": {}}
    spec = job(values)["spec"]["template"]["spec"]
    (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    server = the(rendered(values), "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= server.items()
    assert "affinity" not in job()["spec"]["template"]["spec"]


class Download:
    """The container that fetches the base, run here with a hub of its own."""

    def __init__(self, directory: Path) -> None:
        self.base, tools, self.log = directory / "base", directory / "bin", directory / "calls"
        for each in (self.base, tools):
            each.mkdir()
        hub = tools / "hf"
        hub.write_text(
            f'#!/bin/sh\necho "$@" >> {self.log}\ntouch {self.base}/config.json\nexit "${{HF_EXIT:-0}}"\n'
        )
        hub.chmod(0o755)
        self.path = f"{tools}{os.pathsep}{os.environ['PATH']}"

    def run(self, hf_exit: int = 0, **download: str) -> int:
        values = {"base": {"download": {"repository": "org/model", **download}}}
        pod = the(rendered(values), "StatefulSet")["spec"]["template"]["spec"]
        (container,) = pod["initContainers"]
        shell, flags, script = container["command"]
        variables = {**environment(container), "PATH": self.path, "HF_EXIT": str(hf_exit)}
        done = subprocess.run(
            [shell, flags, script.replace("/base", str(self.base))], env=variables, check=False
        )
        return done.returncode

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


def test_a_base_that_is_there_whole_is_not_fetched_again(tmp_path: Path) -> None:
    download = Download(tmp_path)
    assert [download.run(), download.run()] == [0, 0]
    assert len(download.calls) == 1
    assert download.run(revision="other") == 0
    assert len(download.calls) == 2


def test_a_fetch_that_failed_is_tried_again(tmp_path: Path) -> None:
    download = Download(tmp_path)
    assert download.run(hf_exit=1) != 0
    assert download.run() == 0
    assert len(download.calls) == 2


def test_the_fetch_gives_options_that_the_hub_s_command_has(tmp_path: Path) -> None:
    download = Download(tmp_path)
    download.run(revision="abc123")
    (call,) = download.calls
    name, repository, *options = call.split()
    assert (name, repository) == ("download", "org/model")
    assert options[:4] == ["--revision", "abc123", "--local-dir", str(download.base)]
    described = CliRunner().invoke(hf_app, ["download", "--help"]).output
    assert all(option in described for option in options if option.startswith("--"))


def test_a_token_of_the_hub_comes_from_its_secret() -> None:
    values = {"base": {"download": {"repository": "org/model", "tokenSecretName": "hub"}}}
    pod = the(rendered(values), "StatefulSet")["spec"]["template"]["spec"]
    (container,), (server,) = pod["initContainers"], pod["containers"]
    (token,) = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert "HF_TOKEN" not in [each["name"] for each in server["env"]]
