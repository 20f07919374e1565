"""Ray is needed by `server.scale` alone, and settings that mean nothing under Ray Serve are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deltastore.errors import SettingsError
from server.scale.app import app

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
import server.app, server.engine.build, server.http_process, server.inline, server.supervisor.supervisor
from deltastore.errors import SettingsError
try:
    import server.scale.app
except SettingsError as error:
    print(error)
"""


def test_only_the_application_for_ray_needs_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pip install 'peraxis[ray]'" in done.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"admin_port": 9090, "auth": "keys"}, "admin_port is set"),
        ({"http_workers": 2, "auth": "keys"}, "num_replicas of the deployment Ingress"),
        ({}, "auth is none"),
        ({"port": "high", "auth": "keys"}, "port"),
        (
            {"max_gpu_deltaz": 3, "auth": "keys"},
            r"max_gpu_deltaz \(from args of the application\) is not a setting: .*reference",
        ),
        ({"max_gpu_deltas": "many", "auth": "keys"}, r"max_gpu_deltas \(from args of the application\)"),
        ({"num_replicas": "two", "auth": "keys"}, "num_replicas is 'two': give a whole number"),
        ({"num_replicas": 3, "max_replicas": 2, "auth": "keys"}, "max_replicas at least num_replicas"),
    ],
)
def test_a_setting_without_a_meaning_is_refused(
    given: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        app({"base": str(tmp_path), "registry": str(tmp_path), **given})


def test_the_deployments_are_named(tmp_path: Path) -> None:
    built = app({"base": str(tmp_path), "registry": str(tmp_path), "auth": "keys"})
    assert built._bound_deployment.name == "Ingress"


def test_engines_are_added_while_requests_wait(tmp_path: Path) -> None:
    given = {"base": str(tmp_path), "registry": str(tmp_path), "auth": "keys", "max_num_seqs": 24}
    built = app({**given, "num_replicas": "2", "max_replicas": "5"})
    arguments: Any = built._bound_deployment.init_args
    found = arguments[1]._bound_deployment._deployment_config.autoscaling_config
    assert (found.min_replicas, found.max_replicas, found.target_ongoing_requests) == (2, 5, 24)
