"""vLLM's calls for LoRA adapters over HTTP: replies, statuses and messages, and what `/v1/models` lists after them.

vLLM's side: `vllm/entrypoints/openai/models/serving.py` at 00153c8b7948077ebdfc5bfa14e403da41aaea6d and
`vllm/frontend/entrypoints/serve/lora/api_router.py` at 055e47c28003156421365af985d676fc921cb075.
"""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.server.api.conftest import LoraServer
from tests.server.helpers.live_server import Artifacts, LiveServer, eventually


def error_of(text: str) -> dict[str, Any]:
    """Return the error of a reply, after checking vLLM's shape, whose `code` is the status."""
    document = json.loads(text)
    assert list(document) == ["error"]
    error: dict[str, Any] = document["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return error


def card_of(lora: LoraServer, name: str) -> dict[str, Any]:
    cards = lora.server.client.get("/v1/models").json()["data"]
    found: dict[str, Any] = next(card for card in cards if card["id"] == name)
    return found


def test_an_artifact_is_published_loaded_listed_and_served(lora: LoraServer) -> None:
    began = int(time.time())
    assert lora.load("served", "plain.safetensors") == (
        200,
        "Success: LoRA adapter 'served' added successfully.",
    )
    card = card_of(lora, "served")
    assert (card["object"], card["parent"], card["root"]) == ("model", "base", "plain.safetensors")
    assert began <= card["created"] <= time.time()
    (version,) = lora.server.client.get("/variants/served").json()["versions"]
    assert version["level"] == "device"
    body = {"model": "served", "prompt": "hello", "max_tokens": 2}
    assert lora.server.client.post("/v1/completions", json=body).status_code == 200
    assert lora.unload("served") == (200, "Success: LoRA adapter 'served' removed successfully.")
    assert "served" not in lora.listed()
    assert lora.server.client.get("/variants/served").json()["versions"][0]["level"] == "disk"


def test_before_a_load_only_the_base_is_listed_and_it_has_no_parent(lora: LoraServer) -> None:
    lora.server.upload("registered", lora.directory / "plain.safetensors")
    base, *_ = lora.server.client.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("base", None)
    assert "registered" not in lora.listed()


def test_a_registered_variant_is_loaded_by_its_name_whatever_hub_id_stands_for_it(lora: LoraServer) -> None:
    lora.server.upload("by-name", lora.directory / "plain.safetensors")
    assert lora.load("by-name", "org/adapter")[0] == 200
    assert card_of(lora, "by-name")["root"] == "org/adapter"
    lora.unload("by-name")


def test_a_variant_that_requests_have_loaded_is_listed_while_it_is_in_memory(lora: LoraServer) -> None:
    lora.server.upload("on-demand", lora.directory / "plain.safetensors")
    lora.server.token_ids("on-demand", max_new_tokens=1)
    assert card_of(lora, "on-demand")["root"] == "on-demand"
    assert lora.unload("on-demand")[0] == 200
    assert "on-demand" not in lora.listed()


def test_a_loaded_name_stays_listed_when_others_have_driven_it_out(lora: LoraServer) -> None:
    """Two slots hold three adapters in turn; a controller would load the missing one again, and drive out the next."""
    names = ["plain", "chatty", "third"]
    for name in names:
        assert lora.load(f"turn-{name}", f"{name}.safetensors")[0] == 200
    for name in (*names, *names):
        lora.server.token_ids(f"turn-{name}", max_new_tokens=1)
    assert {f"turn-{name}" for name in names} <= set(lora.listed())
    for name in names:
        lora.unload(f"turn-{name}")


def test_a_repeated_load_is_answered_with_200_and_publishes_nothing_new(lora: LoraServer) -> None:
    for inplace in (None, False, True):
        assert lora.load("again", "plain.safetensors", inplace=inplace)[0] == 200
    assert len(lora.server.client.get("/variants/again").json()["versions"]) == 1
    assert lora.listed().count("again") == 1
    lora.unload("again")


def test_another_artifact_under_a_loaded_name_needs_load_inplace(lora: LoraServer) -> None:
    lora.load("replaced", "plain.safetensors")
    status, text = lora.load("replaced", "third.safetensors")
    error = error_of(text)
    assert (status, error["type"], error["code"]) == (400, "InvalidUserInput", 400)
    assert error["message"].startswith("The lora adapter 'replaced' has already been loaded")
    assert "'load_inplace' to True" in error["message"]
    assert lora.load("replaced", "third.safetensors", inplace=True)[0] == 200
    shown = lora.server.client.get("/variants/replaced").json()
    assert (shown["active"], len(shown["versions"])) == (2, 2)
    assert card_of(lora, "replaced")["root"] == "third.safetensors"
    # Back to bytes that the variant has already.
    assert lora.load("replaced", "plain.safetensors", inplace=True)[0] == 200
    assert lora.server.client.get("/variants/replaced").json()["active"] == 1
    lora.unload("replaced")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "", "lora_path": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x", "lora_path": ""}, "Both 'lora_name' and 'lora_path' must be provided."),
        (
            {"lora_name": "base", "lora_path": "x"},
            "The lora adapter 'base' conflicts with a served base model.",
        ),
    ],
)
def test_a_load_that_vllm_refuses_as_invalid_is_refused_in_its_words(
    lora: LoraServer, body: dict[str, str], message: str
) -> None:
    reply = lora.server.client.post("/v1/load_lora_adapter", json=body)
    error = error_of(reply.text)
    assert (reply.status_code, error["type"], error["message"]) == (400, "InvalidUserInput", message)


def test_a_load_without_an_artifact_or_a_variant_is_not_found(lora: LoraServer) -> None:
    status, text = lora.load("nothing", "org/nothing")
    error = error_of(text)
    assert (status, error["type"], error["code"]) == (404, "NotFoundError", 404)
    assert error["message"].startswith("Loading lora nothing failed: No adapter found for org/nothing")


@pytest.mark.parametrize("name", ["registered-only", "unknown", "../etc", "base"])
def test_an_unload_of_what_is_not_loaded_is_not_found(lora: LoraServer, name: str) -> None:
    lora.server.upload("registered-only", lora.directory / "chatty.safetensors")
    status, text = lora.unload(name)
    error = error_of(text)
    assert (status, error["type"], error["code"]) == (404, "NotFoundError", 404)
    assert error["message"] == f"The lora adapter '{name}' cannot be found."


def test_an_unload_without_a_name_is_refused_in_vllms_words(lora: LoraServer) -> None:
    status, text = lora.unload("")
    error = error_of(text)
    assert (status, error["type"]) == (400, "InvalidUserInput")
    assert error["message"] == "'lora_name' needs to be provided to unload a LoRA adapter."


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tricky", "../registry/peraxis.json"),
        ("tricky", "/etc/passwd"),
        ("tricky", "a\0b"),
        ("tri/cky", "plain.safetensors"),
        ("n" * 65, "plain.safetensors"),
    ],
)
def test_names_and_paths_that_lead_elsewhere_are_refused(lora: LoraServer, name: str, path: str) -> None:
    status, text = lora.load(name, path)
    assert (status, error_of(text)["type"]) == (400, "BadRequestError")
    assert lora.server.client.get(f"/variants/{name}").status_code == 404


def test_an_artifact_of_another_base_is_refused_and_not_listed(lora: LoraServer) -> None:
    status, text = lora.load("foreign", "foreign.safetensors")
    assert (status, error_of(text)["code"]) == (409, 409)
    assert "foreign" not in lora.listed()


def test_a_file_that_is_no_artifact_is_refused(lora: LoraServer) -> None:
    (lora.directory / "broken.safetensors").write_bytes(b"\0" * 64)
    status, text = lora.load("broken", "broken.safetensors")
    assert (status, error_of(text)["type"]) == (400, "BadRequestError")


@pytest.mark.parametrize("call", ["load_lora_adapter", "unload_lora_adapter"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"lora_name": 1}', b'{"lora_path": "x"}', b"\xff"])
def test_an_invalid_body_is_refused_in_vllms_shape(lora: LoraServer, call: str, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    reply = lora.server.client.post(f"/v1/{call}", content=content, headers=headers)
    error = error_of(reply.text)
    assert (reply.status_code, error["type"], error["code"]) == (400, "BadRequestError", 400)


def test_fields_that_only_vllm_knows_are_ignored(lora: LoraServer) -> None:
    body = {"lora_name": "extra", "lora_path": "plain.safetensors", "is_3d_lora_weight": True, "x": 1}
    assert lora.server.client.post("/v1/load_lora_adapter", json=body).status_code == 200
    body = {"lora_name": "extra", "lora_int_id": 7}
    assert lora.server.client.post("/v1/unload_lora_adapter", json=body).status_code == 200


def test_an_unload_lets_running_requests_end(lora: LoraServer) -> None:
    lora.load("running", "plain.safetensors")
    with lora.server.streaming("running", max_new_tokens=200) as events:
        next(events)
        assert lora.unload("running")[0] == 200
        assert [name for name, _ in events][-1] == "done"
    assert eventually(lambda: "running" not in lora.listed())


def test_every_http_process_lists_what_one_of_them_has_loaded(lora: LoraServer) -> None:
    lora.load("everywhere", "plain.safetensors")
    for _ in range(8):
        with httpx.Client(base_url=lora.server.url, timeout=240) as client:
            assert "everywhere" in [card["id"] for card in client.get("/v1/models").json()["data"]]
    lora.unload("everywhere")


def test_routers_read_what_is_loaded_from_vllms_metrics(lora: LoraServer) -> None:
    for name in ("loader", "measured"):
        lora.load(name, "plain.safetensors")
    lines = lora.server.client.get("/metrics").text.splitlines()
    loaded = next(
        line for line in lines if line.startswith("vllm:lora_adapter_loaded{") and "measured" in line
    )
    assert 'level="gpu"' in loaded
    assert loaded.endswith(" 1.0")
    assert any(line.startswith("vllm:lora_requests_info{") and 'max_lora="2"' in line for line in lines)
    assert any(line.startswith("vllm:lora_adapter_loaded{") and "loader" in line for line in lines)
    sizes = next(line for line in lines if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="16"' in sizes
    for name in ("loader", "measured"):
        lora.unload(name)


def test_without_the_setting_the_calls_do_not_exist_and_all_variants_are_listed(
    server: LiveServer, artifacts: Artifacts
) -> None:
    for call in ("load_lora_adapter", "unload_lora_adapter"):
        reply = server.client.post(f"/v1/{call}", json={"lora_name": "plain", "lora_path": "plain"})
        assert reply.status_code == 404
    listed = [card["id"] for card in server.client.get("/v1/models").json()["data"]]
    assert {"base", "plain", "chatty", "third"} <= set(listed)
