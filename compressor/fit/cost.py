"""Predict the memory and the time of a fit from shapes alone, for `compress --plan`.

Follows the stages of `fit.py` at their peaks; reads no weights and runs nothing. Each item of a stage is in host memory
or where models run; with a GPU the two are counted apart. `tests/compressor/fit/test_cost.py` compares the
prediction with a measured peak, to a factor of 1.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compressor.config import FitSettings
from compressor.decoder.sampling import MAX_GROUP, MEMORY_PART
from compressor.fit.calibration import num_held_out
from compressor.fit.distill import LOGITS_NUMEL, LOGITS_TOKENS
from compressor.fit.fit import MEASURED_SEQUENCES
from compressor.fit.recipe import Recipe
from compressor.fit.shapes import FLOAT32_BYTES, LATENT_BYTES, FitShapes, MemoryItem, StageCost
from compressor.fit.student import DEVICE_PART, HOST_BYTES

LIBRARIES_BYTES = 120 << 20  # of torch and glibc's heap beside tensors, as measured
LOGITS_COPIES = 8  # logits of one part of the tokens, their logarithms and their gradients
# Numbers that a block keeps per number that enters or leaves its matrices, for a backward pass and without one.
BACKWARD_NUMBERS, FORWARD_NUMBERS = 2.0, 0.6
# Bytes that one step moves per weight: the base read twice, the delta added twice, signs and their update.
STEP_BYTES = 150
UPGRADES = 2  # per matrix


@dataclass(frozen=True, slots=True)
class FitCost:
    """Predicts memory and time of one fit on one machine."""

    shapes: FitShapes
    fit_settings: FitSettings
    recipe: Recipe  # of these settings
    is_cpu: bool
    free_bytes: int  # where models run; some stages use all of it

    def stages(self) -> Iterator[StageCost]:
        """Yield the stages in their order."""
        if self.fit_settings.calibration.text == "self":
            yield self._sampling()
        yield self._teaching()
        if self.recipe.layers is not None:
            yield self._layers()
        if self.fit_settings.budget > 1:
            yield self._upgrades()
        if self.recipe.distillation.epochs:
            yield self._distilling()
        yield self._measuring()

    @property
    def _length(self) -> int:
        return self.fit_settings.calibration.length

    @property
    def _num_samples(self) -> int:
        return self.fit_settings.calibration.samples

    @property
    def _validation_tokens(self) -> int:
        """Tokens of validation text; test text has about as many."""
        return math.ceil(num_held_out(self._num_samples) / 2) * self._length

    @property
    def _train_tokens(self) -> tuple[int, int]:
        """Tokens of the layer stage and of the end-to-end stage."""
        num_train = self._num_samples - num_held_out(self._num_samples)
        parts = self.recipe.split(num_train, self.shapes.widest)
        layers, end_to_end = (len(range(num_train)[part]) * self._length for part in parts)
        return layers, end_to_end

    @property
    def _batch_tokens(self) -> int:
        return min(self.recipe.batch_tokens, self._train_tokens[1])

    @property
    def _forward_operations(self) -> float:
        """Operations per token through all blocks."""
        return 2.0 * sum(self.shapes.block_numels)

    @property
    def _block_bytes(self) -> int:
        return FLOAT32_BYTES * max(self.shapes.block_numels)

    @property
    def _largest_matrix(self) -> int:
        """Weights of the largest coded matrix of the largest block."""
        shapes = (shape for _, shape in self.shapes.matrices(self.shapes.largest_block))
        return max(map(math.prod, shapes), default=0)

    @property
    def _teacher_head(self) -> MemoryItem:
        return MemoryItem("the fine-tune's head", FLOAT32_BYTES * self.shapes.embedding_numel, "device")

    def _hidden_bytes(self, tokens: int) -> int:
        return FLOAT32_BYTES * tokens * self.shapes.embedding[1]

    def _activation_bytes(self, numbers: float) -> int:
        """Bytes that a block keeps of one batch, at so many numbers per feature that its matrices read or give."""
        features = self.shapes.features(self.shapes.largest_block)
        return int(FLOAT32_BYTES * numbers * self._batch_tokens * features)

    def _stage(
        self, name: str, items: Sequence[MemoryItem], operations: float, moved_bytes: float = 0.0
    ) -> StageCost:
        libraries = MemoryItem("libraries and heap", LIBRARIES_BYTES, "host")
        own = [item for item in (*items, libraries) if item.num_bytes]
        if self.is_cpu:
            own = [replace(item, where="host") for item in own]
        return StageCost(name, own, operations, moved_bytes)

    def _sampling(self) -> StageCost:
        numels, samples = self.shapes.block_numels, self._num_samples
        part = int(MEMORY_PART * self.free_bytes)
        kv_bytes = FLOAT32_BYTES * len(numels) * self.shapes.kv_features * self._length
        fitting = max(1, part // kv_bytes)
        group = min(samples, MAX_GROUP, 1 << (fitting.bit_length() - 1))
        blocks = min(FLOAT32_BYTES * sum(numels), part)
        items = [
            MemoryItem("blocks that stay", blocks, "device", 0),
            MemoryItem("one block", self._block_bytes, "device"),
            MemoryItem("embedding and head", 2 * FLOAT32_BYTES * self.shapes.embedding_numel, "device"),
            MemoryItem("KV cache", int(1.2 * group * kv_bytes), "device", kv_bytes),
            MemoryItem("logits", 2 * FLOAT32_BYTES * group * self.shapes.embedding[0], "device", 0),
        ]
        tokens, steps = samples * self._length, self._length * math.ceil(samples / group)
        weights = sum(numels) + self.shapes.embedding_numel
        return self._stage("sampling text", items, 2.0 * weights * tokens, FLOAT32_BYTES * weights * steps)

    def _teaching(self) -> StageCost:
        items = [
            self._teacher_head,
            MemoryItem("embedding", 6 * self.shapes.embedding_numel, "device"),
            MemoryItem("last hidden states", self._hidden_bytes(self._validation_tokens), "host"),
        ]
        return self._stage(
            "running the fine-tune on validation text",
            items,
            self._forward_operations * self._validation_tokens,
        )

    def _layers(self) -> StageCost:
        shapes, tokens = self.shapes, self._train_tokens[0]
        widths = shapes.input_widths(shapes.largest_block)
        forwards = self._forward_operations * tokens * (1 + len(widths) / 2)
        in_block = 2 * self._block_bytes + self._activation_bytes(FORWARD_NUMBERS)
        in_block += self.recipe.solve_bytes(self._largest_matrix, shapes.widest)
        of_head = self.recipe.solve_bytes(shapes.embedding_numel, shapes.embedding[1])
        solving = max(in_block, 0 if shapes.is_tied else of_head)
        items = [
            self._teacher_head,
            MemoryItem("hidden states of both models", 2 * self._hidden_bytes(tokens), "host"),
            MemoryItem(
                "inputs of the fine-tune's linear layers", FLOAT32_BYTES * tokens * sum(widths), "host"
            ),
            MemoryItem("two blocks and the solution of one matrix", solving, "device"),
        ]
        return self._stage("fitting layers", items, self.recipe.solve_operations(shapes, tokens) + forwards)

    def _upgrades(self) -> StageCost:
        tokens, count = MEASURED_SEQUENCES * self._length, UPGRADES * len(self.shapes.coded)
        items = [
            self._teacher_head,
            MemoryItem("hidden states of every upgrade", count * self._hidden_bytes(tokens), "device"),
            MemoryItem("one block", 2 * self._block_bytes, "device"),
            MemoryItem("second planes and residuals", int(count * self.shapes.num_coded / 8), "host"),
        ]
        return self._stage("measuring upgrades", items, count * tokens * self._forward_operations / 2)

    def _distilling(self) -> StageCost:
        shapes, tokens, epochs = self.shapes, self._train_tokens[1], self.recipe.distillation.epochs
        moves = self.recipe.distillation.moves_signs
        weights = sum(shapes.block_numels) + shapes.embedding_numel
        steps = epochs * math.ceil(tokens / self._batch_tokens)
        staying = HOST_BYTES if self.is_cpu else int(DEVICE_PART * self.free_bytes)
        staying = min(FLOAT32_BYTES * sum(shapes.block_numels), staying)
        between = (len(shapes.blocks) + 1) * self._hidden_bytes(self._batch_tokens)
        items = [
            MemoryItem("latents of signs", LATENT_BYTES * shapes.num_coded if moves else 0, "host"),
            MemoryItem("signs: present, best and first", 3 * shapes.num_coded // 8, "host"),
            MemoryItem("last hidden states", self._hidden_bytes(tokens + self._validation_tokens), "host"),
            MemoryItem("the base's embedding", 2 * shapes.embedding_numel, "host"),
            self._teacher_head,
            MemoryItem("blocks that stay", staying, "device", None if self.is_cpu else 0),
            MemoryItem("hidden states between blocks", between, "device"),
            *self._backward_items(moves),
        ]
        operations = (4 * tokens + self._validation_tokens) * 2.0 * weights * epochs
        return self._stage("distilling", items, operations, float(STEP_BYTES) * weights * steps)

    def _backward_items(self, moves_signs: bool) -> Iterator[MemoryItem]:
        """Yield the larger of the head with its gradients and logits, and a block with its own."""
        table, vocabulary = self.shapes.embedding_numel, self.shapes.embedding[0]
        logits_numel = max(LOGITS_NUMEL, LOGITS_TOKENS * vocabulary)
        logits = LOGITS_COPIES * FLOAT32_BYTES * min(logits_numel, self._batch_tokens * vocabulary)
        update = 2 * FLOAT32_BYTES * self._largest_matrix if moves_signs else 0
        block = 2 * self._block_bytes + max(self._activation_bytes(BACKWARD_NUMBERS), update)
        pending = FLOAT32_BYTES * table if moves_signs and self.shapes.is_tied else 0
        if 3 * FLOAT32_BYTES * table + logits >= block + pending:
            yield MemoryItem("head, gradients or update", 3 * FLOAT32_BYTES * table, "device")
            yield MemoryItem("logits of some tokens", logits, "device")
        else:
            yield MemoryItem("the embedding's gradient", pending, "device")
            yield MemoryItem("one block, gradients, and its activations or update", block, "device")

    def _measuring(self) -> StageCost:
        items = [
            self._teacher_head,
            MemoryItem("embedding or head", 8 * self.shapes.embedding_numel, "device"),
            MemoryItem("last hidden states", 3 * self._hidden_bytes(self._validation_tokens), "host"),
            MemoryItem("signs", self.shapes.num_coded // 8, "host"),
            MemoryItem("one block", 2 * self._block_bytes, "device"),
        ]
        per_token = self._forward_operations + 2.0 * self.shapes.embedding_numel
        return self._stage("measuring the fidelity", items, 3 * self._validation_tokens * per_token)
