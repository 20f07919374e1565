"""Every route, asked with every kind of key for every kind of variant: the complete table, over real HTTP.

A route that `CALLS` does not list fails the first test.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import httpx
import pytest

from server.api.access import ROLES
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.tenant import Role
from tests.server.api.helpers.described import check_described
from tests.server.helpers.live_server import WAIT_S, Artifacts, LiveServer, eventually, live_server

# Variants as the tenant acme sees them. Their names are equally long, so that replies about them are.
OWN, PUBLIC, PRIVATE, ABSENT = "v-own", "v-pub", "v-prv", "v-abs"
TARGETS = (OWN, PUBLIC, PRIVATE, ABSENT)
OWNERS: Mapping[str, str] = {OWN: "acme", PUBLIC: "globex", PRIVATE: "globex"}
# Kinds of keys: the tenant that the request acts for, and its roles.
CALLERS: Mapping[str, tuple[str, frozenset[Role]] | None] = {
    "no key": None,
    "a wrong key": None,
    "an expired key": None,
    "inference": ("acme", frozenset({"inference"})),
    "publish": ("acme", frozenset({"publish"})),
    "metrics": ("acme", frozenset({"metrics"})),
    "admin": ("acme", frozenset({"inference", "publish", "metrics", "admin"})),
    "another tenant": ("globex", frozenset({"inference", "publish"})),
}
REQUEST_ID = "table"


@dataclass(frozen=True, slots=True)
class Call:
    """A request for a route, in which `TARGET` stands for the name of a variant."""

    status: int  # of its success
    # The variants that it succeeds for: a tenant's own, those that it may use, or all names.
    reach: Literal["owned", "usable", "all"] = "all"
    params: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    content: bytes | None = None
    # Called before and after a success, with the owner's key.
    before: tuple[str, str] | None = None
    after: tuple[str, str] | None = None


TARGET = "TARGET"
TOKENS = {"model": TARGET, "prompt": "hi", "max_tokens": 1}
CALLS: Mapping[tuple[str, str], Call] = {
    ("GET", "/health"): Call(200),
    ("GET", "/ready"): Call(200),
    ("GET", "/openapi.json"): Call(200),
    ("GET", "/docs"): Call(200),
    ("GET", "/docs/{asset}"): Call(200),
    ("GET", "/"): Call(200),
    ("GET", "/console/{asset}"): Call(200),
    ("GET", "/metrics"): Call(200),
    ("GET", "/stats"): Call(200),
    ("POST", "/generate"): Call(
        200, "usable", {"variant": TARGET}, json={"prompt": "hi", "max_new_tokens": 1}
    ),
    ("POST", "/v1/completions"): Call(200, "usable", json=TOKENS),
    ("POST", "/v1/chat/completions"): Call(
        200,
        "usable",
        json={"model": TARGET, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]},
    ),
    ("POST", "/tokenize"): Call(200, "usable", json={"model": TARGET, "prompt": "hi"}),
    ("POST", "/detokenize"): Call(200, "usable", json={"model": TARGET, "tokens": [5]}),
    ("GET", "/v1/models"): Call(200),
    ("GET", "/v1/models/{model_id}"): Call(200, "usable"),
    # An upload makes a variant of the caller's own, whatever others have. This one is refused for its content.
    ("POST", "/variants"): Call(400, params={"name": TARGET}, content=b"this is no artifact"),
    ("GET", "/variants"): Call(200),
    ("GET", "/variants/{name}"): Call(200, "owned"),
    ("PATCH", "/variants/{name}"): Call(200, "owned", json={"active": 1}),
    ("DELETE", "/variants/{name}"): Call(200, "owned"),
    ("POST", "/variants/{name}/load"): Call(202, "owned"),
    ("POST", "/variants/{name}/unload"): Call(202, "owned"),
    ("POST", "/variants/{name}/pin"): Call(202, "owned", after=("POST", "/variants/{name}/unpin")),
    ("POST", "/variants/{name}/unpin"): Call(202, "owned"),
    ("GET", "/variants/{name}/artifact"): Call(200, "owned"),
    ("POST", "/v1/load_lora_adapter"): Call(200, "owned", json={"lora_name": TARGET, "lora_path": "a"}),
    ("POST", "/v1/unload_lora_adapter"): Call(
        200, "owned", json={"lora_name": TARGET}, before=("POST", "/v1/load_lora_adapter")
    ),
    ("GET", "/me"): Call(200),
    ("GET", "/changes"): Call(200),
    ("GET", "/tenants"): Call(200),
    ("PUT", "/tenants/{name}"): Call(200, json={}),
    ("POST", "/keys"): Call(201, json={"tenant": "acme", "roles": ["inference"]}),
    ("GET", "/keys"): Call(200),
    ("DELETE", "/keys/{key_id}"): Call(200),
}


@dataclass(frozen=True, slots=True)
class Table:
    """A server with keys, and one client per kind of caller and per owner."""

    server: LiveServer
    keys: KeyStore
    auditor: Auditor
    artifacts: Artifacts
    clients: Mapping[str, httpx.Client]

    def ask(self, caller: str, route: tuple[str, str], target: str) -> httpx.Response:
        call, (method, path) = CALLS[route], route
        params = {name: value.replace(TARGET, target) for name, value in call.params.items()}
        if caller == "admin" and not path.startswith(
            ("/keys", "/health", "/ready", "/metrics", "/stats", "/changes", "/openapi", "/docs")
        ):
            params["tenant"] = "acme"
        key_id = self.keys.create(self.auditor, "acme", ["inference"]).id if "{key_id}" in path else ""
        request = self.clients[caller].build_request(
            method,
            path.format(
                name=target,
                model_id=target,
                key_id=key_id,
                asset="app.js" if path.startswith("/console") else "swagger-ui.css",
            ),
            params=params,
            json=with_target(call.json, target),
            content=call.content,
        )
        return self.clients[caller].send(request)

    def publish(self, target: str) -> None:
        """Bring a target back that a call has deleted."""
        visibility = "public" if target == PUBLIC else "private"
        reply = self.clients[OWNERS[target]].post(
            "/variants",
            params={"name": target, "visibility": visibility},
            content=self.artifacts.chatty.read_bytes(),
        )
        assert reply.status_code == 201, reply.text


def with_target(document: Any, target: str) -> Any:
    if isinstance(document, dict):
        return {name: with_target(value, target) for name, value in document.items()}
    return target if document == TARGET else document


@pytest.fixture(scope="module")
def table(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    registry = tmp_path_factory.mktemp("table") / "registry"
    keys, auditor = KeyStore(registry), Auditor(AuditLog(registry))

    def made(tenant: str, *roles: Role) -> str:
        return keys.create(auditor, tenant, roles).text

    expired = keys.create(auditor, "acme", ["admin"])
    record = registry / "tenants" / "keys" / f"{expired.id}.json"
    past = datetime.now(UTC) - timedelta(seconds=1)
    record.write_text(json.dumps({**json.loads(record.read_text()), "expires_at": past.isoformat()}))
    texts = {
        "no key": None,
        "a wrong key": f"{made('acme', 'admin')[:-64]}{'0' * 64}",
        "an expired key": expired.text,
        "inference": made("acme", "inference"),
        "publish": made("acme", "publish"),
        "metrics": made("acme", "metrics"),
        "admin": made("ops", "admin"),
        "another tenant": made("globex", "inference", "publish"),
        "acme": made("acme", "inference", "publish"),
        "globex": made("globex", "inference", "publish"),
    }
    options: tuple[object, ...] = ("--auth", "keys", "--compat", "vllm-lora", "--max-gpu-deltas", 4)
    with live_server(artifacts.base, registry, *options) as server:
        clients = {
            caller: httpx.Client(
                base_url=server.url,
                timeout=WAIT_S,
                headers={"X-Request-Id": REQUEST_ID, **({"Authorization": f"Bearer {text}"} if text else {})},
                event_hooks={"response": [check_described]},
            )
            for caller, text in texts.items()
        }
        table = Table(server, keys, auditor, artifacts, clients)
        for target in OWNERS:
            table.publish(target)
        yield table
        for client in clients.values():
            client.close()


def expected(route: tuple[str, str], caller: str, target: str) -> int:
    """Return the status that a caller gets."""
    role, call, known = ROLES[route], CALLS[route], CALLERS[caller]
    if role is None:
        return call.status
    if known is None:
        return 401
    tenant, roles = known
    if role not in roles and (role != "any" or caller == "metrics"):
        return 403
    is_reached = OWNERS.get(target) == tenant or (call.reach == "usable" and target == PUBLIC)
    return call.status if is_reached or call.reach == "all" else 404


def visible(reply: httpx.Response, target: str) -> tuple[int, bytes, frozenset[tuple[str, str]]]:
    """Return all that a caller sees of a reply, without the name that it asked for and without the time."""
    headers = frozenset((name, value) for name, value in reply.headers.items() if name != "date")
    return reply.status_code, reply.content.replace(target.encode(), b"?"), headers


def test_the_table_lists_every_route() -> None:
    assert set(CALLS) == set(ROLES)


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("route", CALLS, ids=" ".join)
def test_a_caller_reaches_what_its_key_allows_and_the_rest_is_as_if_it_were_not_there(
    table: Table, route: tuple[str, str], caller: str
) -> None:
    call, replies = CALLS[route], {}
    for target in TARGETS:
        status = expected(route, caller, target)
        succeeds = status == call.status and call.reach == "owned"
        if succeeds and call.before is not None:
            assert table.ask(caller, call.before, target).is_success
        reply = replies[target] = table.ask(caller, route, target)
        assert reply.status_code == status, (target, reply.text)
        if succeeds and call.after is not None:
            assert table.ask(caller, call.after, target).is_success
        if succeeds and route[0] == "DELETE":
            table.publish(target)
    hidden = [target for target in TARGETS if not replies[target].is_success]
    assert len({visible(replies[target], target) for target in hidden}) <= 1


def test_a_list_shows_what_the_caller_may_see(table: Table) -> None:
    def names(caller: str, path: str, key: str, field_name: str) -> set[str]:
        return {entry[field_name] for entry in table.clients[caller].get(path).json()[key]}

    assert names("inference", "/variants", "variants", "name") == {OWN}
    assert names("another tenant", "/variants", "variants", "name") == {PUBLIC, PRIVATE}
    assert names("admin", "/variants", "variants", "name") == set()
    assert names("admin", "/variants?tenant=globex", "variants", "name") == {PUBLIC, PRIVATE}


def test_unloading_or_deleting_a_variant_takes_its_bytes_from_no_other_tenant(table: Table) -> None:
    def level(owner: str, name: str, call: str = "") -> str:
        client = table.clients[owner]
        reply = client.post(f"/variants/{name}/{call}") if call else client.get(f"/variants/{name}")
        return str(
            reply.json()["versions"][0]["level"] if "versions" in reply.json() else reply.json()["level"]
        )

    for owner, name in (("acme", OWN), ("globex", PUBLIC), ("globex", PRIVATE)):
        assert eventually(lambda: level(owner, name, "unload") == "disk")  # noqa: B023
    assert eventually(lambda: level("acme", OWN, "load") == "device")
    # Neither the bytes that another tenant has loaded show, nor are they taken from it.
    assert level("globex", PRIVATE) == level("globex", PRIVATE, "unload") == "disk"
    assert level("acme", OWN) == "device"
    assert eventually(lambda: level("globex", PRIVATE, "load") == "device")
    assert level("acme", OWN, "unload") == "disk"
    assert level("globex", PRIVATE) == "device"
    assert table.clients["acme"].delete(f"/variants/{OWN}").status_code == 200
    table.publish(OWN)
    assert level("globex", PRIVATE) == "device"


def test_only_an_administrator_acts_for_another_tenant(table: Table) -> None:
    for tenant in ("globex", "absent"):
        reply = table.clients["publish"].get("/variants", params={"tenant": tenant})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden")
    assert table.clients["publish"].get("/variants", params={"tenant": "acme"}).status_code == 200
    assert table.clients["admin"].get("/variants", params={"tenant": "../x"}).status_code == 400


def test_a_key_works_soon_after_its_making_and_ends_soon_after_its_revocation(table: Table) -> None:
    made = table.clients["admin"].post("/keys", json={"tenant": "new", "roles": ["publish"]})
    assert (made.status_code, made.headers["Cache-Control"]) == (201, "no-store")
    headers = {"X-API-Key": made.json()["key"]}
    assert eventually(lambda: table.server.client.get("/variants", headers=headers).status_code == 200)
    assert table.server.client.get("/variants", headers=headers).json()["variants"] == []
    # Revoked by a command on the registry's machine, which no server is told of.
    table.keys.revoke(table.auditor, made.json()["id"])
    assert eventually(lambda: table.server.client.get("/variants", headers=headers).status_code == 401)


def _logged(table: Table) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in (table.server.registry / "audit").iterdir()
        for line in path.read_text().splitlines()
        if '"audited"' in line
    ]


def test_every_change_of_a_variant_leaves_a_line_in_the_audit_log(table: Table) -> None:
    client, data = table.clients["publish"], table.artifacts.plain.read_bytes()
    digest = client.post("/variants?name=audited&visibility=public", content=data).json()["digest"]
    client.post("/variants?name=audited", content=data)
    client.patch("/variants/audited", json={"active": 1})
    client.patch("/variants/audited", json={"visibility": "private"})
    for change in ("pin", "unpin"):
        client.post(f"/variants/audited/{change}")
        # The line may follow the reply.
        assert eventually(lambda: _logged(table)[-1]["action"] == change)  # noqa: B023
    client.get("/variants/audited")
    client.patch("/variants/audited", json={"active": 9})
    table.clients["admin"].delete("/variants/audited?tenant=acme")
    lines = _logged(table)
    version = {"version": 1, "digest": digest.removeprefix("sha256:")}
    keys = [line.pop("key_id") for line in lines]
    assert len(set(keys)) == 2
    assert keys == [keys[0]] * 6 + [keys[-1]]
    assert all(datetime.fromisoformat(line.pop("time")) <= datetime.now(UTC) for line in lines)
    about = {"request_id": REQUEST_ID, "tenant": "acme", "variant": "audited"}
    assert [{**about, **change} for change in (
        {"action": "publish", **version},
        {"action": "visibility", "visibility": "public"},
        {"action": "promote", **version},
        {"action": "visibility", "visibility": "private"},
        {"action": "pin", **version},
        {"action": "unpin", **version},
        {"action": "delete", **version},
    )] == lines  # fmt: skip


def test_a_public_name_that_another_tenant_has_is_refused_before_the_upload_is_stored(table: Table) -> None:
    client = table.clients["publish"]
    reply = client.post(
        f"/variants?name={PUBLIC}&visibility=public", content=table.artifacts.third.read_bytes()
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "name_taken")
    assert client.get(f"/variants/{PUBLIC}").status_code == 404
    assert client.get(f"/v1/models/{PUBLIC}").json()["owned_by"] == "globex"


@pytest.mark.parametrize(
    "body", [{}, {"active": 1, "visibility": "public"}, {"visibility": "secret"}, {"visibility": None}]
)
def test_a_patch_is_one_change(table: Table, body: dict[str, Any]) -> None:
    reply = table.clients["publish"].patch(f"/variants/{OWN}", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    "body",
    [
        {"tenant": "acme"},
        {"tenant": "../acme", "roles": ["inference"]},
        {"tenant": "acme", "roles": []},
        {"tenant": "acme", "roles": ["root"]},
        {"tenant": "acme", "roles": ["inference"], "expires_in_s": 0},
        {"tenant": "acme", "roles": ["inference"], "expires_in_s": 10**12},
        {"tenant": "acme", "roles": ["inference"], "key": "mine"},
    ],
    ids=str,
)
def test_an_invalid_key_is_not_made(table: Table, body: dict[str, Any]) -> None:
    client = table.clients["admin"]
    before = client.get("/keys").json()
    reply = client.post("/keys", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
    assert client.get("/keys").json() == before


@pytest.mark.parametrize("key_id", ["0" * 12, "..%2Flimits%2Facme", "%00", "a" * 5000])
def test_revoking_an_absent_key_is_answered_with_404(table: Table, key_id: str) -> None:
    url = httpx.URL(table.server.url).copy_with(raw_path=f"/keys/{key_id}".encode())
    reply = table.clients["admin"].delete(url)
    assert reply.status_code == 404


def test_neither_logs_nor_files_nor_lists_hold_the_text_of_a_key(table: Table) -> None:
    secrets = [
        client.headers["Authorization"].rpartition("_")[2]
        for client in table.clients.values()
        if "Authorization" in client.headers
    ]
    files = [path for path in table.server.registry.rglob("*") if path.suffix in (".json", ".jsonl")]
    shown = [table.server.log.read_text(), table.clients["admin"].get("/keys").text]
    for text in (*shown, *(path.read_text() for path in files)):
        assert not [secret for secret in secrets if secret in text]
