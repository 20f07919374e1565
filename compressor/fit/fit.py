"""Fit deltas to calibration text: the layer stage, spending of spare bytes, the end-to-end stage, and a test.

The layer stage is stages 1 and 2 of the paper's Algorithm 1, and the end-to-end stage is its stage 3. Between them,
spare bytes go to the matrices where they help most. The test gives the fidelity on text that nothing was fitted to. A
`Recipe` has the values in which recipes differ, and `TextSplit` says which text each stage sees. A `CheckpointStore`
keeps the results of a stage, so that an interrupted run continues with the next block or epoch and gives the same
bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.config import FitSettings, Method
from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import Overlay, Weights, weight_with_delta
from compressor.fidelity import Fidelity, Predictions, compare
from compressor.fit import least_squares, paper
from compressor.fit.budget import embedding_upgrades, measure, spend
from compressor.fit.calibration import calibration_text, split_text
from compressor.fit.distill import Distillation, Teacher, TeacherTargets, divergence
from compressor.fit.layerwise import LayerStage, Layerwise
from compressor.fit.recipe import LayerStageContext, Recipe
from compressor.fit.student import Student
from compressor.fit.trainable import Trainable
from compressor.pairs import TensorPair
from compressor.resume import CheckpointStore, FittedMatrix, matrices_of, state_of
from deltastore.console import progress_bar
from deltastore.errors import UsageError
from deltastore.format.matrix import MatrixDelta

RECIPES = {"ours": least_squares.recipe, "paper": paper.recipe}
MEASURED_SEQUENCES = 4  # on which upgrades are measured


def recipe_of(fit_settings: FitSettings, method: Method) -> Recipe:
    """Return the recipe that fits deltas of `method` by the settings of one run.

    Raises:
        UsageError: settings that do not go together.
    """
    return RECIPES[fit_settings.recipe](fit_settings, method)


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
    """Calibration text by its use; sequences are ``[tokens]`` int64.

    Validation and test text are the last tenth. With `ours`, the end-to-end stage sees all the rest, and the layer
    stage the first part of the same sequences, in which `least_squares.layer_stage` replaces half of the tokens by
    random ids. With `paper`, the layer stage sees the first quarter of the rest, and the end-to-end stage the others.
    """

    layer_text: list[Tensor]
    end_to_end: list[Tensor]
    validation: list[Tensor]  # to choose between axes, epochs and upgrades
    test: list[Tensor]  # for the fidelity alone

    @classmethod
    def of(cls, sequences: Sequence[Tensor], recipe: Recipe, widest: int) -> TextSplit:
        """Split off validation and test text, and give the other sequences to the stages as the recipe says."""
        train, validation, test = split_text(sequences)
        layer_text, end_to_end = recipe.split(len(train), widest)
        return cls(train[layer_text], train[end_to_end], validation, test)


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """One run of all stages."""

    pairs: Mapping[str, TensorPair]  # the matrices to code, each of which differs from the base's
    base: Weights  # with as many rows of the vocabulary as the fine-tune
    finetune: Weights  # with a head of its own where its delta has one
    student: Weights  # the fine-tune with its stacks of experts as they are coded, from weights alone
    fit_settings: FitSettings
    method: Method
    recipe: Recipe  # of these settings and this method
    spare_bytes: int  # beyond one bit per weight
    store: CheckpointStore
    shows_progress: bool = False  # on stderr

    def run(self) -> Fitted:
        """Fit, choose and measure.

        Raises:
            CheckpointError: a model that cannot be run block by block, or whose logits are not finite.
            UsageError: text that cannot be had or is too short; too few samples, or no such device.
        """
        samples, least = self.fit_settings.calibration.samples, self.recipe.min_samples
        if samples < least:
            raise UsageError(
                f"`samples` {samples}: give at least {least}, because some are validation and test text"
            )
        decoder = Decoder(self.finetune, self.fit_settings.torch_device(), torch.float32)
        sequences = self._calibration_text(decoder)
        widest = max((pair.shape[1] for pair in self.pairs.values()), default=1)
        text = TextSplit.of(sequences, self.recipe, widest)
        teacher = Teacher(decoder, decoder.load_head(), self.recipe.batch_tokens)
        validation = teacher.targets(text.validation)

        deltas = self._stored_deltas()
        if deltas is None:
            fitted = self._fit_layers(text.layer_text, validation)
            deltas = self._spend(fitted, validation)
        if self.recipe.distillation.epochs:
            deltas = self._distill(deltas, teacher.targets(text.end_to_end), validation)
        fidelity, base = self._test(deltas, teacher.targets(text.test))
        return Fitted(deltas, fidelity, base, text.test, len(sequences))

    def _calibration_text(self, finetune: Decoder) -> list[Tensor]:
        stored = self.store.load("text")
        if stored is None:
            calibration = self.fit_settings.calibration
            tokens = calibration.samples * calibration.length if calibration.text == "self" else 0
            with progress_bar(tokens, "sampling text", "token", self.shows_progress and tokens > 0) as bar:
                sequences = calibration_text(calibration, finetune, bar.update, self.base.path)
            if len(sequences) < calibration.samples:
                print(
                    f"{calibration.text}: its text makes {len(sequences)} sequences of {calibration.length} tokens, "
                    f"fewer than the {calibration.samples} that were asked for: fitting to those",
                    file=sys.stderr,
                )
            stored = torch.stack(sequences)
            self.store.save("text", stored)
        return list(stored)

    def _stored_deltas(self) -> Mapping[str, MatrixDelta] | None:
        """Return the deltas that an interrupted run began to distill; None if it did not get so far."""
        stored = self.store.load_matrices("layers")
        return None if stored is None else {name: matrix.delta for name, matrix in stored.items()}

    def _fit_layers(self, sequences: Sequence[Tensor], validation: TeacherTargets) -> dict[str, FittedMatrix]:
        """Fit layer by layer, from the first block on that the store lacks; other matrices from weights alone."""
        layerwise = Layerwise(self.pairs, self.finetune, self.student, self.method, validation.teacher.device)
        if self.recipe.layer_stage is not None:
            context = LayerStageContext(
                finetune=self.finetune,
                pairs=self.pairs,
                sequences=sequences,
                validation=validation.batches,
                num_ids=validation.teacher.num_embeddings,
                with_upgrades=self.spare_bytes > 0,
                device=layerwise.device,
            )
            self._run_layerwise(layerwise, self.recipe.layer_stage(context))
        return {
            name: layerwise.fitted.get(name) or FittedMatrix(layerwise.delta(name)) for name in self.pairs
        }

    def _run_layerwise(self, layerwise: Layerwise, stage: LayerStage) -> None:
        first = 0
        while (stored := self.store.load_matrices(f"block-{first}")) is not None:
            layerwise.fitted.update(stored)
            first += 1
        num_blocks = int(self.finetune.config.get("num_hidden_layers") or 0)
        with progress_bar(num_blocks, "fitting layers", "block", self.shows_progress) as bar:
            bar.update(first)

            def on_block(index: int, fitted: Mapping[str, FittedMatrix]) -> None:
                self.store.save_matrices(f"block-{index}", fitted)
                bar.update()

            layerwise.run(stage, first, on_block)

    def _spend(
        self, fitted: Mapping[str, FittedMatrix], validation: TeacherTargets
    ) -> Mapping[str, MatrixDelta]:
        """Allocate spare bytes to the upgrades that save most KL; return one delta per matrix."""
        deltas = {name: matrix.delta for name, matrix in fitted.items()}
        if self.spare_bytes:
            student = self._student(deltas, validation.teacher.device)
            upgrades = {name: matrix.upgrades for name, matrix in fitted.items() if matrix.upgrades}
            upgrades |= embedding_upgrades(student, deltas, self.method)
            kl_saved = measure(student, validation.first(MEASURED_SEQUENCES), upgrades)
            deltas = spend(self.spare_bytes, deltas, upgrades, kl_saved)
        self.store.save_matrices("layers", {name: FittedMatrix(delta) for name, delta in deltas.items()})
        return deltas

    def _distill(
        self, deltas: Mapping[str, MatrixDelta], targets: TeacherTargets, validation: TeacherTargets
    ) -> Mapping[str, MatrixDelta]:
        """Train end to end; return the deltas of the best epoch on validation text, or of the last one."""
        settings, student = self.recipe.distillation, self._student(deltas, targets.teacher.device)
        if not student.trained:
            return deltas
        run, num_done = Distillation(student, targets, settings), 0
        best, least = student.stored(), divergence(student, validation)
        if (state := self.store.load("end_to_end")) is not None:
            run.restore(state["run"])
            num_done, least = state["epochs"], state["least"]
            best = {name: matrix.delta for name, matrix in matrices_of(state["best"]).items()}
        num_batches = len(targets.batches)
        with progress_bar(settings.epochs * num_batches, "distilling", "step", self.shows_progress) as bar:
            bar.update(num_done * num_batches)
            for epoch in range(num_done, settings.epochs):
                run.epoch(epoch, bar.update)
                reached = divergence(student, validation)
                if reached < least or not settings.keeps_best:
                    best, least = student.stored(), reached
                kept = state_of({name: FittedMatrix(delta) for name, delta in best.items()})
                state = {"run": run.state(), "epochs": epoch + 1, "least": least, "best": kept}
                self.store.save("end_to_end", state)
        return best

    def _test(self, deltas: Mapping[str, MatrixDelta], test: TeacherTargets) -> tuple[Fidelity, Fidelity]:
        """Return the fidelity of the fine-tune with `deltas` for its matrices, and that of the base."""

        def coded(name: str) -> Tensor | None:
            return weight_with_delta(self.pairs[name], deltas[name]) if name in deltas else None

        return _fidelity(Overlay(self.student, coded), test), _fidelity(self.base, test)

    def _student(self, deltas: Mapping[str, MatrixDelta], device: torch.device) -> Student:
        relative = self.recipe.distillation.relative
        trainable = {name: Trainable.of(deltas[name], device, relative=relative) for name in self.pairs}
        return Student(self.student, self.pairs, trainable, device)


def _fidelity(weights: Weights, test: TeacherTargets) -> Fidelity:
    """Measure the fidelity of a model on the teacher's text."""
    student = Predictions.of(Decoder(weights, test.teacher.device, torch.float32), test.batches)
    return compare(Predictions(test.teacher, test.head, test.hiddens), student, test.batches)
