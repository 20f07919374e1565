"""A model of the memory and the time that a fit takes, from shapes alone: what `compress --plan` prints.

Knows the stages of `fit.py` and what each holds at its peak; reads no weights and runs nothing. A part of a stage lies
in host memory or where models run; with a GPU the two are counted apart. Checked against measured peaks in
`tests/compressor/fitting/test_cost.py`, to a factor of 1.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compressor.blockwise.sampling import MAX_GROUP, MEMORY_PART
from compressor.codec import Method
from compressor.fitting.calibration import HELD_OUT_PART, MIN_HELD_OUT
from compressor.fitting.distillation.distill import LOGITS_NUMEL, LOGITS_TOKENS
from compressor.fitting.distillation.student import DEVICE_PART, HOST_BYTES
from compressor.fitting.fit import LAYER_PART, LAYER_TOKENS, MEASURED, OUR_BATCH, PAPER_BATCH
from compressor.fitting.layers.problem import CHUNK_WEIGHTS
from compressor.fitting.training import LATENT_BYTES, Training

FLOAT, DOUBLE = 4, 8
LIBRARIES_BYTES = 120 << 20  # what torch and glibc's heap keep beside tensors, as measured
LOGITS_COPIES = 8  # of one part's logits, their logarithms and their gradients
SAVED = 2.0  # numbers that a block keeps for its backward pass, over what enters and leaves its matrices
PASSING = 0.6  # the same of a forward pass alone
SOLVE_OPERATIONS, SCALES_OPERATIONS = 60, 20  # per weight and input feature, with and without choosing signs
# Bytes that one step moves per weight: the base read twice, the delta added twice, signs and their update.
STEP_BYTES = 150
UPGRADES = 2  # per matrix
PAPER_EPOCHS = 5  # of its layers, over two axes

Where = Literal["host", "device"]


@dataclass(frozen=True, slots=True)
class Part:
    """Something that is in memory during a stage."""

    what: str
    num_bytes: int
    where: Where
    least_bytes: int | None = None  # with which the stage gets by where memory is short; None: all of it


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage at its peak, and what it computes in all."""

    name: str
    parts: Sequence[Part]
    operations: float  # of float32
    moved_bytes: float  # to and from memory, where that and not arithmetic takes the time

    def num_bytes(self, where: str, *, least: bool = False) -> int:
        sizes = (
            part.least_bytes if least and part.least_bytes is not None else part.num_bytes
            for part in self.parts
            if part.where == where
        )
        return sum(sizes)


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a machine is."""

    operations_per_s: float  # of float32 matrix products
    bytes_per_s: float

    def seconds(self, stage: Stage) -> float:
        return stage.operations / self.operations_per_s + stage.moved_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shapes of a pair, and of what is coded of it."""

    blocks: Sequence[Mapping[str, tuple[int, ...]]]  # every tensor of each decoder layer
    embedding: tuple[int, int]  # [vocabulary, hidden]
    is_tied: bool
    coded: Mapping[str, tuple[int, int]]  # the matrices to fit, those outside of layers included
    kv_features: int  # of the KV cache, per token and layer

    @property
    def table(self) -> int:
        """Numbers in the embedding, and in the head."""
        return math.prod(self.embedding)

    @property
    def num_coded(self) -> int:
        return sum(map(math.prod, self.coded.values()))

    @property
    def block_numels(self) -> list[int]:
        return [sum(map(math.prod, block.values())) for block in self.blocks] or [0]

    def matrices(self, index: int) -> list[tuple[str, tuple[int, int]]]:
        """Weights of one layer that every token goes through."""
        names = (name for name in self.blocks[index] if ".experts." not in name and name in self.coded)
        return [(name, self.coded[name]) for name in names]

    def features(self, index: int) -> int:
        """Numbers that enter and leave the matrices of one layer, per token."""
        return sum(sum(shape) for _, shape in self.matrices(index))

    def inputs(self, index: int) -> list[int]:
        """Features of each group of matrices that read the same; attention's output is guessed."""
        groups = {(name.rsplit(".", 2)[0], shape[1]) for name, shape in self.matrices(index)}
        return [features for _, features in sorted(groups)] + [self.embedding[1]]


@dataclass(frozen=True, slots=True)
class Model:
    """Memory and time of one fit on one machine."""

    sizes: Sizes
    training: Training
    method: Method
    is_cpu: bool
    free_bytes: int  # where models run; some stages take what is there

    def stages(self) -> Iterator[Stage]:
        """In their order."""
        if self.training.calibration.source == "self":
            yield self._sampling()
        yield self._teaching()
        if self.method != "scalar" or not self._is_paper:
            yield self._layers()
        if self.training.budget > 1:
            yield self._upgrades()
        if self.training.epochs(self.method):
            yield self._end()
        yield self._judging()

    @property
    def _is_paper(self) -> bool:
        return self.training.solver == "adamw"

    @property
    def _length(self) -> int:
        return self.training.calibration.length

    @property
    def _layer_tokens(self) -> int:
        if self._is_paper:
            return self._num_train // LAYER_PART * self._length
        enough = math.ceil(LAYER_TOKENS * self._widest / self._length)
        return min(self._num_train, enough) * self._length

    @property
    def _end_tokens(self) -> int:
        part = self._num_train // LAYER_PART if self._is_paper else 0
        return (self._num_train - part) * self._length

    @property
    def _num_train(self) -> int:
        return self.training.calibration.samples - self._num_held

    @property
    def _num_held(self) -> int:
        samples = self.training.calibration.samples
        return min(max(MIN_HELD_OUT, math.ceil(samples / HELD_OUT_PART)), samples // 2)

    @property
    def _held(self) -> int:
        """Tokens to choose by, and about as many to judge by."""
        return math.ceil(self._num_held / 2) * self._length

    @property
    def _batch(self) -> int:
        most = (PAPER_BATCH if self._is_paper else OUR_BATCH) * self._length
        return min(most, self._end_tokens)

    @property
    def _widest(self) -> int:
        return max((shape[1] for shape in self.sizes.coded.values()), default=1)

    @property
    def _largest(self) -> int:
        """The index of the largest layer."""
        numels = self.sizes.block_numels
        return numels.index(max(numels))

    @property
    def _forward(self) -> float:
        """Operations per token through all blocks."""
        return 2.0 * sum(self.sizes.block_numels)

    def _stage(self, name: str, parts: Sequence[Part], operations: float, moved_bytes: float = 0.0) -> Stage:
        where: Where = "host"
        libraries = Part("libraries and heap", LIBRARIES_BYTES, where)
        own = [part for part in (*parts, libraries) if part.num_bytes]
        if self.is_cpu:
            own = [Part(part.what, part.num_bytes, where, part.least_bytes) for part in own]
        return Stage(name, own, operations, moved_bytes)

    def _hidden_bytes(self, tokens: int) -> int:
        return FLOAT * tokens * self.sizes.embedding[1]

    def _passing_bytes(self, saved: float) -> int:
        return int(FLOAT * saved * self._batch * self.sizes.features(self._largest))

    @property
    def _teachers_head(self) -> Part:
        return Part("the fine-tune's head", FLOAT * self.sizes.table, "device")

    @property
    def _block_bytes(self) -> int:
        return FLOAT * max(self.sizes.block_numels)

    def _sampling(self) -> Stage:
        numels, samples = self.sizes.block_numels, self.training.calibration.samples
        part = int(MEMORY_PART * self.free_bytes)
        kv_bytes = FLOAT * len(numels) * self.sizes.kv_features * self._length
        fitting = max(1, part // kv_bytes)
        group = min(samples, MAX_GROUP, 1 << (fitting.bit_length() - 1))
        blocks = min(FLOAT * sum(numels), part)
        parts = [
            Part("layers that stay", blocks, "device", 0),
            Part("one layer", self._block_bytes, "device"),
            Part("embedding and head", 2 * FLOAT * self.sizes.table, "device"),
            Part("KV cache", int(1.2 * group * kv_bytes), "device", kv_bytes),
            Part("logits", 2 * FLOAT * group * self.sizes.embedding[0], "device", 0),
        ]
        tokens, steps = samples * self._length, self._length * math.ceil(samples / group)
        weights = sum(numels) + self.sizes.table
        return self._stage("sampling text", parts, 2.0 * weights * tokens, FLOAT * weights * steps)

    def _teaching(self) -> Stage:
        parts = [
            self._teachers_head,
            Part("embedding", 6 * self.sizes.table, "device"),
            Part("last hidden states", self._hidden_bytes(self._held), "host"),
        ]
        return self._stage("choosing text", parts, self._forward * self._held)

    def _layers(self) -> Stage:
        tokens, inputs = self._layer_tokens, self.sizes.inputs(self._largest)
        per_input = SOLVE_OPERATIONS if self.training.refine_signs else SCALES_OPERATIONS
        moments = sum(4.0 * tokens * width**2 for width in inputs)
        solving = 1.0 * sum(per_input * math.prod(shape) * shape[1] for shape in self.sizes.coded.values())
        if self._is_paper:
            moments, solving = 0.0, 12.0 * PAPER_EPOCHS * tokens * self.sizes.num_coded
        operations = (
            len(self.sizes.blocks) * moments + solving + self._forward * tokens * (1 + len(inputs) / 2)
        )
        reads = FLOAT * tokens * sum(inputs)
        largest = max((math.prod(shape) for _, shape in self.sizes.matrices(self._largest)), default=0)
        in_block = 2 * self._block_bytes + self._passing_bytes(PASSING) + self._solving_bytes(largest)
        of_head = 0 if self.sizes.is_tied else self._solving_bytes(self.sizes.table, self.sizes.embedding[1])
        parts = [
            self._teachers_head,
            Part("hidden states of both models", 2 * self._hidden_bytes(tokens), "host"),
            Part("what the fine-tune's layers read", reads, "host"),
            Part("two layers and what one matrix is solved with", max(in_block, of_head), "device"),
        ]
        return self._stage("fitting layers", parts, operations)

    def _solving_bytes(self, numel: int, width: int | None = None) -> int:
        """One matrix with its differences, targets and signs, and the moments of its inputs."""
        width = width or self._widest
        chunks = 5 * FLOAT * min(CHUNK_WEIGHTS, numel)
        if self._is_paper:
            return 6 * FLOAT * numel
        return 5 * FLOAT * numel + chunks + (2 * DOUBLE + 4 * FLOAT) * width**2

    def _upgrades(self) -> Stage:
        tokens, count = MEASURED * self._length, UPGRADES * len(self.sizes.coded)
        parts = [
            self._teachers_head,
            Part("hidden states of every upgrade", count * self._hidden_bytes(tokens), "device"),
            Part("one layer", 2 * self._block_bytes, "device"),
            Part("second planes and residuals", int(count * self.sizes.num_coded / 8), "host"),
        ]
        return self._stage("measuring upgrades", parts, count * tokens * self._forward / 2)

    def _end(self) -> Stage:
        sizes, tokens, epochs = self.sizes, self._end_tokens, self.training.epochs(self.method)
        hiddens = self._hidden_bytes(tokens + self._held)
        moves = self.training.moves_signs(self.method)
        weights = sum(sizes.block_numels) + sizes.table
        steps = epochs * math.ceil(tokens / self._batch)
        parts = [
            Part("latents of signs", LATENT_BYTES * sizes.num_coded if moves else 0, "host"),
            Part("signs: as they are, as they were best, as they began", 3 * sizes.num_coded // 8, "host"),
            Part("last hidden states", hiddens, "host"),
            Part("the base's embedding", 2 * sizes.table, "host"),
            self._teachers_head,
            Part("layers that stay", self._staying_bytes(), "device", None if self.is_cpu else 0),
            Part("hidden states between layers", self._between_bytes(), "device"),
            *self._moving(moves),
        ]
        operations = (4 * tokens + self._held) * 2.0 * weights * epochs
        return self._stage("distilling", parts, operations, float(STEP_BYTES) * weights * steps)

    def _staying_bytes(self) -> int:
        part = HOST_BYTES if self.is_cpu else int(DEVICE_PART * self.free_bytes)
        return min(FLOAT * sum(self.sizes.block_numels), part)

    def _between_bytes(self) -> int:
        return (len(self.sizes.blocks) + 1) * self._hidden_bytes(self._batch)

    def _moving(self, moves: bool) -> Iterator[Part]:
        """The larger of the head with its gradients and logits, and a block with its own."""
        table, vocabulary = self.sizes.table, self.sizes.embedding[0]
        logits = (
            LOGITS_COPIES
            * FLOAT
            * min(max(LOGITS_NUMEL, LOGITS_TOKENS * vocabulary), self._batch * vocabulary)
        )
        largest = max((math.prod(shape) for _, shape in self.sizes.matrices(self._largest)), default=0)
        update = 2 * FLOAT * largest if moves else 0
        block = 2 * self._block_bytes + max(self._passing_bytes(SAVED), update)
        pending = FLOAT * table if moves and self.sizes.is_tied else 0
        if 3 * FLOAT * table + logits >= block + pending:
            yield Part("head, gradients or update", 3 * FLOAT * table, "device")
            yield Part("logits of some tokens", logits, "device")
        else:
            yield Part("the embedding's gradient", pending, "device")
            yield Part("one layer, gradients, and what it keeps or its update", block, "device")

    def _judging(self) -> Stage:
        parts = [
            self._teachers_head,
            Part("embedding or head", 8 * self.sizes.table, "device"),
            Part("last hidden states", 3 * self._hidden_bytes(self._held), "host"),
            Part("signs", self.sizes.num_coded // 8, "host"),
            Part("one layer", 2 * self._block_bytes, "device"),
        ]
        return self._stage("judging", parts, 3 * self._held * (self._forward + 2.0 * self.sizes.table))
