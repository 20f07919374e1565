"""Serves Peraxis' deltas as per-request variants of stock vLLM, through its `vllm.general_plugins` entry point.

A variant travels as a `LoRARequest`, so that vLLM's scheduler bounds the variants of a step, its prefix cache keeps
them apart and its graphs are captured with and without them. Of vLLM's own LoRA code only the requests are used: one
method of the model runner is replaced, which makes the object that a runner asks for adapters.

The plugin acts if the configuration has ``additional_config["peraxis"]``, which `peraxis serve` sets, or else if
`PERAXIS_VLLM_REGISTRY` names a registry and LoRA is on.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from deltastore.checkpoint import Checkpoint
from deltastore.errors import NotServable

# Versions whose touched code was read or run.
MIN_VERSION, BELOW_VERSION = "0.28", "0.34"
# What is used of vLLM's code and is no public interface: the module, the object in it, and its parameters or members.
TOUCHED: Sequence[tuple[str, str, tuple[str, ...]]] = (
    (
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin.load_lora_model",
        ("model", "vllm_config", "device"),
    ),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._get_prompt_logprobs_dict",
        ("hidden_states", "num_scheduled_tokens"),
    ),
    ("vllm.model_executor.layers.logits_processor", "LogitsProcessor.forward", ("lm_head", "hidden_states")),
    (
        "vllm.model_executor.model_loader.default_loader",
        "DefaultModelLoader.get_all_weights",
        ("model_config", "model"),
    ),
    ("vllm.lora.layers", "LoRAMapping", ("index_mapping", "prompt_mapping", "type")),
    ("vllm.lora.request", "LoRARequest", ("lora_name", "lora_int_id", "lora_path")),
    ("vllm.model_executor.layers.linear", "LinearBase", ()),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding", ()),
    ("vllm.model_executor.layers.layernorm", "RMSNorm.forward_native", ("x", "residual")),
    ("vllm.model_executor.layers.layernorm", "GemmaRMSNorm.forward_native", ("x", "residual")),
    # Of `peraxis serve`: masks, our sampler and the figures of a step.
    (
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        ("request_id", "lora_request", "resumable"),
    ),
    ("vllm.v1.engine.input_processor", "InputProcessor.assign_request_id", ("request",)),
    ("vllm.v1.engine.output_processor", "OutputProcessor.add_request", ("request", "prompt")),
    ("vllm.v1.sample.logits_processor", "AdapterLogitsProcessor.new_req_logits_processor", ("params",)),
    ("vllm.v1.metrics.loggers", "PrometheusStatLogger.record", ("scheduler_stats", "iteration_stats")),
    ("vllm.v1.executor.abstract", "Executor.register_failure_callback", ("callback",)),
    ("vllm.platforms.cpu", "CpuPlatform.check_and_update_config", ("vllm_config",)),
)
SECTION = "peraxis"  # of vLLM's `additional_config`
LOAD_FORMAT = "peraxis"  # of a base whose vocabulary has room for more tokens
REGISTRY = "PERAXIS_VLLM_REGISTRY"  # names a registry for vLLM's own server


def register() -> None:
    """Replace the model runner's adapter manager. vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    stock: Any = LoRAModelRunnerMixin.load_lora_model
    if getattr(stock, "is_peraxis", False):
        return

    def load_lora_model(self: Any, model: Any, vllm_config: Any, device: Any) -> Any:
        if (own := section_of(vllm_config)) is None:
            return stock(self, model, vllm_config, device)
        check_vllm()
        from peraxis_vllm.manager import DeltaManager
        from peraxis_vllm.probe import check
        from peraxis_vllm.registry import RegistryManager

        kind = RegistryManager if "registry" in own else DeltaManager
        self.lora_manager = kind(model, vllm_config, device, own)
        self.lora_manager.score_prompts(self)
        self.model = model
        check(self)
        self.lora_manager.begin()
        return model

    load_lora_model.is_peraxis = True  # type: ignore[attr-defined]
    LoRAModelRunnerMixin.load_lora_model = load_lora_model
    _compile_on_cpu()
    _register_loader()
    if os.environ.get(REGISTRY):
        from peraxis_vllm.registry import register_server

        register_server()


def section_of(vllm_config: Any) -> dict[str, Any] | None:
    """Return the settings that vLLM was given for this plugin; None if it is not to act."""
    own: dict[str, Any] | None = (vllm_config.additional_config or {}).get(SECTION)
    if own is None and os.environ.get(REGISTRY):
        from peraxis_vllm.registry import section_of_server

        return section_of_server(vllm_config)
    return own


def check_vllm() -> None:
    """Refuse a vLLM whose code may be another than this plugin was written for.

    Raises:
        NotServable: its version is out of range, or something that is used has moved.
    """
    import vllm

    version = Version(vllm.__version__.split("+")[0])
    if not Version(MIN_VERSION) <= version < Version(BELOW_VERSION):
        raise NotServable(
            f"vLLM {version}: deltas are served by versions from {MIN_VERSION} to below {BELOW_VERSION}: install one "
            "of them, or serve with --backend native"
        )
    moved = [f"{module}.{name}" for module, name, members in TOUCHED if not _is_there(module, name, members)]
    if moved:
        raise NotServable(
            f"vLLM {version} has no {', '.join(moved)} as deltas use it: install another version from {MIN_VERSION} to "
            f"below {BELOW_VERSION}, or serve with --backend native"
        )


def _is_there(module: str, name: str, members: tuple[str, ...]) -> bool:
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if inspect.isfunction(found) or inspect.ismethod(found) or not members:
            known = set(inspect.signature(found).parameters) if members else set()
        else:
            known = set(getattr(found, "__dataclass_fields__", getattr(found, "__struct_fields__", ())))
    except (ImportError, AttributeError, ValueError):
        return False
    return set(members) <= known


def _compile_on_cpu() -> None:
    """Let torch.compile on beside deltas. vLLM turns it off beside LoRA on the CPU; our operations are opaque to it."""
    from vllm.platforms.cpu import CpuPlatform

    stock: Any = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        hidden = None
        if section_of(vllm_config) is not None:
            hidden, vllm_config.lora_config = vllm_config.lora_config, None
        try:
            stock(cls, vllm_config)
        finally:
            if hidden is not None:
                vllm_config.lora_config = hidden

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _register_loader() -> None:
    """Let vLLM load a base into a configuration with more tokens than it has. Their rows are zero."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @register_model_loader(LOAD_FORMAT)
    class PaddedVocabulary(DefaultModelLoader):  # type: ignore[misc]
        def __init__(self, load_config: Any) -> None:
            super().__init__(replace(load_config, load_format="auto"))

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
            checkpoint, num_tokens = Checkpoint.open(Path(model_config.model)), model_config.get_vocab_size()
            head = checkpoint.head_name or ""
            padded = {checkpoint.embedding_name, head, head.removesuffix("weight") + "bias"}
            for name, tensor in super().get_all_weights(model_config, model):
                if name in padded:
                    rest = num_tokens - len(tensor), *tensor.shape[1:]
                    yield name, torch.cat([tensor, tensor.new_zeros(rest)])
                else:
                    yield name, tensor
