"""vLLM in two processes on the CPU: requests get the tokens of one, through loads and evictions, faults and deaths."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from deltastore.errors import VariantQuarantined
from deltastore.registry.records import VersionRecord
from server.protocol.messages import DoneEvent, ErrorEvent
from tests.helpers.tiny_models import Change, make_pair
from tests.server.helpers import live_server as live
from tests.server.helpers.live_server import LiveServer, eventually, live_server
from tests.server.helpers.served import Served, make_delta, serving
from tests.server.supervisor.test_faults import ENGINE, all_gone, is_ready, processes
from tests.vllm.helpers.environment import NEEDS_VLLM, PYTHON, SIZES
from tests.vllm.test_exact import (
    MAX_ADDED,
    MergedFamily,
    check_mixed_requests,
    check_scored_prompts,
    make_family,
)
from tests.vllm.test_resume import PATIENCE_S, asked

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(1500)]
NUM_ASKED = 12
# One head of keys and values for two ranks, and a layer whose inputs divide within a byte of signs (46 of 92).
FAMILIES: dict[str, dict[str, Any]] = {"llama": {"num_key_value_heads": 1}, "starcoder2": {}}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MergedFamily:
    return make_family(tmp_path_factory.mktemp("family"), request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def served(family: MergedFamily, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two ranks with fewer slots than variants, so that deltas are loaded and evicted while requests run."""
    with serving(
        family.base,
        tmp_path_factory.mktemp("registry"),
        "process",
        backend="vllm",
        engine_python=PYTHON,
        tensor_parallel_size=2,
        max_added_tokens=MAX_ADDED,
        max_gpu_deltas=3,
        slot_headroom=8.0,
        max_queue=400,
        max_batch_tokens=128,
        max_model_len=200,
        kv_cache_gb=0.2,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def records(family: MergedFamily, served: Served) -> list[VersionRecord | None]:
    return [None, *(served.publish(path, f"v{number}") for number, path in enumerate(family.artifacts))]


def test_mixed_requests_equal_generate_on_merged_weights(
    family: MergedFamily, served: Served, records: list[VersionRecord | None]
) -> None:
    check_mixed_requests(family, served, records)


def test_prompts_are_scored_with_their_own_deltas(
    family: MergedFamily, served: Served, records: list[VersionRecord | None]
) -> None:
    check_scored_prompts(family, served, records)


def test_a_load_that_fails_leaves_its_slot_to_others(
    family: MergedFamily, served: Served, records: list[VersionRecord | None], tmp_path: Path
) -> None:
    finetune = family.base.with_name("finetune-0")
    artifact = make_delta(family.base, finetune, tmp_path / "damaged.safetensors", embeddings="whole")
    damaged = served.publish(artifact, "damaged")
    path = served.registry.object_path(damaged)
    content = bytearray(path.read_bytes())
    content[damaged.data_start + 5] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    # More often than there are slots.
    for _ in range(5):
        end = served.ask(damaged, [5, 6, 7], max_new_tokens=3).end
        assert isinstance(end, ErrorEvent)
        assert isinstance(end.error, VariantQuarantined)
    assert isinstance(served.ask(records[1], [5, 6, 7], max_new_tokens=3).end, DoneEvent)


def workers(server: LiveServer) -> list[psutil.Process]:
    """Return the processes of the engine's ranks."""
    found = []
    for engine in processes(server, ENGINE):
        # Some may have ended just now.
        with suppress(psutil.NoSuchProcess):
            found += [child for child in engine.children() if is_rank(child)]
    return found


def is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "resource_tracker" not in " ".join(process.cmdline())
    return False


def test_requests_go_on_when_the_process_of_a_rank_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WAIT_S", "START_S"):
        monkeypatch.setattr(live, name, PATIENCE_S)
    pair = make_pair("qwen2", tmp_path, seed=0, changes=(Change(noise=0.5),), **SIZES)
    artifact = make_delta(pair.base, pair.finetunes[0], tmp_path / "delta.safetensors")
    options = ("--backend", "vllm", "--engine-python", PYTHON, "--dtype", "float32", "--max-gpu-deltas", 2)
    ranks = ("--tensor-parallel-size", 2, "--slot-headroom", 8, "--kv-cache-gb", 0.2)
    with (
        live_server(
            pair.base, tmp_path / "registry", *options, *ranks, "--resume-timeout", PATIENCE_S
        ) as server,
        ThreadPoolExecutor(NUM_ASKED) as pool,
    ):
        assert server.upload("tuned", artifact).status_code == 201
        want = [asked(server, number) for number in range(NUM_ASKED)]
        got = [pool.submit(asked, server, number) for number in range(NUM_ASKED)]
        assert eventually(lambda: server.metric("num_requests_running") > 0)
        before = workers(server)
        assert len(before) == 2
        before[1].kill()
        assert [answer.result() for answer in got] == want
        # And when nothing runs, without a request that finds it.
        before = workers(server)
        before[0].kill()
        assert eventually(lambda: all_gone(before))
        assert eventually(lambda: len(workers(server)) == 2 and is_ready(server))
        assert asked(server, 1) == want[1]
        last = workers(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        assert all_gone(last)
