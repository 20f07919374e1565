"""The Job of the first keys stores keys that the registry knows in Secrets, once, and may do nothing else."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import certifi
import kubernetes_validate
import pytest

from server.tenants.keys import KeyStore
from tests.helm.helpers.rendering import NAMESPACE, ROOT, Object, environment, of_kind, rendered, server, the

JOB = "demo-peraxis-first-key"
ADMIN, METRICS, PUBLISH = NAMES = tuple(
    f"demo-peraxis-{kind}-key" for kind in ("admin", "metrics", "publish")
)
OBJECTS = rendered(
    {
        "adminKey": {"create": True},
        "monitoring": {"serviceMonitor": {"enabled": True}},
        "compressor": {
            "enabled": True,
            "variant": "instruct",
            "tenant": "acme",
            "finetune": {"existingClaim": "tuned"},
        },
    }
)
PATH = f"/api/v1/namespaces/{NAMESPACE}/secrets/"


class KubernetesApi(HTTPServer):
    """Two Secrets, as the Kubernetes API shows and changes them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Calls)
        self.secrets: dict[str, dict[str, Any]] = {PATH + name: {"kind": "Secret"} for name in NAMES}
        self.refuses_changes = False

    def key(self, name: str) -> str:
        return base64.b64decode(self.secrets[PATH + name]["data"]["key"]).decode()

    def put(self, name: str, key: str) -> None:
        self.secrets[PATH + name]["data"] = {"key": base64.b64encode(key.encode()).decode()}


class _Calls(BaseHTTPRequestHandler):
    server: KubernetesApi

    def do_GET(self) -> None:
        is_allowed = self.path in self.server.secrets and self.headers["Authorization"] == "Bearer a-token"
        self._answer(200 if is_allowed else 403)

    def do_PATCH(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_taken = self.headers["Content-Type"] == "application/merge-patch+json"
        if self.server.refuses_changes or not is_taken or self.path not in self.server.secrets:
            self._answer(403)
            return
        self.server.secrets[self.path] |= json.loads(body)
        self._answer(200)

    def log_message(self, *_: object) -> None:
        """Write nothing to the output of the tests."""

    def _answer(self, status: int) -> None:
        content = json.dumps(self.server.secrets.get(self.path)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    with KubernetesApi() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def job() -> Object:
    template: Object = the(OBJECTS, "Job", JOB)["spec"]["template"]
    return template


def run(api: KubernetesApi, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run the container's command with a registry and an account in a directory."""
    account = directory / "account"
    account.mkdir(exist_ok=True)
    (account / "token").write_text("a-token\n")
    (account / "ca.crt").write_bytes(Path(certifi.where()).read_bytes())
    (container,) = job()["spec"]["containers"]
    here = {
        "API_URL": f"http://127.0.0.1:{api.server_port}",
        "SERVICE_ACCOUNT": str(account),
        "PERAXIS_REGISTRY": str(directory / "registry"),
        "HOME": str(directory),
        "TMPDIR": str(directory),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, *container["command"][1:]]
    return subprocess.run(
        command, env=environment(container) | here, capture_output=True, text=True, check=False, timeout=240
    )


def test_the_keys_in_the_secrets_are_an_administrator_s_one_for_metrics_and_one_to_publish(
    api: KubernetesApi, tmp_path: Path
) -> None:
    done = run(api, tmp_path)
    assert done.returncode == 0, done.stderr
    expected = ((ADMIN, "ops", "admin"), (METRICS, "ops", "metrics"), (PUBLISH, "acme", "publish"))
    for name, tenant, role in expected:
        caller = asyncio.run(KeyStore(tmp_path / "registry").caller(api.key(name)))
        assert (caller.tenant.name, caller.roles) == (tenant, frozenset({role}))
        assert api.key(name) not in done.stdout + done.stderr


def test_a_secret_that_has_a_key_keeps_it(api: KubernetesApi, tmp_path: Path) -> None:
    api.put(ADMIN, "mine")
    assert run(api, tmp_path).returncode == 0
    assert api.key(ADMIN) == "mine"
    made = {record.roles for record in KeyStore(tmp_path / "registry").records().values()}
    assert made == {("metrics",), ("publish",)}


def test_a_key_that_could_not_be_stored_is_revoked(api: KubernetesApi, tmp_path: Path) -> None:
    api.refuses_changes = True
    assert run(api, tmp_path).returncode != 0
    assert not KeyStore(tmp_path / "registry").records()


def test_there_is_no_key_for_what_is_not_there() -> None:
    objects = rendered({"adminKey": {"create": True}})
    assert [each["metadata"]["name"] for each in of_kind(objects, "Secret")] == [ADMIN]
    (container,) = the(objects, "Job", JOB)["spec"]["template"]["spec"]["containers"]
    assert json.loads(environment(container)["KEYS"]) == [["admin", ADMIN, "key", "ops"]]


def test_the_job_may_read_and_change_its_secrets_and_nothing_else() -> None:
    (role,), (binding,) = of_kind(OBJECTS, "Role"), of_kind(OBJECTS, "RoleBinding")
    assert role["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["secrets"],
            "resourceNames": [*NAMES],
            "verbs": ["get", "patch"],
        }
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert (
        subject["name"]
        == job()["spec"]["serviceAccountName"]
        == the(OBJECTS, "ServiceAccount", JOB)["metadata"]["name"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_chart_renders_a_secret_without_content(name: str) -> None:
    # An upgrade then leaves what the Job stored, and Helm's own records never hold it.
    secret = the(OBJECTS, "Secret", name)
    assert not {"data", "stringData", "immutable"} & secret.keys()
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_job_comes_again_with_each_release_because_a_job_cannot_be_changed() -> None:
    annotations = the(OBJECTS, "Job", JOB)["metadata"]["annotations"]
    assert annotations["helm.sh/hook"] == "post-install,post-upgrade"
    assert "before-hook-creation" in annotations["helm.sh/hook-delete-policy"]


def test_its_pod_alone_may_call_the_kubernetes_api() -> None:
    policy = the(OBJECTS, "NetworkPolicy", JOB)["spec"]
    assert policy["podSelector"]["matchLabels"] == job()["metadata"]["labels"]
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [443, 6443]


def test_a_registry_of_one_node_is_reached_on_the_node_of_the_server() -> None:
    assert "podAffinity" in job()["spec"]["affinity"]
    shared = {"adminKey": {"create": True}, "registry": {"accessModes": ["ReadWriteMany"]}}
    assert "affinity" not in the(rendered(shared), "Job", JOB)["spec"]["template"]["spec"]


def of_bucket(**s3: str) -> list[Object]:
    """Return the objects of a registry in a bucket, with the Job and a role for the server's account."""
    return rendered(
        {
            "adminKey": {"create": True},
            "registry": {"s3": {"url": "s3://bucket/prefix", **s3}},
            "serviceAccount": {"annotations": {"role": "reader"}},
        }
    )


def test_the_job_of_a_bucket_has_its_url_environment_and_secret_and_no_volume() -> None:
    objects = of_bucket(endpoint="http://minio:9000", region="local", credentialsSecret="s3-key")
    pod = the(objects, "Job", JOB)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = environment(container)
    assert variables["PERAXIS_REGISTRY"] == "s3://bucket/prefix"
    of_server = environment(server(objects))
    for name in ("AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP"):
        assert variables[name] == of_server[name]
    assert container["envFrom"] == [{"secretRef": {"name": "s3-key"}}]
    assert {each["name"] for each in pod["volumes"]} == {"tmp", "cache"}
    assert "affinity" not in pod
    assert "annotations" not in the(objects, "ServiceAccount", JOB)["metadata"]


def test_without_a_secret_the_job_s_own_account_has_the_role_of_the_server_s() -> None:
    objects = of_bucket()
    assert "envFrom" not in the(objects, "Job", JOB)["spec"]["template"]["spec"]["containers"][0]
    assert the(objects, "ServiceAccount", JOB)["metadata"]["annotations"] == {"role": "reader"}


def test_policies_that_hold_for_the_job_s_pod_open_the_ports_of_the_bucket() -> None:
    objects = of_bucket(endpoint="http://minio:9000", credentialsSecret="s3-key")
    labels = the(objects, "Job", JOB)["spec"]["template"]["metadata"]["labels"]
    policies = [each["spec"] for each in of_kind(objects, "NetworkPolicy")]
    held = [each for each in policies if each["podSelector"]["matchLabels"].items() <= labels.items()]
    rules = [rule for each in held for rule in each["egress"] if "to" not in rule]
    assert {port["port"] for rule in rules for port in rule["ports"]} == {53, 443, 6443, 9000}


@pytest.mark.parametrize("s3", [{}, {"endpoint": "http://minio:9000", "credentialsSecret": "s3-key"}])
def test_kubernetes_knows_every_field_of_the_job_of_a_bucket(s3: dict[str, str]) -> None:
    for each in of_bucket(**s3):
        kubernetes_validate.validate(each, "1.37", strict=True)


def test_there_is_neither_job_nor_secret_nor_role_unless_they_are_asked_for() -> None:
    assert not {each["kind"] for each in rendered()} & {"Secret", "Role", "RoleBinding", "Job"}
