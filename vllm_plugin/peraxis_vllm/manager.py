"""The adapter manager that vLLM's model runners drive: tables of deltas, their slots, and the slots of a step's rows.

The runner calls `set_active_adapters` before each step with the step's LoRARequests and its LoRAMapping: a LoRA id per
token and per row of logits. The id of a variant is its slot's number plus one. Loads, evictions and everything that can
be refused happen before vLLM gets a request, so nothing of it can fail inside a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deltastore.checkpoint import Checkpoint
from deltastore.errors import ArtifactError
from deltastore.format.header import Header
from deltastore.format.manifest import Manifest
from peraxis_vllm.points import POINTS, NormPoint, Point, add_point, is_norm, wrap
from server.deltas.resident import DeltaLayout, DeltaTables, Part, Rows, arena
from server.kernels import prepare

log = logging.getLogger("vllm.peraxis")
# Rows of a step beyond its tokens, which captured graphs are padded with.
PADDING_ROWS = 512


class DeltaManager:
    """Tells the model's points which rows deltas apply to.

    Args:
        own: the section of vLLM's configuration: `slot_bytes` and `num_slots`.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, device: torch.device, own: dict[str, Any]) -> None:
        self.model, self.device = model, device
        self.checkpoint = Checkpoint.open(Path(vllm_config.model_config.model))
        self.tables = _CheckedTables(self)
        self.dtype = vllm_config.model_config.dtype
        scheduler = vllm_config.scheduler_config
        max_rows = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs) + PADDING_ROWS
        num_slots = int(own["num_slots"])
        self.tokens, self.logits = (Rows(max_rows, num_slots, device) for _ in range(2))
        self.norms: list[NormPoint] = []
        self.points: list[Point] = []
        # The first call of this step whose rows could not be assigned to sequences.
        self.fault: str | None = None
        self._stored = _stored_names(model, self.checkpoint)
        self._attach(vllm_config.model_config.hf_config.get_text_config().tie_word_embeddings)
        self.tables.allocate(num_slots, device)
        for norm in self.norms:
            norm.attach(self)
        shapes = {name: shape for name, shape in self.checkpoint.shapes().items() if len(shape) == 2}
        prepare(device, set(shapes.values()), vllm_config.model_config.dtype)
        # Before vLLM measures the memory that is left for its KV cache.
        self.slots = arena(num_slots, int(own["slot_bytes"]), device)
        log.info("deltas: %d layers, %d norms, %d slots", len(self.points), len(self.norms), num_slots)

    def rows(self, name: str, num_rows: int, is_head: bool) -> Rows | None:
        """Return the rows that a layer with `num_rows` rows of inputs computes; None if they fit no rows of the step.

        A captured graph has more rows than its step, so on CUDA there may be more.
        """
        for rows in (self.logits, self.tokens) if is_head else (self.tokens, self.logits):
            if rows.num_rows == num_rows or (self.device.type == "cuda" and rows.num_rows <= num_rows):
                return rows
        self.fault = self.fault or (
            f"{name} has {num_rows} rows of a step of {self.tokens.num_rows} tokens and {self.logits.num_rows} rows of "
            "logits: this model cannot serve variants"
        )
        return None

    def take_fault(self) -> str | None:
        """Return why the last step's tokens of variants are wrong, once; None if they are right."""
        fault, self.fault = self.fault, None
        return fault

    def stored(self, name: str) -> str:
        """Return a tensor's name in the checkpoint by its name in vLLM."""
        return self._stored.get(name, name)

    def check_names(self, manifest: Manifest) -> None:
        """Refuse an artifact that changes a tensor which no step would read.

        Raises:
            ArtifactError: names the tensor.
        """
        called = [part for part, point in self._parts() if point.is_called]
        vectors = [part.bias for part in called if part.bias is not None]
        vectors += [number for norm in self.norms if norm.is_called for number in norm.vectors.values()]
        known = {part.source(manifest) for part in called} | {
            self.tables.vectors[number].name for number in vectors
        }
        if unknown := sorted(manifest.tensors.keys() - known):
            raise ArtifactError(
                f"vLLM reads {unknown[0]!r} (and {len(unknown) - 1} more) of this model where no delta can act: serve "
                "it with --backend native"
            )

    def _parts(self) -> Iterator[tuple[Part, Point]]:
        for point in self.points:
            for part in self.tables.parts[point.first : point.first + len(point.ends)]:
                yield part, point

    # What vLLM's runner calls.

    def set_active_adapters(self, requests: Iterable[Any], mapping: Any) -> None:
        """Take the slots of a step's rows."""
        if getattr(mapping.type, "name", "LANGUAGE") != "LANGUAGE":
            # Towers see no deltas.
            return
        self.tokens.set(np.asarray(mapping.index_mapping, dtype=np.int64) - 1)
        self.logits.set(np.asarray(mapping.prompt_mapping, dtype=np.int64) - 1)

    def add_adapter(self, request: Any) -> bool:
        return False

    def remove_adapter(self, adapter: int) -> bool:
        return False

    def pin_adapter(self, adapter: int) -> bool:
        return False

    def list_adapters(self) -> set[int]:
        return set()

    def remove_all_adapters(self) -> None:
        """Forget vLLM's dummies, which have no deltas."""

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        yield

    def add_dummy_lora(self, request: Any, rank: int) -> bool:
        return True

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        return default_rank

    def supports_tower_connector_lora(self) -> bool:
        return False

    # The model.

    def _attach(self, tied: bool) -> None:
        """Make a point of every layer with weights."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        POINTS.clear()
        modules = dict(self.model.named_modules())
        has_head = any(isinstance(module, ParallelLMHead) for module in modules.values())
        for name, module in modules.items():
            if isinstance(module, VocabParallelEmbedding):
                is_head = isinstance(module, ParallelLMHead)
                embedding = -1 if is_head else self._add_embedding(name, module)
                head = self._add_head(name, module) if is_head or (tied and not has_head) else -1
                wrap(module, head, embedding)
            elif isinstance(module, LinearBase):
                wrap(module, self._add_linear(name, module))
            elif is_norm(module):
                self.norms.append(NormPoint(self, module, name))

    def _add_embedding(self, name: str, module: Any) -> int:
        part = Part(self.stored(f"{name}.weight"), _num_tokens(module))
        return self._add(name, [part], [_num_tokens(module)], is_embedding=True)

    def _add_head(self, name: str, module: Any) -> int:
        own = self.checkpoint.head_name or "lm_head.weight"
        embedding = self.checkpoint.embedding_name or ""
        part = Part(own, _num_tokens(module), embedding=embedding)
        return self._add(name, [part], [_num_tokens(module)], is_head=True)

    def _add_linear(self, name: str, module: Any) -> int:
        packed = getattr(self.model, "packed_modules_mapping", None) or {}
        prefix, _, last = name.rpartition(".")
        names = [f"{prefix}.{own}" if prefix else own for own in packed.get(last, [last])]
        sizes = list(getattr(module, "output_sizes", [module.output_size]))
        if len(names) == 1:
            sizes = [sum(sizes)]
        ends = np.cumsum(sizes).tolist()
        bias = getattr(module, "bias", None)
        parts = []
        for own, size, end in zip(names, sizes, ends, strict=True):
            number = None
            if bias is not None:
                value = bias.detach()[end - size : end].float()
                number = self.tables.add_vector(self.stored(f"{own}.bias"), value)
            parts.append(Part(self.stored(f"{own}.weight"), size, bias=number))
        return self._add(name, parts, ends)

    def _add(self, name: str, parts: Sequence[Part], ends: Sequence[int], **kind: bool) -> int:
        first, *_ = (self.tables.add_part(part) for part in parts)
        self.points.append(Point(self, name, first, ends, **kind))
        return add_point(self.points[-1])


class _CheckedTables(DeltaTables):
    """Tables that refuse artifacts which change what no step would read."""

    def __init__(self, manager: DeltaManager) -> None:
        super().__init__()
        self._manager = manager

    def layout(self, header: Header, manifest: Manifest, digest: str) -> DeltaLayout:
        self._manager.check_names(manifest)
        return super().layout(header, manifest, digest)


def _num_tokens(module: Any) -> int:
    """Return the rows of a vocabulary that this rank has, without padding."""
    shard = module.shard_indices
    return int(shard.org_vocab_end_index - shard.org_vocab_start_index)


def _stored_names(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """Return the checkpoint's name of each tensor by vLLM's."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {}
    rename = getattr(mapper, "map_name", None) or mapper._map_name
    names = ((rename(name), name) for name in checkpoint.tensors)
    return {mapped: name for mapped, name in names if mapped is not None}
