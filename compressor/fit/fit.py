"""Fit deltas to calibration text: layer by layer, then the byte budget, then end to end, then measure the result.

Each stage is implemented in its own file, and a `FitStrategy` holds all that differs between solvers. The
results of a stage are kept in a `CheckpointStore`, so that an interrupted run continues with the next block or epoch
and gives the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import Overlay, Weights, weight_with_delta
from compressor.evaluate.fidelity import Fidelity, Predictions, compare
from compressor.fit.budget import embedding_upgrades, measure, spend
from compressor.fit.calibration import calibration_text, split_text
from compressor.fit.distill import Distillation, Teacher, TeacherTargets, divergence
from compressor.fit.layers import Layerwise
from compressor.fit.shapes import widest_input
from compressor.fit.strategy import FitStrategy, LayerStageInputs
from compressor.fit.student import Student
from compressor.fit.trainable import Trainable
from compressor.pairs import TensorPair
from compressor.resume import CheckpointStore, FittedMatrix, flatten_matrices, unflatten_matrices
from deltastore.console import progress_bar
from deltastore.format.matrix import MatrixDelta

MEASURED_SEQUENCES = 4  # on which upgrades are measured


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """The deltas of a fit and their fidelity."""

    # By name; matrices that no forward pass reaches are coded from weights alone.
    deltas: Mapping[str, MatrixDelta]
    fidelity: Fidelity  # on test text, which nothing was fitted to
    base: Fidelity  # of the base on the same text
    test_text: Sequence[Tensor]  # [tokens] int64 each
    num_sequences: int  # of calibration text in all

    def as_json(self) -> dict[str, Any]:
        return {"held_out": self.fidelity.as_json(), "base": self.base.as_json()}


@dataclass(frozen=True, slots=True, eq=False)
class TextSplit:
    """Calibration text by its use; sequences are ``[tokens]`` int64."""

    layers: list[Tensor]
    end_to_end: list[Tensor]
    validation: list[Tensor]  # to choose between axes, epochs and upgrades
    test: list[Tensor]  # for the fidelity alone

    @classmethod
    def of(cls, sequences: Sequence[Tensor], strategy: FitStrategy, widest: int) -> TextSplit:
        """Split off validation and test text, and give the other sequences to the stages as the strategy says."""
        train, validation, test = split_text(sequences)
        layers, end_to_end = strategy.split(len(train), widest)
        return cls(train[layers], train[end_to_end], validation, test)


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """One run of all stages."""

    pairs: Mapping[str, TensorPair]  # the matrices to code, each of which differs from the base's
    base: Weights  # with as many rows of the vocabulary as the fine-tune
    finetune: Weights  # with a head of its own where its delta has one
    strategy: FitStrategy
    spare_bytes: int  # beyond one bit per weight
    store: CheckpointStore
    shows_progress: bool = False  # on stderr

    def run(self) -> Fitted:
        """Fit, choose and measure.

        Raises:
            CheckpointError: a model that cannot be run block by block, or whose logits are not finite.
            UsageError: text that cannot be had or is too short; settings that do not go together.
        """
        self.strategy.check(self.spare_bytes)
        device = self.strategy.fit_settings.torch_device()
        decoder = Decoder(self.finetune, device, torch.float32)
        sequences = self._calibration_text(decoder)
        widest = widest_input([pair.shape for pair in self.pairs.values()])
        text = TextSplit.of(sequences, self.strategy, widest)
        teacher = Teacher(decoder, decoder.load_head(), self.strategy.batch_tokens)
        validation = teacher.targets(text.validation)
        deltas: Mapping[str, MatrixDelta] = self._fit_layers(text, validation)
        if self.strategy.distillation.epochs:
            deltas = self._distill(deltas, teacher.targets(text.end_to_end), validation)
        test = teacher.targets(text.test)
        fidelity = _fidelity(self._with_deltas(deltas), test)
        return Fitted(deltas, fidelity, _fidelity(self.base, test), text.test, len(sequences))

    def _calibration_text(self, finetune: Decoder) -> list[Tensor]:
        stored = self.store.load_tensors("text")
        if stored is None:
            calibration = self.strategy.fit_settings.calibration
            tokens = calibration.samples * calibration.length if calibration.source == "self" else 0
            with progress_bar(tokens, "sampling text", "token", self.shows_progress and tokens > 0) as bar:
                sequences = calibration_text(calibration, finetune, bar.update)
            if len(sequences) < calibration.samples:
                print(
                    f"{calibration.source}: its text makes {len(sequences)} sequences of {calibration.length} tokens, "
                    f"fewer than --samples {calibration.samples}: fitting to those",
                    file=sys.stderr,
                )
            stored = {"ids": torch.stack(sequences)}
            self.store.save_tensors("text", stored)
        return list(stored["ids"])

    def _fit_layers(self, text: TextSplit, validation: TeacherTargets) -> dict[str, MatrixDelta]:
        """Return every matrix's delta, fitted layer by layer, and upgraded where spare bytes save most KL."""
        stored = self.store.load_matrices("layers")
        if stored is not None:
            return {name: matrix.delta for name, matrix in stored.items()}
        layerwise = Layerwise(self.pairs, self.finetune, self.strategy.method, validation.teacher.device)
        if self.strategy.fits_layers:
            self._run_layerwise(layerwise, text, validation)
        deltas = {name: layerwise.delta(name) for name in self.pairs}
        if self.spare_bytes:
            student = self._student(deltas, validation.teacher.device)
            upgrades = {name: matrix.upgrades for name, matrix in layerwise.fitted.items()}
            upgrades |= embedding_upgrades(student, deltas, self.strategy.method)
            kl_saved = measure(student, validation.first(MEASURED_SEQUENCES), upgrades)
            deltas = spend(self.spare_bytes, deltas, upgrades, kl_saved)
        self.store.save_matrices("layers", {name: FittedMatrix(delta) for name, delta in deltas.items()})
        return deltas

    def _run_layerwise(self, layerwise: Layerwise, text: TextSplit, validation: TeacherTargets) -> None:
        """Fit layers from the first block on that the store lacks."""
        first = 0
        while (stored := self.store.load_matrices(f"block-{first}")) is not None:
            layerwise.fitted.update(stored)
            first += 1
        inputs = LayerStageInputs(
            finetune=self.finetune,
            pairs=self.pairs,
            sequences=text.layers,
            validation=validation.batches,
            num_ids=validation.teacher.num_embeddings,
            with_upgrades=self.spare_bytes > 0,
            device=layerwise.device,
        )
        stage = self.strategy.layer_stage(inputs)
        num_blocks = int(self.finetune.config.get("num_hidden_layers") or 0)
        with progress_bar(num_blocks, "fitting layers", "block", self.shows_progress) as bar:
            bar.update(first)

            def on_block(index: int, fitted: Mapping[str, FittedMatrix]) -> None:
                self.store.save_matrices(f"block-{index}", fitted)
                bar.update()

            layerwise.run(stage.batches, stage.solver, first, on_block)

    def _distill(
        self, deltas: Mapping[str, MatrixDelta], targets: TeacherTargets, validation: TeacherTargets
    ) -> Mapping[str, MatrixDelta]:
        """Train end to end; return the deltas of the best epoch on validation text, or of the last one."""
        settings, student = self.strategy.distillation, self._student(deltas, targets.teacher.device)
        if not student.trained:
            return deltas
        run, num_done = Distillation(student, targets, settings), 0
        best, least = student.stored(), divergence(student, validation)
        if (state := self.store.load_state("end_to_end")) is not None:
            run.restore(state["run"])
            num_done, least = state["epochs"], state["least"]
            best = {name: matrix.delta for name, matrix in unflatten_matrices(state["best"]).items()}
        num_batches = len(targets.batches)
        with progress_bar(settings.epochs * num_batches, "distilling", "step", self.shows_progress) as bar:
            bar.update(num_done * num_batches)
            for epoch in range(num_done, settings.epochs):
                run.epoch(epoch, bar.update)
                reached = divergence(student, validation)
                if reached < least or not settings.keeps_best:
                    best, least = student.stored(), reached
                flat = flatten_matrices({name: FittedMatrix(delta) for name, delta in best.items()})
                state = {"run": run.state(), "epochs": epoch + 1, "least": least, "best": flat}
                self.store.save_state("end_to_end", state)
        return best

    def _student(self, deltas: Mapping[str, MatrixDelta], device: torch.device) -> Student:
        relative = self.strategy.distillation.relative
        trainable = {name: Trainable.of(deltas[name], device, relative=relative) for name in self.pairs}
        return Student(self.finetune, self.pairs, trainable, device)

    def _with_deltas(self, deltas: Mapping[str, MatrixDelta]) -> Overlay:
        """The fine-tune with its matrices as their deltas code them."""

        def coded(name: str) -> Tensor | None:
            return weight_with_delta(self.pairs[name], deltas[name]) if name in deltas else None

        return Overlay(self.finetune, coded)


def _fidelity(weights: Weights, test: TeacherTargets) -> Fidelity:
    """Measure the fidelity of a model on the teacher's text."""
    student = Predictions.of(Decoder(weights, test.teacher.device, torch.float32), test.batches)
    return compare(Predictions(test.teacher, test.head, test.hiddens), student, test.batches)
