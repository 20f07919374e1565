"""Routers' readings of a running server's metrics, restated from their code.

llm-d's endpoint picker: `extractor.go`, `spec.go`, `loraspec.go` and `factories.go` of
`pkg/epp/framework/plugins/datalayer/extractor/metrics/`, and
`pkg/epp/framework/plugins/scheduling/scorer/loraaffinity/lora_affinity.go`, in llm-d/llm-d-inference-scheduler at
520af47896e5f06e43d09aca281a1149187b0ffd. production-stack's router: `src/vllm_router/stats/engine_stats.py` and
`service_discovery.py` in vllm-project/production-stack at a6c01db05f65f556235413ba8dbcfb0c01132fff.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.server.api.conftest import LoraServer
from tests.server.helpers.live_server import eventually

# What production-stack's router copies out of an engine's metrics; it ignores labels, and the last sample counts.
COPIED = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total",
)  # fmt: skip
# Beside the same streams, before others are opened.
NUM_SCRAPES = 40


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server as llm-d's scorers see it."""

    num_waiting: int
    num_running: int
    kv_usage: float
    running: frozenset[str]
    waiting: frozenset[str]
    max_adapters: int
    block_size: int
    num_blocks: int

    def lora_score(self, model: str) -> float:
        """Return the score of a request's model by the rules of the plugin `lora-affinity-scorer`."""
        if model in self.running:
            return 1.0
        if len(self.running) + len(self.waiting) < self.max_adapters:
            return 0.8
        return 0.6 if model in self.waiting else 0.0


def samples_of(text: str) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def adapters(listed: str) -> frozenset[str]:
    return frozenset(name.strip() for name in listed.split(",") if name.strip())


def endpoint_of(text: str) -> Endpoint:
    """Read an endpoint; llm-d takes a family's first sample, and of the adapters the one with the highest value."""
    samples = samples_of(text)
    waiting, running, kv_usage, sizes = (
        samples[f"vllm:{name}"][0]
        for name in (
            "num_requests_waiting",
            "num_requests_running",
            "kv_cache_usage_perc",
            "cache_config_info",
        )
    )
    latest = max(samples["vllm:lora_requests_info"], key=lambda sample: sample.value).labels
    return Endpoint(
        int(waiting.value),
        int(running.value),
        kv_usage.value,
        adapters(latest["running_lora_adapters"]),
        adapters(latest["waiting_lora_adapters"]),
        int(latest["max_lora"]),
        int(sizes.labels["block_size"]),
        int(sizes.labels["num_gpu_blocks"]),
    )


def scraped(lora: LoraServer) -> str:
    return lora.server.client.get("/metrics").text


def text_with(lora: LoraServer, *names: str) -> str:
    """Return the metrics while a request for each of these variants runs, and no other."""

    def scraped_beside_streams() -> str | None:
        with ExitStack() as streams:
            for name in names:
                streams.enter_context(lora.server.streaming(name, max_new_tokens=2000))
            # A stream begins before its request's first step, and may end before the metrics are read.
            for _ in range(NUM_SCRAPES):
                text = scraped(lora)
                found = endpoint_of(text)
                if found.running == set(names) and not found.waiting and found.num_running == len(names):
                    return text
        return None

    text = eventually(scraped_beside_streams)
    assert text is not None
    return text


def test_llm_d_prefers_the_server_that_runs_the_variant_and_then_one_with_a_free_slot(
    lora: LoraServer,
) -> None:
    names = ["plain", "third", "chatty"]
    for name in names:
        lora.server.upload(f"routed-{name}", lora.directory / f"{name}.safetensors")
    idle = endpoint_of(text_with(lora))
    assert (idle.num_waiting, idle.max_adapters) == (0, 2)
    assert [idle.lora_score(f"routed-{name}") for name in names] == [0.8] * 3
    one = endpoint_of(text_with(lora, "routed-plain"))
    assert 0 < one.kv_usage <= 1
    assert [one.lora_score(f"routed-{name}") for name in names] == [1.0, 0.8, 0.8]
    full = endpoint_of(text_with(lora, "routed-plain", "routed-third"))
    assert [full.lora_score(f"routed-{name}") for name in names] == [1.0, 1.0, 0.0]


def test_llm_d_learns_the_size_of_the_kv_cache(lora: LoraServer) -> None:
    endpoint = endpoint_of(scraped(lora))
    assert endpoint.block_size == 16
    assert endpoint.num_blocks > 0


def test_production_stack_finds_each_of_its_metrics_once_and_with_the_servers_value(lora: LoraServer) -> None:
    lora.server.upload("copied", lora.directory / "plain.safetensors")
    # The second request finds the first one's pages.
    for _ in range(2):
        lora.server.token_ids("copied", prompt="hello " * 40, max_new_tokens=1)
    samples = samples_of(text_with(lora, "copied"))
    running, waiting, kv_usage, hits, queries = (only(samples, name) for name in COPIED)
    assert (running, waiting) == (1, 0)
    assert 0 < kv_usage <= 1
    assert 0 < hits < queries
    assert (hits, queries) == (
        only(samples, "peraxis_prefix_cache_hits_total"),
        only(samples, "peraxis_prefix_cache_queries_total"),
    )


def only(samples: dict[str, list[Sample]], name: str) -> float:
    (sample,) = samples[name]
    return float(sample.value)


def test_production_stack_takes_cards_with_a_parent_for_adapters(lora: LoraServer) -> None:
    lora.load("carded", "plain.safetensors")
    cards = {card["id"]: card for card in lora.server.client.get("/v1/models").json()["data"]}
    assert (cards["base"]["parent"], cards["carded"]["parent"]) == (None, "base")
    lora.unload("carded")
