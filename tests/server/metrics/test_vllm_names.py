"""vLLM's metric names, labels and types, which routers of LoRA servers read, from the merged metrics of all processes.

Names and labels: `vllm/v1/metrics/loggers.py` of vLLM 0.32; for adapters in memory its
`tests/v1/metrics/test_loggers.py` at e9c88e8284dd2922926cb3cd4840f5650b3d0883. The scraper: llm-d-router's
`pkg/epp/framework/plugins/datalayer/extractor/metrics/`, `lora_load_state_test.go` at
3aab178f44ed42ddd79ea4cfb3bf4e1a29fd9bb4 and `extractor.go` at bf61266b621b69e6721d213dbc6030fa01b153c9.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from deltastore.registry import Registry
from server.metrics.aggregator import Aggregator
from server.metrics.metrics import EngineMetrics, FrontendMetrics
from tests.server.metrics.helpers.scrapes import scrape

COMMON = {"model_name": "base", "engine": "0"}


class Scraped:
    """A service of an engine and two HTTP processes, and its metrics by name."""

    def __init__(self, directory: Path) -> None:
        self.engine = EngineMetrics()
        self._registry = Registry(directory / "registry")
        self.frontends = [FrontendMetrics() for _ in range(2)]
        self.aggregator = Aggregator()
        for source in ("engine", 0, 1):
            self.aggregator.started(source)

    def families(self) -> dict[str, Metric]:
        self.aggregator.received("engine", self.engine.snapshot())
        for source, frontend in enumerate(self.frontends):
            self.aggregator.received(source, frontend.snapshot())
        text = scrape(self.aggregator, self._registry, is_ready=True).text.decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(sample.labels) for sample in self.families()[name].samples]

    def value(self, name: str) -> float:
        (sample,) = self.families()[name].samples
        assert sample.labels == COMMON
        return float(sample.value)


@pytest.fixture
def scraped(tmp_path: Path) -> Scraped:
    return Scraped(tmp_path)


def test_queues_and_the_kv_cache_have_vllms_names_and_labels(scraped: Scraped) -> None:
    scraped.engine.num_requests_waiting.set(3)
    scraped.engine.num_requests_running.set(2)
    scraped.engine.kv_cache_usage_ratio.set(0.25)
    assert scraped.value("vllm:num_requests_waiting") == 3
    assert scraped.value("vllm:num_requests_running") == 2
    assert scraped.value("vllm:kv_cache_usage_perc") == 0.25


def test_sizes_of_the_cache_are_whole_numbers_in_labels(scraped: Scraped) -> None:
    scraped.engine.vllm.show_sizes(num_slots=4, page_tokens=16, num_pages=100)
    (sample,) = scraped.families()["vllm:cache_config_info"].samples
    assert sample.labels == {"block_size": "16", "num_gpu_blocks": "100", "engine": "0"}
    assert sample.value == 1


def test_adapters_with_requests_stand_in_one_series_whose_value_is_a_time(scraped: Scraped) -> None:
    scraped.engine.vllm.show_sizes(num_slots=4, page_tokens=16, num_pages=100)
    scraped.engine.vllm.show_requests(["b", "a"], ["c"])
    scraped.engine.vllm.show_requests(["b"], [])
    (sample,) = scraped.families()["vllm:lora_requests_info"].samples
    assert sample.labels == {"max_lora": "4", "running_lora_adapters": "b", "waiting_lora_adapters": ""}
    assert time.time() - 60 < sample.value <= time.time()


def test_the_same_adapters_again_keep_their_series(scraped: Scraped) -> None:
    for _ in range(2):
        scraped.engine.vllm.show_requests(["a"], ["b"])
    assert len(scraped.labels("vllm:lora_requests_info")) == 1


def test_adapters_in_memory_have_a_series_each_until_they_are_evicted(scraped: Scraped) -> None:
    scraped.engine.vllm.show_adapters({"a": "device", "b": "host"}, {"a"})
    scraped.engine.vllm.show_adapters({"a": "device", "c": "device"}, ())
    assert sorted(scraped.labels("vllm:lora_adapter_loaded"), key=str) == [
        {**COMMON, "adapter_name": name, "level": "gpu", "pinned": "false", "rank": "0"} for name in "ac"
    ]


def test_an_adapter_in_host_memory_is_on_the_cpu_and_a_pinned_one_says_so(scraped: Scraped) -> None:
    scraped.engine.vllm.show_adapters({"a": "device", "b": "host"}, {"a"})
    shown = {
        (labels["adapter_name"], labels["level"], labels["pinned"])
        for labels in scraped.labels("vllm:lora_adapter_loaded")
    }
    assert shown == {("a", "gpu", "true"), ("b", "cpu", "false")}


def test_counts_of_adapters_are_there_before_the_first_load(scraped: Scraped) -> None:
    assert scraped.value("vllm:num_gpu_loaded_lora_adapters") == 0
    assert scraped.value("vllm:num_cpu_loaded_lora_adapters") == 0
    scraped.engine.slots.set(8)
    scraped.engine.variants_resident.labels(level="device").set(2)
    scraped.engine.variants_resident.labels(level="host").set(3)
    assert scraped.value("vllm:num_gpu_loaded_lora_adapters") == 2
    assert scraped.value("vllm:num_cpu_loaded_lora_adapters") == 3
    assert scraped.value("vllm:max_gpu_lora_adapters") == 8


def test_load_times_are_split_into_vllms_transitions(scraped: Scraped) -> None:
    """llm-d adds the means of both for an adapter on disk, and takes that of `activate` for one in host memory."""
    seconds = scraped.engine.variant_load_seconds
    for stage, value in (("read", 2.0), ("copy", 0.5), ("total", 2.5)):
        seconds.labels(source="disk", stage=stage).observe(value)
    seconds.labels(source="host", stage="copy").observe(1.5)
    samples = scraped.families()["vllm:lora_adapter_load_seconds"].samples
    found = {
        (sample.labels["transition"], sample.name.rpartition("_")[2]): sample.value
        for sample in samples
        if sample.name.endswith(("_sum", "_count"))
    }
    assert found == {
        ("load", "sum"): 2, ("load", "count"): 1, ("activate", "sum"): 2, ("activate", "count"): 2,
    }  # fmt: skip


def test_an_engine_that_has_died_leaves_no_adapter_behind(scraped: Scraped) -> None:
    scraped.engine.vllm.show_sizes(num_slots=4, page_tokens=16, num_pages=100)
    scraped.engine.vllm.show_adapters({"a": "device"}, ())
    scraped.engine.vllm.show_requests(["a"], [])
    assert scraped.labels("vllm:lora_adapter_loaded")
    scraped.aggregator.ended("engine")
    for name in ("lora_adapter_loaded", "lora_requests_info", "cache_config_info"):
        assert scraped.labels(f"vllm:{name}") == []
    assert scraped.value("vllm:num_gpu_loaded_lora_adapters") == 0


def test_requests_tokens_and_times_have_vllms_names(scraped: Scraped) -> None:
    for number, (reason, vllms) in enumerate(
        (("stop", "stop"), ("length", "length"), ("cancelled", "abort"), ("error", "error")), 1
    ):
        for count in range(number):
            # By each of two processes: one counts those that it lost.
            process = scraped.engine if count else scraped.frontends[0]
            process.finished("acme", f"variant-{count}", reason, 0.5)
        (sample,) = [
            sample
            for sample in scraped.families()["vllm:request_success"].samples
            if sample.labels.get("finished_reason") == vllms and sample.name.endswith("_total")
        ]
        assert (sample.value, sample.labels) == (number, {**COMMON, "finished_reason": vllms})
    # A variant that is deleted takes none of them away.
    scraped.engine.forget_variants(["acme/variant-1"])
    total = sum(
        s.value for s in scraped.families()["vllm:request_success"].samples if s.name.endswith("_total")
    )
    assert total == 10
    scraped.engine.prompt_tokens_total.inc(7)
    scraped.engine.time_to_first_token_seconds.observe(0.25)
    families = scraped.families()
    assert families["vllm:prompt_tokens"].samples[0].value == 7
    counts = {
        name: next(s.value for s in families[name].samples if s.name.endswith("_count"))
        for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds")
    }
    assert counts == {"vllm:time_to_first_token_seconds": 1, "vllm:e2e_request_latency_seconds": 10}
