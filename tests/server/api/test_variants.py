"""`/variants` and `/v1/models` over HTTP: list, promote, delete, load, pin and download."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from deltastore.registry import Registry
from tests.server.helpers.live_server import MAX_MODEL_LEN, Artifacts, LiveServer, error_of, eventually

# A request that runs until the client disconnects. With this seed, its first sequence is a long one.
LONG = {"max_new_tokens": MAX_MODEL_LEN - 10, "n": 100, "temperature": 2.0, "seed": 1}


def version_of(server: LiveServer, name: str, version: int = 1) -> dict[str, Any]:
    """Return the server's document of one version."""
    versions = server.client.get(f"/variants/{name}").json()["versions"]
    found: dict[str, Any] = next(entry for entry in versions if entry["version"] == version)
    return found


def settles(server: LiveServer, name: str, call: str, **expected: object) -> bool:
    """Make the call and return whether it has its effect in time."""
    reply = server.client.post(f"/variants/{name}/{call}")
    assert (reply.status_code, reply.json()["name"]) == (202, name)
    return eventually(lambda: expected.items() <= version_of(server, name).items())


def test_a_variant_shows_its_versions_and_where_they_are(server: LiveServer, artifacts: Artifacts) -> None:
    server.upload("shown", artifacts.plain)
    server.upload("shown", artifacts.third)
    document = server.client.get("/variants/shown").json()
    assert (document["name"], document["active"]) == ("shown", 2)
    assert [entry["version"] for entry in document["versions"]] == [1, 2]
    newest = document["versions"][1]
    assert newest["size_bytes"] == artifacts.third.stat().st_size
    assert newest["fidelity"]["weight_error"] > 0
    assert (newest["method"], newest["num_requests"], newest["pinned"]) == ("scalar", 0, False)
    assert newest["level"] in ("device", "disk")


def test_the_list_holds_every_variant(server: LiveServer, artifacts: Artifacts) -> None:
    server.upload("listed", artifacts.plain)
    variants = server.client.get("/variants").json()["variants"]
    names = [variant["name"] for variant in variants]
    assert names == sorted(names)
    (listed,) = [variant for variant in variants if variant["name"] == "listed"]
    shown = server.client.get("/variants/listed").json()
    assert [listed[name] for name in ("owner", "active", "visibility", "num_versions")] == [
        shown[name] for name in ("owner", "active", "visibility", "num_versions")
    ]
    (version,) = shown["versions"]
    # Reports are in the answer about one variant alone.
    assert version.pop("fidelity")
    assert listed["versions"] == [version]


@pytest.mark.parametrize("call", ["", "/load", "/unload", "/pin", "/unpin", "/artifact"])
@pytest.mark.parametrize("name", ["absent", "%2e%2e", "base", "plain@1", "a" * 65])
def test_an_absent_variant_is_not_found(server: LiveServer, call: str, name: str) -> None:
    method = "GET" if call in ("", "/artifact") else "POST"
    reply = server.client.request(
        method, httpx.URL(server.url).copy_with(raw_path=f"/variants/{name}{call}".encode())
    )
    assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")


def test_promote_and_roll_back_change_what_answers(server: LiveServer, artifacts: Artifacts) -> None:
    server.upload("moved", artifacts.plain)
    server.upload("moved", artifacts.third)
    new = server.token_ids("moved", max_new_tokens=8)
    reply = server.client.patch("/variants/moved", json={"active": 1})
    assert (reply.status_code, reply.json()["active"]) == (200, 1)
    old = server.token_ids("moved", max_new_tokens=8)
    assert old == server.token_ids("plain", max_new_tokens=8) != new


def test_a_running_request_keeps_its_version_when_another_is_promoted(
    server: LiveServer, artifacts: Artifacts
) -> None:
    server.upload("kept", artifacts.plain)
    server.upload("kept", artifacts.third, activate="false")
    alone = server.token_ids("plain", max_new_tokens=100)
    with server.streaming("kept", max_new_tokens=100) as stream:
        events = [next(stream)]
        server.client.patch("/variants/kept", json={"active": 2})
        events += stream
    assert [data["token_id"] for name, data in events if name == "token"] == alone
    assert events[-1][1]["version"] == 1


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"active": 9}, 404, "model_not_found"),
        ({"active": 0}, 400, "invalid_request"),
        ({"active": "1"}, 400, "invalid_request"),
        ({"active": 10**40}, 400, "invalid_request"),
        ({}, 400, "invalid_request"),
        ({"active": 1, "note": "x"}, 400, "invalid_request"),
    ],
    ids=str,
)
def test_an_invalid_promotion_is_refused(
    server: LiveServer, body: dict[str, Any], status: int, code: str
) -> None:
    reply = server.client.patch("/variants/plain", json=body)
    assert (reply.status_code, error_of(reply)["code"]) == (status, code)
    assert server.client.get("/variants/plain").json()["active"] == 1


def test_deleting_refuses_new_requests_and_lets_running_ones_end(
    server: LiveServer, artifacts: Artifacts
) -> None:
    server.upload("deleted", artifacts.plain)
    alone = server.token_ids("plain", max_new_tokens=100)
    with server.streaming("deleted", max_new_tokens=100) as stream:
        events = [next(stream)]
        reply = server.client.delete("/variants/deleted")
        assert (reply.status_code, reply.json()) == (200, {"name": "deleted", "deleted": [1]})
        assert server.generate("deleted").status_code == 404
        events += stream
    assert [data["token_id"] for name, data in events if name == "token"] == alone
    assert events[-1][0] == "done"
    assert server.client.get("/variants/deleted").status_code == 404


def test_a_version_is_deleted_alone_and_its_number_is_not_used_again(
    server: LiveServer, artifacts: Artifacts
) -> None:
    server.upload("thinned", artifacts.plain)
    server.upload("thinned", artifacts.third)
    assert server.client.delete("/variants/thinned?version=1").json()["deleted"] == [1]
    assert server.generate("thinned@1").status_code == 404
    assert server.upload("thinned", artifacts.plain).json()["version"] == 3


def test_the_only_version_is_deleted_with_its_variant_alone_unless_it_is_inactive(
    server: LiveServer, artifacts: Artifacts
) -> None:
    server.upload("single", artifacts.plain)
    reply = server.client.delete("/variants/single?version=1")
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_request")
    assert server.client.delete("/variants/single").json() == {"name": "single", "deleted": [1]}
    assert server.upload("single", artifacts.plain, activate="false").json()["active"] is False
    reply = server.generate("single")
    assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")
    assert server.generate("single@2", max_new_tokens=1).json()["version"] == 2
    assert server.client.delete("/variants/single?version=2").json()["deleted"] == [2]
    assert server.client.get("/variants/single").status_code == 404


def test_a_version_is_deleted_while_a_request_runs_on_it(server: LiveServer, artifacts: Artifacts) -> None:
    server.upload("outlived", artifacts.plain)
    server.upload("outlived", artifacts.third)
    alone = server.token_ids("plain", max_new_tokens=100)
    with server.streaming("outlived@1", max_new_tokens=100) as stream:
        events = [next(stream)]
        assert server.client.delete("/variants/outlived?version=1").json()["deleted"] == [1]
        assert server.generate("outlived@1").status_code == 404
        events += stream
    assert [data["token_id"] for name, data in events if name == "token"] == alone
    assert events[-1][1]["version"] == 1
    assert server.generate("outlived", max_new_tokens=1).json()["version"] == 2


def test_deleting_twice_is_not_found(server: LiveServer, artifacts: Artifacts) -> None:
    server.upload("gone", artifacts.plain)
    server.upload("gone", artifacts.third)
    for path in ("/variants/gone?version=1", "/variants/gone"):
        assert server.client.delete(path).status_code == 200
        reply = server.client.delete(path)
        assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("version", "status"), [("1", 400), ("7", 404), ("0", 400), ("one", 400)])
def test_an_invalid_deletion_is_refused(server: LiveServer, version: str, status: int) -> None:
    reply = server.client.delete(f"/variants/third?version={version}")
    assert reply.status_code == status
    assert error_of(reply)["code"] == {400: "invalid_request", 404: "model_not_found"}[status]
    assert server.client.get("/variants/third").json()["active"] == 1


def test_a_deleted_variant_gives_its_slot_back_even_when_it_was_pinned(
    server: LiveServer, artifacts: Artifacts
) -> None:
    before = server.metric("slots_pinned")
    server.upload("pinned-away", artifacts.spare[0])
    assert settles(server, "pinned-away", "pin", pinned=True, level="device")
    assert server.metric("slots_pinned") == before + 1
    server.client.delete("/variants/pinned-away")
    assert eventually(lambda: server.metric("slots_pinned") == before)


def test_load_brings_a_version_in_and_unload_takes_it_out(server: LiveServer) -> None:
    server.unload_all()
    assert settles(server, "chatty", "load", level="device")
    assert server.generate("chatty", max_new_tokens=1).json()["timings"]["cold"] is False
    assert settles(server, "chatty", "unload", level="disk")
    assert server.generate("chatty", max_new_tokens=1).json()["timings"]["cold"] is True


def test_a_slot_in_use_is_freed_only_when_its_requests_have_ended(
    server: LiveServer, artifacts: Artifacts
) -> None:
    with server.streaming("third", **LONG) as stream:
        next(stream)
        assert version_of(server, "third")["num_requests"] == 1
        reply = server.client.post("/variants/third/unload")
        assert (reply.status_code, reply.json()["level"]) == (202, "device")
        assert next(stream)[0] == "token"
    assert eventually(lambda: version_of(server, "third")["level"] == "disk")


def test_the_last_slot_cannot_be_pinned(server: LiveServer, artifacts: Artifacts) -> None:
    for name in ("plain", "chatty", "third"):
        assert settles(server, name, "pin", pinned=True, level="device")
    server.upload("fourth", artifacts.spare[0])
    assert settles(server, "fourth", "load", level="device")
    reply = server.client.post("/variants/fourth/pin")
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_request")
    for name in ("plain", "chatty", "third"):
        assert settles(server, name, "unpin", pinned=False)


def test_an_artifact_comes_back_as_it_was_sent(server: LiveServer, artifacts: Artifacts) -> None:
    reply = server.client.get("/variants/plain/artifact")
    assert reply.content == artifacts.plain.read_bytes()
    assert reply.headers["ETag"] == f'"{version_of(server, "plain")["digest"]}"'
    assert reply.headers["Content-Disposition"] == 'attachment; filename="plain-1.safetensors"'


def test_a_download_with_a_matching_etag_is_not_repeated(server: LiveServer) -> None:
    etag = server.client.get("/variants/plain/artifact").headers["ETag"]
    reply = server.client.get("/variants/plain/artifact", headers={"If-None-Match": f'"x", {etag}'})
    assert (reply.status_code, reply.content, reply.headers["ETag"]) == (304, b"", etag)


@pytest.mark.parametrize(
    ("header", "part"),
    [("bytes=0-9", slice(0, 10)), ("bytes=100-", slice(100, None)), ("bytes=-7", slice(-7, None))],
)
def test_a_download_can_be_resumed(
    server: LiveServer, artifacts: Artifacts, header: str, part: slice
) -> None:
    content = artifacts.plain.read_bytes()
    reply = server.client.get("/variants/plain/artifact", headers={"Range": header})
    assert (reply.status_code, reply.content) == (206, content[part])
    first, last, _ = part.indices(len(content))
    assert reply.headers["Content-Range"] == f"bytes {first}-{last - 1}/{len(content)}"


def test_a_range_of_another_artifact_gives_the_whole_of_this_one(
    server: LiveServer, artifacts: Artifacts
) -> None:
    headers = {"Range": "bytes=5-", "If-Range": '"sha256:other"'}
    reply = server.client.get("/variants/plain/artifact", headers=headers)
    assert (reply.status_code, reply.content) == (200, artifacts.plain.read_bytes())


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("bytes=99999999999-", 416),
        ("bytes=-0", 416),
        ("bytes=5-4", 400),
        ("bytes=-", 400),
        ("bytes=a-b", 400),
        ("lines=1-2", 400),
        ("bytes=" + "9" * 5000 + "-", 400),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_invalid_range_is_refused(server: LiveServer, header: str, status: int) -> None:
    reply = server.client.get("/variants/plain/artifact", headers={"Range": header})
    assert reply.status_code == status
    assert error_of(reply)["code"] == {400: "invalid_request", 416: "range_not_satisfiable"}[status]


def test_promotions_are_shown_as_history_and_rest_on_the_version_that_their_caller_saw(
    server: LiveServer, artifacts: Artifacts
) -> None:
    name = "promoted"
    for artifact in (artifacts.plain, artifacts.third):
        server.upload(name, artifact)
    server.upload(name, artifacts.spare[0], activate="false")

    def promote(**body: Any) -> httpx.Response:
        return server.client.patch(f"/variants/{name}", json=body)

    assert server.client.get(f"/variants/{name}").json()["history"] == []
    assert promote(active=1, if_active=2).status_code == 200
    late = promote(active=3, if_active=2)
    assert (late.status_code, error_of(late)["code"]) == (409, "conflict")
    assert "version 1 is active now" in error_of(late)["message"]
    document = server.client.get(f"/variants/{name}").json()
    assert document["active"] == 1
    assert [each["activate"] for each in document["versions"]] == [True, True, False]
    (entry,) = document["history"]
    assert (entry["version"], entry["key_id"]) == (1, None)
    assert entry["promoted_at"] > document["versions"][2]["created_at"]
    for body in ({"if_active": 1}, {"if_active": 1, "visibility": "public"}, {"active": 1, "if_active": -1}):
        assert promote(**body).status_code == 400


def test_models_are_listed_as_openai_clients_expect(server: LiveServer) -> None:
    document = server.client.get("/v1/models").json()
    cards = {card["id"]: card for card in document["data"]}
    assert document["object"] == "list"
    assert {"base", "plain", "chatty", "third"} <= set(cards)
    fields = ["id", "object", "created", "owned_by", "root", "parent", "max_model_len"]
    assert all(list(card) == fields and card["object"] == "model" for card in cards.values())
    assert (cards["base"]["parent"], cards["plain"]["parent"]) == (None, "base")
    assert cards["plain"]["max_model_len"] == MAX_MODEL_LEN
    assert cards["plain"]["created"] >= cards["base"]["created"]


@pytest.mark.parametrize("model_id", ["base", "plain", "plain@1"])
def test_one_model_is_shown_by_its_id(server: LiveServer, model_id: str) -> None:
    assert server.client.get(f"/v1/models/{model_id}").json()["id"] == model_id


@pytest.mark.parametrize("model_id", ["absent", "plain@2", "base@1", "plain@x"])
def test_an_absent_model_is_not_found(server: LiveServer, model_id: str) -> None:
    reply = server.client.get(f"/v1/models/{model_id}")
    assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")


def test_models_come_a_page_at_a_time_and_all_at_once_to_clients_that_ask_for_no_page(
    server: LiveServer, artifacts: Artifacts
) -> None:
    server.upload("paged", artifacts.plain)
    whole = server.client.get("/v1/models").json()
    assert (whole["object"], whole["has_more"]) == ("list", False)
    found, after = [], None
    while True:
        params = {"limit": 2} if after is None else {"limit": 2, "after": after}
        page = server.client.get("/v1/models", params=params).json()
        assert len(page["data"]) <= 2
        found += page["data"]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert found == whole["data"]
    assert found[0]["id"] == "base"


@pytest.mark.parametrize(("spare", "is_truncated"), [(1, False), (2, True)], ids=["changed", "truncated"])
def test_a_corrupt_object_is_quarantined_and_healed_by_its_upload(
    server: LiveServer, artifacts: Artifacts, spare: int, is_truncated: bool
) -> None:
    name, quarantined = f"rotten-{spare}", Registry(server.registry).usage().num_quarantined
    digest = server.upload(name, artifacts.spare[spare]).json()["digest"].removeprefix("sha256:")
    stored = server.registry / "objects" / digest
    content = stored.read_bytes()
    middle = len(content) // 2
    stored.write_bytes(content[:middle] if is_truncated else content[:middle] + b"?" + content[middle + 1 :])
    for _ in range(2):
        reply = server.generate(name)
        assert (reply.status_code, error_of(reply)["code"]) == (424, "variant_quarantined")
    assert Registry(server.registry).usage().num_quarantined == quarantined + 1
    assert server.upload(name, artifacts.spare[spare]).status_code == 200
    assert server.generate(name, max_new_tokens=1).status_code == 200
    assert Registry(server.registry).usage().num_quarantined == quarantined
