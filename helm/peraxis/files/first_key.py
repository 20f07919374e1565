"""Make the first keys in the registry and store each in a Secret that exists. A Secret that has a key keeps it.

Runs in a pod whose account may read and change those Secrets and nothing else. No key is ever printed.
"""

import base64
import json
import os
import ssl
import subprocess
import sys
from pathlib import Path

import httpx

REGISTRY = os.environ["PERAXIS_REGISTRY"]
ACCOUNT = Path(os.environ["SERVICE_ACCOUNT"])
SECRETS = f"/api/v1/namespaces/{os.environ['NAMESPACE']}/secrets"
# A list of [role, name of the Secret, its field, tenant].
KEYS = json.loads(os.environ["KEYS"])
TIMEOUT_S = 30


def peraxis(*arguments: str) -> str:
    command = ["peraxis", *arguments, "--registry", REGISTRY, "--json"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def store(api: httpx.Client, path: str, field: str, key: str) -> None:
    content = {"data": {field: base64.b64encode(key.encode()).decode()}}
    headers = {"Content-Type": "application/merge-patch+json"}
    api.patch(path, content=json.dumps(content), headers=headers).raise_for_status()


def fill(api: httpx.Client, role: str, secret: str, field: str, tenant: str) -> None:
    path = f"{SECRETS}/{secret}"
    found = api.get(path).raise_for_status().json()
    if field in (found.get("data") or {}):
        print(f"the Secret {secret} has a key", file=sys.stderr)
        return
    made = json.loads(peraxis("keys", "create", "--tenant", tenant, "--role", role))
    try:
        store(api, path, field, made["key"])
    except httpx.HTTPStatusError:
        # The API refused it, so that the key is stored nowhere. After a broken connection it may be stored.
        peraxis("keys", "revoke", made["id"])
        raise
    print(f"stored key {made['id']} with the role {role} in the Secret {secret}", file=sys.stderr)


def main() -> None:
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}"}
    trusted = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    with httpx.Client(
        base_url=os.environ["API_URL"], headers=headers, verify=trusted, timeout=TIMEOUT_S
    ) as api:
        for role, secret, field, tenant in KEYS:
            fill(api, role, secret, field, tenant)


if __name__ == "__main__":
    main()
