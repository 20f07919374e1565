"""Make an admin key in the registry and store it in a Secret that exists and is empty. Does nothing if it has one.

Runs in a pod whose account may read and change that one Secret and nothing else. The key is never printed.
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
SECRET_KEY = os.environ["SECRET_KEY"]
ACCOUNT = Path(os.environ["SERVICE_ACCOUNT"])
SECRET = f"/api/v1/namespaces/{os.environ['NAMESPACE']}/secrets/{os.environ['SECRET_NAME']}"
TIMEOUT_S = 30


def peraxis(*arguments: str) -> str:
    command = ["peraxis", *arguments, "--registry", REGISTRY, "--json"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def store(api: httpx.Client, key: str) -> None:
    content = {"data": {SECRET_KEY: base64.b64encode(key.encode()).decode()}}
    headers = {"Content-Type": "application/merge-patch+json"}
    api.patch(SECRET, content=json.dumps(content), headers=headers).raise_for_status()


def main() -> None:
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}"}
    trusted = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    with httpx.Client(
        base_url=os.environ["API_URL"], headers=headers, verify=trusted, timeout=TIMEOUT_S
    ) as api:
        found = api.get(SECRET).raise_for_status().json()
        if SECRET_KEY in (found.get("data") or {}):
            print("the Secret has a key", file=sys.stderr)
            return
        made = json.loads(peraxis("keys", "create", "--tenant", os.environ["TENANT"], "--role", "admin"))
        try:
            store(api, made["key"])
        except httpx.HTTPStatusError:
            # The API refused it, so that the key is stored nowhere. After a broken connection it may be stored.
            peraxis("keys", "revoke", made["id"])
            raise
    print(f"stored key {made['id']}", file=sys.stderr)


if __name__ == "__main__":
    main()
