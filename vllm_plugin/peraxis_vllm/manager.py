"""The adapter manager that vLLM's model runners drive: tables of deltas, their slots, and the slots of a step's rows.

The runner calls `set_active_adapters` before each step with the step's LoRARequests and its LoRAMapping: a LoRA id per
token and per row of logits. The id of a variant is its slot's number plus one. Loads, evictions and everything that can
be refused happen before vLLM gets a request, so nothing of it can fail inside a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deltastore.checkpoint import Checkpoint
from deltastore.errors import NotServable
from deltastore.format.manifest import Manifest
from deltastore.wrappers import check_text_alone
from peraxis_vllm.points import POINTS, NormPoint, Point, add_point, kind_of_norm, wrap
from server.deltas.resident import DeltaTables, Part, ReadTensors, Rows, arena, size_of_slot
from server.deltas.sharding import WHOLE, Cut, RankShare
from server.kernels import prepare

log = logging.getLogger("vllm.peraxis")
# Rows of a step beyond its tokens, which captured graphs are padded with.
PADDING_ROWS = 512


class DeltaManager:
    """Tells the model's points which rows deltas apply to.

    Args:
        own: the section of vLLM's configuration: `slot_headroom` and `num_slots`.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, device: torch.device, own: dict[str, Any]) -> None:
        self.model, self.device = model, device
        self.checkpoint = Checkpoint.open(Path(vllm_config.model_config.model))
        check_text_alone(self.checkpoint.stored_config)
        self.tables = _CheckedTables(self)
        self.dtype = vllm_config.model_config.dtype
        scheduler = vllm_config.scheduler_config
        max_rows = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs) + PADDING_ROWS
        num_slots = int(own["num_slots"])
        self.tokens, self.logits = (Rows(max_rows, num_slots, device) for _ in range(2))
        self.norms: list[NormPoint] = []
        self.points: list[Point] = []
        self.num_ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        # What this rank has of each part's tensor, and of vectors, by number, that it has not whole.
        self.cuts: list[Cut] = []
        self._vector_cuts: dict[int, Cut] = {}
        # Vectors that another rank adds.
        self._elsewhere: set[str] = set()
        # The first call of this step whose rows could not be assigned to sequences.
        self.fault: str | None = None
        self._scored: int | None = None  # slot of the prompt whose logits are computed
        # Rows of the vocabulary that vLLM has beyond the base's, for tokens that variants add.
        self.num_base_tokens = self.checkpoint.shapes()[self.checkpoint.embedding_name or ""][0]
        self._added_positions = torch.arange(
            vllm_config.model_config.get_vocab_size() - self.num_base_tokens, device=device
        )
        # vLLM runs models of transformers with a batch of one.
        kinds = (kind.__module__ for kind in type(model).__mro__)
        self.rows_dim = int(any(".models.transformers" in kind for kind in kinds))
        self._stored = _stored_names(model, self.checkpoint)
        self._packed = _packed_names(model)
        self._attach(self.checkpoint.tied)
        self._hide_tokens_that_others_added()
        self.tables.allocate(num_slots, device)
        for norm in self.norms:
            norm.attach(self)
        shapes = self._shapes()
        prepare(device, {shape for shape in shapes.values() if len(shape) == 2}, self.dtype)
        self.slot_bytes = size_of_slot(shapes, float(own["slot_headroom"]))
        # Before vLLM measures the memory that is left for its KV cache.
        self.slots = arena(num_slots, self.slot_bytes, device)
        log.info("deltas: %d layers, %d norms, %d slots", len(self.points), len(self.norms), num_slots)

    def rows(self, name: str, num_rows: int, is_head: bool) -> Rows | None:
        """Return the rows that a layer with `num_rows` rows of inputs computes; None if they fit no rows of the step.

        A captured graph has more rows than its step, so on CUDA there may be more.
        """
        if is_head and self._scored is not None:
            self.logits.set(np.full(num_rows, self._scored))
            return self.logits
        for rows in (self.logits, self.tokens) if is_head else (self.tokens, self.logits):
            if rows.num_rows == num_rows or (self.device.type == "cuda" and rows.num_rows <= num_rows):
                return rows
        self.fault = self.fault or (
            f"{name} has {num_rows} rows of a step of {self.tokens.num_rows} tokens and {self.logits.num_rows} rows of "
            "logits: this model cannot serve variants"
        )
        return None

    def check_alive(self) -> None:
        """Return, because this rank's process is the caller's own."""

    def take_fault(self) -> str | None:
        """Return why the last step's tokens of variants are wrong, once; None if they are right."""
        fault, self.fault = self.fault, None
        return fault

    def begin(self) -> None:
        """Begin to take deltas; the start-up probe has noted which layers a step calls."""

    def slot_of(self, request: Any) -> int:
        """Return the slot of a LoRARequest's delta; -1 for None, the base."""
        return -1 if request is None else int(request.lora_int_id) - 1

    def score_prompts(self, runner: Any) -> None:
        """Have a runner compute the log-probabilities of each prompt with its own delta.

        It computes them request by request behind the step, and does not say whose they are: it is given one at a time.
        """
        stock = runner._get_prompt_logprobs_dict

        def scored(*args: Any) -> dict[str, Any]:
            asked, found = runner.num_prompt_logprobs, dict[str, Any]()
            for request_id, number in list(asked.items()):
                runner.num_prompt_logprobs = {request_id: number}
                self._scored = self.slot_of(runner.requests[request_id].lora_request)
                try:
                    found |= stock(*args)
                finally:
                    self._scored = None
                if not runner.num_prompt_logprobs:
                    del asked[request_id]
            runner.num_prompt_logprobs = asked
            return found

        runner._get_prompt_logprobs_dict = scored

    def stored(self, name: str) -> str:
        """Return a tensor's name in the checkpoint by its name in vLLM."""
        return self._stored.get(name, name)

    def check(self, manifest: Manifest) -> None:
        """Refuse an artifact that changes a tensor which no step would read, or has more tokens than there is room for.

        Raises:
            ArtifactError: names the tensor.
        """
        self._read().check(manifest)

    def share(self) -> RankShare:
        """Return what this rank reads of a delta. The start-up probe has noted which layers a step calls."""
        vectors = [
            (vector.name, self._vector_cuts.get(number, WHOLE))
            for number, vector in enumerate(self.tables.vectors)
        ]
        return RankShare(
            tuple(self.tables.parts),
            tuple(self.cuts),
            tuple(vectors),
            self._read(),
            self.num_base_tokens,
            self.slot_bytes,
        )

    def _read(self) -> ReadTensors:
        """Return the tensors that a step reads."""
        parts = [part for part, point in self._parts() if point.is_called]
        numbers = [part.bias for part in parts if part.bias is not None]
        numbers += [number for norm in self.norms if norm.is_called for number in norm.vectors.values()]
        names = {self.tables.vectors[number].name for number in numbers}
        vocabulary = [part for part, point in self._parts() if point.is_head or point.is_embedding]
        num_tokens = self.num_base_tokens + len(self._added_positions)
        return ReadTensors(tuple(parts), frozenset(names | self._elsewhere), tuple(vocabulary), num_tokens)

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
            elif kind_of_norm(module) is not None:
                self.norms.append(NormPoint(self, module, name))

    def _add_embedding(self, name: str, module: Any) -> int:
        return self._add_vocabulary(name, module, self.stored(f"{name}.weight"), None)

    def _add_head(self, name: str, module: Any) -> int:
        own = self.checkpoint.head_name or "lm_head.weight"
        return self._add_vocabulary(name, module, own, self.checkpoint.embedding_name or "", is_head=True)

    def _add_vocabulary(
        self,
        name: str,
        module: Any,
        stored: str,
        embedding: str | None,
        *,
        is_head: bool = False,
    ) -> int:
        """Make a point of the base's tokens and of those that variants add, as far as this rank has them."""
        shard = module.shard_indices
        begin, end = int(shard.org_vocab_start_index), int(shard.org_vocab_end_index)
        num_tokens = max(0, end - begin)
        num_base = max(0, min(end, self.num_base_tokens) - begin)
        bias, number = getattr(module, "bias", None), None
        if is_head and bias is not None:
            number = self.tables.add_vector(
                f"{stored.removesuffix('.weight')}.bias", bias.detach()[:num_base].float()
            )
            self._vector_cuts[number] = Cut(((begin, begin + num_base),))
        parts = [Part(stored, num_base, bias=number, embedding=embedding)]
        if num_tokens > num_base:
            parts.append(Part(stored, num_base, is_beyond=True, embedding=embedding))
        ends = [num_base, num_tokens][: len(parts)]
        cuts = [Cut(((begin, end),))] * len(parts)
        return self._add(name, parts, cuts, ends, is_head=is_head, is_embedding=not is_head)

    def _hide_tokens_that_others_added(self) -> None:
        """Set the logits of tokens that a row's variant lacks to minus infinity, behind whatever is done to logits.

        Raises:
            NotServable: the model computes its logits in a way of its own.
        """
        if not len(self._added_positions):
            return
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        processors = [module for module in self.model.modules() if isinstance(module, LogitsProcessor)]
        if not processors:
            raise NotServable(
                f"{type(self.model).__name__} computes its logits where no delta can add tokens: serve with "
                "--max-added-tokens 0"
            )

        def hide(_module: nn.Module, _args: Any, logits: Tensor | None) -> None:
            # Ranks without logits have none to hide.
            if logits is not None:
                rows = self.rows("the output head", len(logits), True)
                # Rows that are not assigned to sequences get the base's tokens alone.
                slots = 0 if rows is None else rows.slot_of_row[: len(logits), None]
                foreign = self._added_positions >= self.tables.num_added[slots]
                logits[:, self.num_base_tokens :].masked_fill_(foreign, -torch.inf)

        for module in processors:
            module.register_forward_hook(hide)

    def _add_linear(self, name: str, module: Any) -> int:
        prefix, _, last = name.rpartition(".")
        names = [f"{prefix}.{own}" if prefix else own for own in self._packed.get(last, [last])]
        cuts, sizes = linear_cuts(name, module, len(names))
        ends = np.cumsum(sizes).tolist()
        bias = getattr(module, "bias", None)
        parts = []
        for own, cut, size, end in zip(names, cuts, sizes, ends, strict=True):
            number, bias_name = None, self.stored(f"{own}.bias")
            if bias is not None and cut.columns is not None and module.tp_rank > 0:
                # The first rank alone adds the bias to a sum over ranks.
                self._elsewhere.add(bias_name)
            elif bias is not None:
                value = bias.detach()[end - size : end].float()
                number = self.tables.add_vector(bias_name, value)
                self._vector_cuts[number] = Cut(cut.rows)
            parts.append(Part(self.stored(f"{own}.weight"), size, bias=number))
        return self._add(name, parts, cuts, ends)

    def _add(
        self, name: str, parts: Sequence[Part], cuts: Sequence[Cut], ends: Sequence[int], **kind: bool
    ) -> int:
        first, *_ = (self.tables.add_part(part) for part in parts)
        self.cuts += cuts
        self.points.append(Point(self, name, first, ends, **kind))
        return add_point(self.points[-1])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of this rank's shares of the checkpoint's tensors.

        Raises:
            NotServable: a norm is divided between ranks.
        """
        shapes = self.checkpoint.shapes()
        for norm in self.norms:
            for number in norm.vectors.values():
                vector = self.tables.vectors[number]
                if shapes.get(vector.name, vector.table.shape[1:]) != vector.table.shape[1:]:
                    raise NotServable(
                        f"{norm.name} is divided between ranks, and deltas of norms are not: serve with "
                        "--tensor-parallel-size 1"
                    )
        cuts = {part.name: cut for part, cut in zip(self.tables.parts, self.cuts, strict=True)}
        cuts |= {self.tables.vectors[number].name: cut for number, cut in self._vector_cuts.items()}
        return {name: cuts.get(name, WHOLE).shape(shape) for name, shape in shapes.items()}


def linear_cuts(name: str, module: Any, num_parts: int) -> tuple[list[Cut], list[int]]:
    """Return what this rank has of the tensors that a linear layer is made of, and the sizes of their outputs.

    Raises:
        NotServable: it is not known how ranks divide the layer.
    """
    rank, num_ranks = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    in_features = getattr(module, "input_size_per_partition", module.input_size)
    sizes = getattr(module, "output_partition_sizes", None) or getattr(
        module, "output_sizes", [module.output_size]
    )
    if num_ranks == 1 or (in_features == module.input_size and sum(sizes) == module.output_size):
        cuts = [WHOLE] * len(sizes)
    elif in_features * num_ranks == module.input_size and list(sizes) == [module.output_size]:
        return [Cut(columns=(rank * in_features, (rank + 1) * in_features))], [sizes[0]]
    elif in_features == module.input_size and sum(sizes) * num_ranks == module.output_size:
        replicas = getattr(module, "num_kv_head_replicas", 1)
        indices = [rank if number == 0 else rank // replicas for number in range(len(sizes))]
        ranges = [(index * size, (index + 1) * size) for index, size in zip(indices, sizes, strict=True)]
        if num_parts == 1:
            # One tensor of the checkpoint has all of them, one after the other.
            counts = [num_ranks if number == 0 else num_ranks // replicas for number in range(len(sizes))]
            starts = np.cumsum([0, *(count * size for count, size in zip(counts, sizes, strict=True))])
            ranges = [
                (begin + int(start), end + int(start))
                for (begin, end), start in zip(ranges, starts[:-1], strict=True)
            ]
            return [Cut(tuple(ranges))], [sum(sizes)]
        cuts = [Cut((own,)) for own in ranges]
    else:
        raise NotServable(
            f"ranks divide {name} in a way that deltas are not: serve with --tensor-parallel-size 1"
        )
    if num_parts == 1:
        cuts, sizes = [WHOLE], [sum(sizes)]
    return cuts, list(sizes)


class _CheckedTables(DeltaTables):
    """Tables that refuse artifacts which change what no step would read."""

    def __init__(self, manager: DeltaManager) -> None:
        super().__init__()
        self._manager = manager

    def check(self, manifest: Manifest) -> None:
        self._manager.check(manifest)


def _packed_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the parts of each fused layer, by its own; all without the modules above."""
    found: dict[str, list[str]] = {}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for name, (fused, _) in getattr(mapper, "orig_to_new_stacked", {}).items():
        parts, own = found.setdefault(fused.rpartition(".")[2], []), name.rpartition(".")[2]
        if own not in parts:
            parts.append(own)
    return {**found, **(getattr(model, "packed_modules_mapping", None) or {})}


def _stored_names(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """Return the checkpoint's name of each tensor by vLLM's."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {}
    if hasattr(mapper, "orig_to_new_stacked"):
        # Those would give all parts of a layer one name.
        mapper = replace(mapper, orig_to_new_stacked={})
    rename = getattr(mapper, "map_name", None) or mapper._map_name
    names = ((rename(name), name) for name in checkpoint.tensors)
    return {mapped: name for mapped, name in names if mapped is not None}
