"""The part of the plugin that vLLM's own server needs, without vLLM."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peraxis_vllm import registry as own
from peraxis_vllm import section_of
from peraxis_vllm.registry import Follower, check_server, label_of, path_of

from bench.engine import publish
from deltastore.errors import NotServable
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from tests.server.helpers.served import WAIT_S, Family, make_family


class Engine:
    """Stands for vLLM's engine: loads end at the second question."""

    def __init__(self, base: Path) -> None:
        self.model_config = SimpleNamespace(model=str(base))
        self.calls: list[tuple[str, str]] = []
        self.error: Exception | None = None

    async def collective_rpc(self, method: str, args: tuple[str]) -> list[Any]:
        self.calls.append((method, args[0]))
        if self.error is not None:
            raise self.error
        return [len(self.calls) % 3 == 0]

    async def add_lora(self, request: Any) -> None:
        if self.error is not None:
            raise self.error


def request(name: str, number: int, path: str) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("models"), seed=3, num_variants=2)


class Served:
    """A follower of a registry, vLLM's engine and its list of models."""

    def __init__(self, family: Family, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = Registry(directory)
        monkeypatch.setenv("PERAXIS_VLLM_REGISTRY", str(directory))
        monkeypatch.setattr(own, "FOLLOW_S", 0.01)
        self.engine = Engine(family.base)
        self.numbers = iter(range(2, 100))
        counter = SimpleNamespace(inc=lambda _: next(self.numbers))
        locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.models = SimpleNamespace(lora_requests={}, lora_resolver_lock=locks, lora_id_counter=counter)
        self.follower = Follower(request)

    async def ask(self, name: str) -> Any:
        found = await self.follower.request_of(name)
        if found is not None:
            self.models.lora_requests[name] = found
        return found

    async def comes_to(self, name: str, record: VersionRecord | None) -> None:
        """Wait until a name means a version; None if it means none."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            found = self.models.lora_requests.get(name)
            if (None if found is None else found.lora_path) == (None if record is None else path_of(record)):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{name} does not come to {record}")


@pytest.fixture
def served(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(family, tmp_path / "registry", monkeypatch)


def test_a_name_means_its_active_version_and_follows_it(served: Served, family: Family) -> None:
    async def main() -> None:
        served.follower.follow(served.models, served.engine)
        first = publish(served.registry, family.artifacts[0], "tuned")
        found, pinned = await served.ask("tuned"), await served.ask("tuned@1")
        assert (found.lora_path, pinned.lora_path) == (path_of(first), path_of(first))
        second = publish(served.registry, family.artifacts[1], "tuned")
        await served.comes_to("tuned", second)
        await served.comes_to("tuned@1", first)
        assert served.models.lora_requests["tuned"].lora_int_id != found.lora_int_id
        assert ("peraxis_begin_load", path_of(second)) in served.engine.calls
        served.registry.delete("default", "tuned")
        await served.comes_to("tuned", None)
        await served.comes_to("tuned@1", None)

    asyncio.run(main())


@pytest.mark.parametrize(
    "name", ["unknown", "tuned@2", "tuned@one", "tuned@", "../tuned", "tuned@-1", "tuned@²"]
)
def test_a_name_that_means_nothing_is_not_found(served: Served, family: Family, name: str) -> None:
    async def main() -> None:
        served.follower.follow(served.models, served.engine)
        publish(served.registry, family.artifacts[0], "tuned")
        assert await served.ask("tuned") is not None
        assert await served.ask(name) is None

    asyncio.run(main())


def test_a_version_that_cannot_be_loaded_leaves_the_one_before(served: Served, family: Family) -> None:
    async def main() -> None:
        served.follower.follow(served.models, served.engine)
        first = publish(served.registry, family.artifacts[0], "tuned")
        await served.ask("tuned")
        served.engine.error = RuntimeError("no slot")
        second = publish(served.registry, family.artifacts[1], "tuned")
        # Tried, and tried again.
        while served.engine.calls.count(("peraxis_begin_load", path_of(second))) < 2:
            await asyncio.sleep(0.01)
        await served.comes_to("tuned", first)

    asyncio.run(main())


def test_paths_of_vllm_s_own_dummies_name_no_version() -> None:
    for path in ("/not/a/real/path", "", "default/tuned@1", "default/tuned@one#abc", "a/b/c@1#abc"):
        assert label_of(path) is None
    assert label_of("default/tuned@1#abc") == "default/tuned@1"


def config(base: Path, **parallel: int) -> Any:
    ranks = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **parallel}
    return SimpleNamespace(
        additional_config=None,
        lora_config=SimpleNamespace(max_loras=3),
        parallel_config=SimpleNamespace(**ranks),
        model_config=SimpleNamespace(model=str(base)),
    )


def test_the_plugin_acts_only_with_a_registry_and_with_lora(
    served: Served, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = section_of(config(family.base))
    assert found is not None
    assert found["num_slots"] == 3
    assert found["slot_headroom"] == 1.15
    assert section_of(config(family.base, tensor_parallel_size=2)) == found
    without = config(family.base)
    without.lora_config = None
    assert section_of(without) is None
    monkeypatch.delenv("PERAXIS_VLLM_REGISTRY")
    assert section_of(config(family.base)) is None


@pytest.mark.usefixtures("served")
def test_stages_of_a_pipeline_are_refused(family: Family) -> None:
    with pytest.raises(NotServable, match=r"not divided among stages.*--tensor-parallel-size"):
        section_of(config(family.base, pipeline_parallel_size=2))


@pytest.mark.parametrize(
    ("has_lora", "asks_resolvers", "where", "named"),
    [
        (False, True, "", "--enable-lora --max-loras N"),
        (True, False, "", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (True, True, "mistyped", "mistyped, which is no directory"),
        (True, True, "file", "file, which is no directory"),
    ],
)
def test_a_server_that_would_know_no_variant_does_not_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_lora: bool,
    asks_resolvers: bool,
    where: str,
    named: str,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PERAXIS_VLLM_REGISTRY", str(tmp_path / where))
    with pytest.raises(NotServable, match=named):
        check_server(has_lora=has_lora, asks_resolvers=asks_resolvers)


@pytest.mark.parametrize("where", [None, "s3://bucket/prefix"])
def test_a_server_with_all_that_it_needs_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str | None
) -> None:
    monkeypatch.setenv("PERAXIS_VLLM_REGISTRY", where or str(tmp_path))
    check_server(has_lora=True, asks_resolvers=True)
