"""A bound on the memory of each stage of `compress`, and its disk space, from names and shapes alone.

Each stage has one formula: the blocks that it holds, the activations of a batch, and what it keeps for all of the text.
A run whose bound is above the free memory is refused with the first option that needs less. Reads no weights.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from compressor.config import CompressConfig, FitSettings
from compressor.pairs import Pairs, TensorPair
from deltastore.console import size_text
from deltastore.errors import MemoryTooSmall
from deltastore.format.sizes import FP16_BYTES, one_bit_plan

if TYPE_CHECKING:  # they bring transformers, which takes seconds
    from compressor.fit.distill import DistillSettings
    from compressor.fit.recipe import Recipe

FLOAT32_BYTES, LATENT_BYTES = 4, 2
CODING_BYTES = 110 << 20  # of the threads that code weights alone, as measured
LIBRARIES_BYTES = 120 << 20  # of torch and glibc's heap beside tensors, as measured
LOGITS_COPIES = 8  # logits of one part of the tokens, their logarithms and their gradients
# Numbers that a block keeps per number that enters or leaves its matrices, for a backward pass and without one.
BACKWARD_NUMBERS, FORWARD_NUMBERS = 2.0, 0.6
UPGRADES = 2  # per matrix
FEWEST_SAMPLES = 32  # that are proposed


@dataclass(frozen=True, slots=True)
class StageBound:
    """The most bytes that one stage has in memory at a time."""

    name: str
    host: int
    device: int = 0  # of the GPU's memory, where models run on one


@dataclass(frozen=True, slots=True)
class Requirements:
    """Memory and disk space of one run."""

    stages: Sequence[StageBound]
    disk_bytes: int  # beside `out`, at most
    free: Mapping[str, int]  # bytes of `host` and `device` memory and of the `disk`

    def peak(self, where: str) -> int:
        """Return the bytes of one kind of memory, `host` or `device`, of the largest stage."""
        return max(int(getattr(stage, where)) for stage in self.stages)

    @property
    def memory_kinds(self) -> list[str]:
        """Kinds of memory that the run uses."""
        return [where for where in ("host", "device") if self.peak(where)]

    def as_json(self) -> dict[str, Any]:
        kinds = self.memory_kinds
        return {
            "memory": {where: {"bytes": self.peak(where), "free_bytes": self.free[where]} for where in kinds},
            "disk": {"bytes": self.disk_bytes, "free_bytes": self.free["disk"]},
            "stages": [
                {"name": stage.name, **{f"{where}_bytes": getattr(stage, where) for where in kinds}}
                for stage in self.stages
            ],
        }

    def lines(self) -> Iterator[str]:
        """Yield the same for people."""
        kinds = self.memory_kinds
        for where in kinds:
            yield f"{where} memory: {size_text(self.peak(where))} at most; {size_text(self.free[where])} are free"
        yield f"disk: {size_text(self.disk_bytes)} beside the artifact at most; {size_text(self.free['disk'])} are free"
        for stage in self.stages:
            sizes = ", ".join(f"{size_text(getattr(stage, where))} of {where} memory" for where in kinds)
            yield f"{stage.name}: {sizes}"


def free_memory(device: torch.device) -> dict[str, int]:
    """Return free bytes of `host` memory and, if models run on a GPU, of the `device`."""
    from compressor.decoder.sampling import free_bytes  # brings transformers, which takes seconds

    free = {"host": free_bytes(torch.device("cpu"))}
    return free if device.type == "cpu" else free | {"device": free_bytes(device)}


def requirements_of(
    config: CompressConfig, pairs: Pairs, coded: Collection[str], files: Mapping[str, bytes]
) -> Requirements:
    """Return the requirements of a run.

    Args:
        coded: names of the tensors that are coded at one bit where they differ.
        files: the fine-tune's own files that the artifact stores.
    """
    free = {**free_memory(device_of(config)), "disk": shutil.disk_usage(config.out.parent).free}
    return Requirements(stage_bounds(config, pairs, coded), disk_bytes(config, pairs, coded, files), free)


def check_memory(config: CompressConfig, pairs: Pairs, coded: Collection[str]) -> None:
    """Refuse a run for which there is too little memory.

    Raises:
        MemoryTooSmall: how much is missing, and which options need less.
    """
    if config.fit_settings is None:
        return
    free = free_memory(device_of(config))
    for where, free_bytes in free.items():
        needed = _peak(config, pairs, coded, where)
        if needed > free_bytes:
            raise MemoryTooSmall(
                f"fitting needs about {size_text(needed)} of {where} memory and {size_text(free_bytes)} are free, "
                f"{size_text(needed - free_bytes)} too little: {_way_out(config, config.fit_settings, pairs, coded)}"
            )


def _peak(config: CompressConfig, pairs: Pairs, coded: Collection[str], where: str) -> int:
    return max(int(getattr(stage, where)) for stage in stage_bounds(config, pairs, coded))


def _way_out(config: CompressConfig, fit_settings: FitSettings, pairs: Pairs, coded: Collection[str]) -> str:
    """Name the first options that need little enough."""
    free = free_memory(device_of(config))
    for options, cheaper in _cheaper(config, fit_settings):
        changed = replace(config, fit_settings=cheaper)
        if all(_peak(changed, pairs, coded, where) <= free[where] for where in free):
            return f"give {options}"
    elsewhere = ", or `device='cpu'`" if "device" in free else ""
    return f"give `text='none'`, which reads no text{elsewhere}"


def _cheaper(config: CompressConfig, fit_settings: FitSettings) -> Iterator[tuple[str, FitSettings]]:
    """Yield options that need less memory: fewer samples, signs that stay, and both."""
    # Deferred, because it imports transformers, which takes seconds.
    from compressor.fit.fit import recipe_of

    calibration, samples = fit_settings.calibration, fit_settings.calibration.samples
    while samples // 2 >= FEWEST_SAMPLES:
        samples //= 2
        yield f"`samples={samples}`", replace(fit_settings, calibration=replace(calibration, samples=samples))
    if recipe_of(fit_settings, config.scales).distillation.moves_signs:
        fixed = replace(fit_settings, learn_signs=False)
        yield "`learn_signs=False`", fixed
        fewest = replace(fixed, calibration=replace(calibration, samples=samples))
        yield f"`learn_signs=False` and `samples={samples}`", fewest


def device_of(config: CompressConfig) -> torch.device:
    """Return the device where models run; weights alone are coded on the CPU."""
    return torch.device("cpu") if config.fit_settings is None else config.fit_settings.torch_device()


def stage_bounds(config: CompressConfig, pairs: Pairs, coded: Collection[str]) -> list[StageBound]:
    """Return the bound of every stage of a run."""
    # The signs of one stack of experts are stacked when they are written.
    stacks = (
        one_bit_plan({pair.name: pair.shape}, [pair.name])
        for pair in pairs.tensors
        if pair.transposed is not None
    )
    largest = max((plan.device_bytes for plan in stacks), default=0)
    coding = StageBound("coding", CODING_BYTES + 2 * largest)
    if config.fit_settings is None:
        return [coding]
    # Deferred, because it imports transformers, which takes seconds.
    from compressor.fit.fit import recipe_of

    device = config.fit_settings.torch_device()
    free = free_memory(device)
    shapes = shapes_of(pairs.tensors, coded, pairs.finetune.config)
    recipe = recipe_of(config.fit_settings, config.scales)
    fit = FitBounds(shapes, config.fit_settings, recipe, device.type == "cpu", free)
    return [*fit.stages(), coding]


def disk_bytes(
    config: CompressConfig, pairs: Pairs, coded: Collection[str], files: Mapping[str, bytes]
) -> int:
    """Return the most bytes beside `out` at any time.

    The artifact is written to a spool and then in one piece, so it takes its space twice for a moment. The stages that
    calibration keeps for a resumed run take about as much again, and the state of the end-to-end stage comes on top.
    """
    shapes = {pair.name: pair.shape for pair in pairs.tensors if pair.name in coded}
    stacks = [name for name in pairs.stacks if name in coded]
    matrices = one_bit_plan(shapes, stacks)
    whole = sum(pair.tensor.num_bytes for pair in pairs.tensors if pair.name not in coded)
    added = sum(pair.added_rows * pair.row_bytes for pair in pairs.tensors if pair.name in coded)
    budget, copies = (1.0, 2) if config.fit_settings is None else (config.fit_settings.budget, 4)
    needed = int(copies * budget * matrices.device_bytes)
    needed += 2 * (whole + added + sum(map(len, files.values())))
    if config.fit_settings is not None:
        # Deferred, because it imports transformers, which takes seconds.
        from compressor.fit.fit import recipe_of

        # Stacks of experts are coded from weights alone, and have no state.
        fitted = {name: shape for name, shape in shapes.items() if name not in stacks}
        num_weights = sum(map(math.prod, fitted.values()))
        num_scales = one_bit_plan(fitted).scales_bytes // FP16_BYTES
        distillation = recipe_of(config.fit_settings, config.scales).distillation
        needed += state_bytes(distillation, budget, num_weights, num_scales)
    return needed


def state_bytes(distillation: DistillSettings, budget: float, num_weights: int, num_scales: int) -> int:
    """Return the disk space that a run needs for the state of its end-to-end stage.

    Every scale has two moments, every sign that moves is a latent number, and a new state lies beside the old one.
    """
    scales = 3 * FLOAT32_BYTES * num_scales if distillation.epochs else 0
    latents = LATENT_BYTES * num_weights if distillation.moves_signs else 0
    return int(2 * budget * (scales + latents))


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a model, and of its matrices that are coded."""

    blocks: Sequence[Mapping[str, tuple[int, ...]]]  # every tensor of each block (decoder layer)
    embedding: tuple[int, int]  # [vocabulary, hidden]
    is_tied: bool
    coded: Mapping[str, tuple[int, int]]  # the matrices to fit, those outside of blocks included
    kv_features: int  # of the KV cache, per token and block
    stack_bytes: int = 0  # of the deltas of stacks of experts, which stay in memory

    @cached_property
    def numels(self) -> list[int]:
        """Numbers of each block."""
        return [sum(map(math.prod, block.values())) for block in self.blocks] or [0]

    @cached_property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Coded matrices of the largest block that every token goes through."""
        block = self.blocks[self.numels.index(max(self.numels))] if self.blocks else {}
        return {name: self.coded[name] for name in block if ".experts." not in name and name in self.coded}

    @property
    def widest(self) -> int:
        """Input features of the widest coded matrix, at least 1."""
        return max((shape[1] for shape in self.coded.values()), default=1)

    @property
    def num_coded(self) -> int:
        """Weights that are coded."""
        return sum(map(math.prod, self.coded.values()))


def shapes_of(pairs: Sequence[TensorPair], coded: Collection[str], config: Mapping[str, Any]) -> ModelShapes:
    """Return the shapes of paired tensors; `coded` names those that are fitted, `config` is the model's."""
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for pair in pairs:
        parts = pair.name.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            blocks.setdefault(".".join(parts[: number + 1]), {})[pair.name] = pair.tensor.shape
    finetune = pairs[0].finetune
    stacks = {pair.name: pair.shape for pair in pairs if pair.name in coded and pair.transposed is not None}
    embedding = finetune.tensors[str(finetune.embedding_name)].shape if finetune.embedding_name else (1, 1)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    head_dim = int(config.get("head_dim") or embedding[1] // heads)
    return ModelShapes(
        blocks=list(blocks.values()),
        embedding=(embedding[0], embedding[1]),
        is_tied=finetune.tied,
        coded={
            pair.name: (pair.shape[0], pair.shape[1])
            for pair in pairs
            if pair.name in coded and pair.transposed is None
        },
        stack_bytes=one_bit_plan(stacks, stacks).device_bytes,
        kv_features=2 * int(config.get("num_key_value_heads") or heads) * head_dim,
    )


@dataclass(frozen=True, slots=True)
class FitBounds:
    """The bounds of one fit's stages on one machine."""

    shapes: ModelShapes
    fit_settings: FitSettings
    recipe: Recipe  # of these settings
    is_cpu: bool
    free: Mapping[str, int]  # bytes of `host` and `device` memory

    def stages(self) -> Iterator[StageBound]:
        """Yield the stages in their order."""
        # Deferred, because they import transformers, which takes seconds.
        from compressor.decoder.sampling import MAX_GROUP, MEMORY_PART
        from compressor.fit.calibration import num_held_out
        from compressor.fit.distill import LOGITS_NUMEL, LOGITS_TOKENS
        from compressor.fit.fit import MEASURED_SEQUENCES
        from compressor.fit.student import DEVICE_PART, HOST_BYTES

        shapes, distillation = self.shapes, self.recipe.distillation
        length, samples = self.fit_settings.calibration.length, self.fit_settings.calibration.samples
        (vocabulary, hidden), num_coded = shapes.embedding, shapes.num_coded
        held_out = num_held_out(samples)
        tested = math.ceil(held_out / 2) * length  # tokens of validation text, and of test text
        train = range(samples - held_out)
        layers, end = (len(train[part]) * length for part in self.recipe.split(len(train), shapes.widest))
        batch = min(self.recipe.batch_tokens, end)
        free = self.free["host" if self.is_cpu else "device"]

        # In float32: all blocks, the largest one, the embedding, and hidden states per token.
        every, block = FLOAT32_BYTES * sum(shapes.numels), FLOAT32_BYTES * max(shapes.numels)
        table, state = FLOAT32_BYTES * vocabulary * hidden, FLOAT32_BYTES * hidden
        features = sum(map(sum, shapes.matrices.values()))
        largest = max(map(math.prod, shapes.matrices.values()), default=0)

        if self.fit_settings.calibration.text == "self":
            kv = FLOAT32_BYTES * len(shapes.blocks) * shapes.kv_features * length
            part = int(MEMORY_PART * free)
            group = min(samples, MAX_GROUP, 1 << (max(1, part // kv).bit_length() - 1))
            more = min(every, part) + int(1.2 * group * kv) + 2 * FLOAT32_BYTES * group * vocabulary
            yield self._stage("sampling text", 0, block + 2 * table + kv, more)
        if self.recipe.layer_stage is not None:
            groups = {(name.rsplit(".", 2)[0], shape[1]) for name, shape in shapes.matrices.items()}
            read = (
                sum(width for _, width in groups) + hidden
            )  # by the matrices of a block; attention's output
            solving = 2 * block + int(FLOAT32_BYTES * FORWARD_NUMBERS * batch * features)
            solving += self.recipe.solve_bytes(largest, shapes.widest)
            if not shapes.is_tied:
                solving = max(solving, self.recipe.solve_bytes(vocabulary * hidden, hidden))
            yield self._stage("fitting layers", (2 * state + FLOAT32_BYTES * read) * layers, table + solving)
        if self.fit_settings.budget > 1:
            count = UPGRADES * len(shapes.coded)
            hiddens = count * state * MEASURED_SEQUENCES * length
            yield self._stage("measuring upgrades", count * num_coded // 8, table + hiddens + 2 * block)
        if distillation.epochs:
            latents = LATENT_BYTES * num_coded if distillation.moves_signs else 0
            # Signs: present, best and first.
            kept = latents + 3 * num_coded // 8 + state * (end + tested) + table // 2
            logits_numel = min(max(LOGITS_NUMEL, LOGITS_TOKENS * vocabulary), batch * vocabulary)
            of_head = 3 * table + LOGITS_COPIES * FLOAT32_BYTES * logits_numel
            update = 2 * FLOAT32_BYTES * largest if distillation.moves_signs else 0
            activations = int(FLOAT32_BYTES * BACKWARD_NUMBERS * batch * features)
            of_block = 2 * block + max(activations, update)
            of_block += table if distillation.moves_signs and shapes.is_tied else 0
            between = (len(shapes.blocks) + 1) * state * batch
            backward = table + between + max(of_head, of_block)
            if self.is_cpu:
                yield self._stage("distilling", kept, backward + min(every, HOST_BYTES))
            else:
                yield self._stage("distilling", kept, backward, min(every, int(DEVICE_PART * free)))
        yield self._stage("testing", 3 * state * tested + num_coded // 8, 3 * table + 2 * block)

    def _stage(self, name: str, host: int, device: int, more: int = 0) -> StageBound:
        """Return the bound of a stage that also uses up to `more` bytes where models run, as far as they are free."""
        host += LIBRARIES_BYTES + self.shapes.stack_bytes
        if self.is_cpu:
            needed = host + device
            return StageBound(name, min(needed + more, max(needed, self.free["host"])))
        return StageBound(name, host, min(device + more, max(device, self.free["device"])))
