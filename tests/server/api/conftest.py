"""A server with vLLM's calls and two HTTP processes, and the directory that its load call may publish from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.helpers.live_server import Artifacts, LiveServer, live_server


@dataclass(frozen=True, slots=True)
class LoraServer:
    """A running server and its `--lora-dir`."""

    server: LiveServer
    directory: Path

    def load(self, name: str, path: str, *, inplace: bool | None = None) -> tuple[int, str]:
        """Return the status and the text of a load call."""
        flag = {} if inplace is None else {"load_inplace": inplace}
        body = {"lora_name": name, "lora_path": path, **flag}
        reply = self.server.client.post("/v1/load_lora_adapter", json=body)
        return reply.status_code, reply.text

    def unload(self, name: str) -> tuple[int, str]:
        reply = self.server.client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        return reply.status_code, reply.text

    def listed(self) -> list[str]:
        """Return the ids of `/v1/models`."""
        return [card["id"] for card in self.server.client.get("/v1/models").json()["data"]]


@contextmanager
def lora_server(artifacts: Artifacts, directory: Path) -> Iterator[LoraServer]:
    """Run a server over the registry and the artifacts in `directory`, which a first call fills."""
    lora_dir = directory / "adapters"
    if not lora_dir.exists():
        lora_dir.mkdir()
        for name in ("plain", "chatty", "third", "foreign"):
            shutil.copy(getattr(artifacts, name), lora_dir / f"{name}.safetensors")
    settings = ("--compat", "vllm-lora", "--lora-dir", lora_dir, "--http-workers", 2, "--max-gpu-deltas", 2)
    with live_server(artifacts.base, directory / "registry", *settings) as server:
        yield LoraServer(server, lora_dir)


@pytest.fixture(scope="package")
def lora(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraServer]:
    """Run one server for all tests of the folder. Each test uses names of its own and unloads them."""
    with lora_server(artifacts, tmp_path_factory.mktemp("lora")) as running:
        yield running
