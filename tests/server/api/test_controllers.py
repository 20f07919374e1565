"""Calls of adapter controllers, replayed as their source makes them, and what each controller checks in the replies.

AIBrix: `lora_client.go` and `modeladapter_controller.go` in `pkg/controller/modeladapter/` at
e3e10f9e4aebe9aac5e7d992fb87d2648e01628b. production-stack of vLLM:
`operator/internal/controller/loraadapter_controller.go` and `src/vllm_router/service_discovery.py` at
a6c01db05f65f556235413ba8dbcfb0c01132fff.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.api.conftest import LoraServer, lora_server
from tests.server.helpers.live_server import Artifacts, eventually

JSON = {"Content-Type": "application/json"}


class AibrixController:
    """The calls of AIBrix' ModelAdapter controller to one pod, whose engine it calls directly."""

    def __init__(self, client: httpx.Client, name: str, artifact_url: str) -> None:
        self._client = client
        self._name = name
        # A hub's URL loses its scheme; any other is sent as it is.
        self._path = artifact_url.removeprefix("huggingface://")

    def load(self) -> tuple[bool, bool]:
        """List the models, and load the adapter unless it is there. Return (loaded, existed)."""
        models = self._client.get("/v1/models")
        assert models.status_code == 200
        if self._name in {item["id"] for item in models.json()["data"]}:
            return False, True
        body = json.dumps({"lora_name": self._name, "lora_path": self._path})
        reply = self._client.post("/v1/load_lora_adapter", content=body, headers=JSON)
        assert reply.status_code in (200, 201), reply.text
        return True, False

    def unload(self) -> int:
        """Unload the adapter. The controller logs any other status than 200 and goes on."""
        body = json.dumps({"lora_name": self._name})
        return self._client.post("/v1/unload_lora_adapter", content=body, headers=JSON).status_code


class ProductionStackController:
    """The calls of production-stack's LoraAdapter controller to one pod."""

    def __init__(self, client: httpx.Client, name: str, path: str) -> None:
        self._client = client
        self._name = name
        self._path = path

    def _send(self, method: str, target: str, body: dict[str, str] | None = None) -> httpx.Response:
        content = None if body is None else json.dumps(body)
        reply = self._client.request(method, target, content=content, headers=JSON)
        assert reply.status_code == 200, reply.text
        return reply

    def registrations(self) -> list[dict[str, Any]]:
        """Return the cards of the adapter: those with a parent and its name."""
        cards = self._send("GET", "/v1/models").json()["data"]
        return [card for card in cards if card["parent"] is not None and card["id"] == self._name]

    def reconcile(self, *, is_placed_here: bool) -> None:
        """Load or unload until the registrations are those of the placement."""
        registered = self.registrations()
        if is_placed_here and not registered:
            body = {"lora_name": self._name, "lora_path": self._path}
            self._send("POST", "/v1/load_lora_adapter", body)
        if not is_placed_here and registered:
            self._send("POST", "/v1/unload_lora_adapter", {"lora_name": self._name})


@pytest.mark.parametrize("form", ["{directory}/plain.safetensors", "plain.safetensors"])
def test_aibrix_loads_finds_and_unloads_an_adapter(lora: LoraServer, form: str) -> None:
    controller = AibrixController(lora.server.client, "aibrix-sql", form.format(directory=lora.directory))
    assert controller.load() == (True, False)
    # The resync of its reconciler finds the adapter again and again.
    for _ in range(3):
        assert controller.load() == (False, True)
    assert controller.unload() == 200
    assert controller.load() == (True, False)
    assert controller.unload() == 200
    assert controller.unload() == 404


def test_aibrix_places_a_registered_variant_by_its_hub_url(lora: LoraServer) -> None:
    lora.server.upload("aibrix-hub", lora.directory / "plain.safetensors")
    controller = AibrixController(
        lora.server.client, "aibrix-hub", "huggingface://yard1/llama-2-7b-sql-lora-test"
    )
    assert controller.load() == (True, False)
    assert controller.load() == (False, True)
    assert controller.unload() == 200


def test_aibrix_retries_a_load_that_was_answered_although_it_did_not_hear_it(lora: LoraServer) -> None:
    """A lost answer makes `tryLoadModelAdapterOnPod` load again, and its list of models may be old."""
    body = json.dumps({"lora_name": "aibrix-lost", "lora_path": "plain.safetensors"})
    for _ in range(2):
        reply = lora.server.client.post("/v1/load_lora_adapter", content=body, headers=JSON)
        assert reply.status_code == 200
    assert lora.unload("aibrix-lost")[0] == 200


def test_aibrix_sees_why_an_adapter_cannot_be_loaded(lora: LoraServer) -> None:
    controller = AibrixController(lora.server.client, "aibrix-none", "huggingface://org/absent")
    with pytest.raises(AssertionError, match="No adapter found for org/absent"):
        controller.load()


def test_production_stack_places_moves_and_deletes_an_adapter(lora: LoraServer) -> None:
    path = f"{lora.directory}/third.safetensors"
    controller = ProductionStackController(lora.server.client, "stack-sql", path)
    assert controller.registrations() == []
    controller.reconcile(is_placed_here=True)
    (card,) = controller.registrations()
    # The status of the LoraAdapter: path, and time of the load in whole seconds.
    assert card["root"] == path
    assert type(card["created"]) is int
    controller.reconcile(is_placed_here=True)
    controller.reconcile(is_placed_here=False)
    assert controller.registrations() == []
    # Its deletion handler unloads what is registered, which is nothing any more.
    controller.reconcile(is_placed_here=False)


def test_production_stacks_router_tells_adapters_from_the_base(lora: LoraServer) -> None:
    lora.load("stack-routed", "plain.safetensors")
    cards = lora.server.client.get("/v1/models").json()["data"]
    fields = {"id", "object", "created", "owned_by", "root", "parent"}
    assert all(fields <= card.keys() for card in cards)
    assert [card["id"] for card in cards if card["parent"] is None] == ["base"]
    assert "stack-routed" in [card["id"] for card in cards if card["parent"] == "base"]
    lora.unload("stack-routed")


def test_an_engine_that_starts_again_forgets_no_adapter_and_a_pod_all(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    with lora_server(artifacts, tmp_path) as lora:
        aibrix = AibrixController(lora.server.client, "kept", "plain.safetensors")
        assert aibrix.load() == (True, False)
        (engine,) = [
            child
            for child in psutil.Process(lora.server.process.pid).children()
            if "server.engine.main" in child.cmdline()
        ]
        engine.kill()
        assert eventually(lambda: lora.server.client.get("/ready").status_code == 503)
        assert aibrix.load() == (False, True)
        assert eventually(lambda: lora.server.client.get("/ready").status_code == 200)
        assert aibrix.load() == (False, True)
        body = {"model": "kept", "prompt": "hello", "max_tokens": 1}
        assert lora.server.client.post("/v1/completions", json=body).status_code == 200
    # Not unloaded: the next pod knows the variant, and no adapter.
    with lora_server(artifacts, tmp_path) as lora:
        aibrix = AibrixController(lora.server.client, "kept", "plain.safetensors")
        assert aibrix.load() == (True, False)
        assert aibrix.load() == (False, True)
        assert len(lora.server.client.get("/variants/kept").json()["versions"]) == 1
        assert aibrix.unload() == 200
