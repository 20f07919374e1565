"""From calibration text to deltas: layer by layer, then the byte budget, then end to end, then how near it came.

Reads top to bottom; each stage is another file's. What a stage has made is kept in `store`, so that an interrupted
run goes on with the next block or epoch and gives the same bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.blockwise.decoder import Decoder
from compressor.blockwise.weights import Overlay, Weights
from compressor.codec import Method, code_matrix
from compressor.evaluate.fidelity import Fidelity, Predictions, compare, last_hiddens
from compressor.fitting.budget import measure, spend
from compressor.fitting.calibration import batched, calibration_text, held_out, scattered
from compressor.fitting.distillation.distill import Distillation, DistillSettings, divergence
from compressor.fitting.distillation.student import Student
from compressor.fitting.distillation.teacher import TeacherTargets
from compressor.fitting.distillation.trainable import Trainable
from compressor.fitting.layers.layerwise import Layerwise, Solver
from compressor.fitting.layers.solvers import AdamWScales, LeastSquares
from compressor.fitting.paper.end_loss import EndLoss
from compressor.fitting.paper.scale_training import Recipe as LayerRecipe
from compressor.fitting.training import Training
from compressor.fitting.weights import weight_with_delta
from compressor.io.checkpoint_store import CheckpointStore, flatten_deltas, unflatten_deltas
from compressor.io.pairs import TensorPair
from deltastore.errors import UsageError
from deltastore.format.matrix import MatrixDelta
from deltastore.progress import progress_bar

OUR_BATCH, PAPER_BATCH = 8, 4  # sequences of one step
LAYER_TOKENS = 32  # per input feature of the widest layer: more of them tell least squares little
LAYER_PART = 4  # the paper: 50 of 200 samples for its layers, 150 for the end
SIGN_ROUNDS = 2
OUR_RATE = 0.01  # of scales, in units of each vector's mean magnitude
SIGN_RATE = 0.003
PAPER_DECAY = 0.01  # AdamW's default
SCATTERED = (
    0.5  # of the tokens that layers are fitted to; other text gains, and the end makes up for the text's own
)
MEASURED = 4  # sequences on which upgrades are measured
OUR_SAMPLES, PAPER_SAMPLES = 4, 8  # fewer leave nothing to fit layers to, to choose by or to judge by


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """What came of it."""

    deltas: Mapping[str, MatrixDelta]  # by name; what no forward reaches is coded from weights alone
    fidelity: Fidelity  # on calibration text that nothing was fitted to
    base: Fidelity  # of the base on the same text: what there was to gain
    unseen: Sequence[Tensor]  # that text, [tokens] int64 each
    num_sequences: int  # of calibration text in all

    def as_json(self) -> dict[str, Any]:
        return {"held_out": self.fidelity.as_json(), "base": self.base.as_json()}


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """One run of all stages."""

    pairs: Mapping[str, TensorPair]  # the matrices to code, each of which differs from the base's
    base: Weights  # with as many rows of the vocabulary as the fine-tune
    finetune: Weights  # with a head of its own where its delta has one
    method: Method
    training: Training
    spare_bytes: int  # beyond one bit per weight
    store: CheckpointStore
    shows: bool = False  # progress on stderr

    def run(self) -> Fitted:
        """Fit, choose and measure.

        Raises:
            CheckpointError: a model that cannot be run block by block, or whose logits are not finite.
            UsageError: text that cannot be had or is too short; settings that do not go together.
        """
        self._check()
        device = self.training.place()
        teacher = Decoder(self.finetune, device, torch.float32)
        sequences = self._text(teacher)
        text = _Split.of(sequences, by_parts=self._is_paper)
        classroom = _Classroom(teacher, teacher.load_head(), self._batch_tokens())
        choosing = classroom.lesson(text.choosing)
        deltas: Mapping[str, MatrixDelta] = self._layers(text, choosing, device)
        if self.training.epochs(self.method):
            deltas = self._end_to_end(deltas, classroom.lesson(text.end), choosing)
        judging = classroom.lesson(text.judging)

        def coded(name: str) -> Tensor | None:
            return weight_with_delta(self.pairs[name], deltas[name]) if name in deltas else None

        reached = _fidelity(Overlay(self.finetune, coded), judging, device)
        of_base = _fidelity(self.base, judging, device)
        return Fitted(deltas, reached, of_base, text.judging, len(sequences))

    @property
    def _num_blocks(self) -> int:
        return int(self.finetune.config.get("num_hidden_layers") or 0)

    @property
    def _is_paper(self) -> bool:
        return self.training.solver == "adamw"

    def _check(self) -> None:
        if self._is_paper and self.method == "both":
            raise UsageError(
                "--solver adamw trains one vector or one number per matrix: give --method per-axis or scalar with it"
            )
        if self._is_paper and self.spare_bytes:
            raise UsageError("--budget above 1 needs --solver lstsq, which finds what more bytes are worth")
        samples, least = self.training.calibration.samples, PAPER_SAMPLES if self._is_paper else OUR_SAMPLES
        if samples < least:
            raise UsageError(
                f"--samples {samples}: give at least {least}, because a part of them is held out"
            )

    def _text(self, teacher: Decoder) -> list[Tensor]:
        kept = self.store.load_tensors("text")
        if kept is None:
            calibration = self.training.calibration
            tokens = calibration.samples * calibration.length if calibration.source == "self" else 0
            with progress_bar(tokens, "sampling text", "token", self.shows and tokens > 0) as bar:
                sequences = calibration_text(calibration, teacher, bar.update)
            if len(sequences) < calibration.samples:
                print(
                    f"{calibration.source}: its text makes {len(sequences)} sequences of {calibration.length} tokens, "
                    f"fewer than --samples {calibration.samples}: fitting to those",
                    file=sys.stderr,
                )
            kept = {"ids": torch.stack(sequences)}
            self.store.save_tensors("text", kept)
        return list(kept["ids"])

    def _batch_tokens(self) -> int:
        return (PAPER_BATCH if self._is_paper else OUR_BATCH) * self.training.calibration.length

    def _student(self, deltas: Mapping[str, MatrixDelta], device: torch.device) -> Student:
        relative = not self._is_paper
        return Student(
            self.finetune,
            self.pairs,
            {name: Trainable.of(deltas[name], device, relative=relative) for name in self.pairs},
            device,
        )

    def _layers(self, text: _Split, choosing: TeacherTargets, device: torch.device) -> dict[str, MatrixDelta]:
        """Every matrix's delta, layer by layer, and with more bytes where the budget has some."""
        kept = self.store.load_deltas("layers")
        if kept is not None:
            return {name: delta for name, (delta,) in kept.items()}
        layerwise = Layerwise(self.pairs, self.finetune, self.method, device)
        if self.method != "scalar" or not self._is_paper:  # BitDelta trains end to end alone
            self._fit_layers(layerwise, text, choosing)
        deltas = {name: MatrixDelta((layerwise.delta(name),)) for name in self.pairs}
        if self.spare_bytes:
            student = self._student(deltas, device)
            upgrades = {name: options[1:] for name, options in layerwise.fitted.items()}
            upgrades |= self._embedding_upgrades(student, deltas)
            gains = measure(student, choosing.first(MEASURED), upgrades)
            deltas = spend(self.spare_bytes, deltas, upgrades, gains)
        self.store.save_deltas("layers", {name: [delta] for name, delta in deltas.items()})
        return deltas

    def _fit_layers(self, layerwise: Layerwise, text: _Split, choosing: TeacherTargets) -> None:
        """Begin with the first block that is not kept."""
        first = 0
        while (kept := self.store.load_deltas(f"block-{first}")) is not None:
            layerwise.fitted.update(kept)
            first += 1
        batches, solver = self._layer_text(text, choosing, layerwise.device)
        with progress_bar(self._num_blocks, "fitting layers", "block", self.shows) as bar:
            bar.update(first)

            def on_block(index: int, fitted: Mapping[str, Sequence[MatrixDelta]]) -> None:
                self.store.save_deltas(f"block-{index}", fitted)
                bar.update()

            layerwise.run(batches, solver, first, on_block)

    def _layer_text(
        self, text: _Split, choosing: TeacherTargets, device: torch.device
    ) -> tuple[list[Tensor], Solver]:
        """What layers are fitted to, in batches, and how."""
        tokens = self._batch_tokens()
        if not self._is_paper:
            widest = max((pair.shape[1] for pair in self.pairs.values()), default=1)
            enough = math.ceil(LAYER_TOKENS * widest / self.training.calibration.length)
            rounds = SIGN_ROUNDS if self.training.refine_signs else 0
            sequences = scattered(text.layers[:enough], choosing.teacher.num_embeddings, SCATTERED)
            return batched(sequences, tokens), LeastSquares(self.method, rounds, self.spare_bytes > 0)
        held_out = choosing.batches
        end_loss = None
        if self.training.axis_loss == "end":
            end_loss = EndLoss(self.finetune, self.pairs, held_out, device)
        recipe = LayerRecipe(
            batch_rows=self.training.calibration.length,
            lr=self.training.rate,
            cosine=self.training.cosine,
            scalar=self.training.with_scalar,
        )
        solver = AdamWScales(recipe, sum(ids.numel() for ids in held_out), end_loss)
        return [*batched(text.layers, tokens), *held_out], solver

    def _embedding_upgrades(
        self, student: Student, deltas: Mapping[str, MatrixDelta]
    ) -> dict[str, list[MatrixDelta]]:
        """A second plane of the embedding, which has no inputs to be fitted to, from weights alone."""
        name = student.decoder.embedding_name
        if name is None or name not in deltas:
            return {}
        delta = deltas[name]
        second = code_matrix(_Remainder(self.pairs[name], delta), self.method).delta
        return {name: [MatrixDelta((*delta.planes, second))]} if second.axis == delta.axis else {}

    def _end_to_end(
        self, deltas: Mapping[str, MatrixDelta], lesson: TeacherTargets, choosing: TeacherTargets
    ) -> Mapping[str, MatrixDelta]:
        """Distil; ours keeps the epoch that does best on text held out, the paper's the last one."""
        recipe, student = self._recipe(), self._student(deltas, lesson.teacher.device)
        if not student.trained:
            return deltas
        run, begun = Distillation(student, lesson, recipe), 0
        best, least = student.stored(), divergence(student, choosing)
        if (state := self.store.load_state("end")) is not None:
            run.restore(state["run"])
            begun, least = state["epochs"], state["least"]
            best = {name: delta for name, (delta,) in unflatten_deltas(state["best"]).items()}
        steps = recipe.epochs * len(lesson.batches)
        with progress_bar(steps, "distilling", "step", self.shows) as bar:
            bar.update(begun * len(lesson.batches))
            for epoch in range(begun, recipe.epochs):
                run.epoch(epoch, bar.update)
                reached = divergence(student, choosing)
                if self._is_paper or reached < least:
                    best, least = student.stored(), reached
                own = flatten_deltas({name: [delta] for name, delta in best.items()})
                state = {"run": run.state(), "epochs": epoch + 1, "least": least, "best": own}
                self.store.save_state("end", state)
        return best

    def _recipe(self) -> DistillSettings:
        epochs = self.training.epochs(self.method)
        if self._is_paper:
            return DistillSettings(
                "squared", epochs, self.training.rate, cosine=False, weight_decay=PAPER_DECAY
            )
        return DistillSettings(
            "kl", epochs, OUR_RATE, sign_rate=SIGN_RATE if self.training.learn_signs else 0.0
        )


def _fidelity(weights: Weights, judging: TeacherTargets, device: torch.device) -> Fidelity:
    """How near a model is to the teacher."""
    student = Predictions.of(Decoder(weights, device, torch.float32), judging.batches)
    return compare(Predictions(judging.teacher, judging.head, judging.hiddens), student, judging.batches)


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """Calibration text by what it is for."""

    layers: list[Tensor]
    end: list[Tensor]
    choosing: list[Tensor]  # between axes, epochs and upgrades
    judging: list[Tensor]  # for nothing else but the fidelity

    @classmethod
    def of(cls, sequences: Sequence[Tensor], *, by_parts: bool) -> _Split:
        """With `by_parts` layers and end have text of their own, as in the paper; else both have all of it."""
        train, held = held_out(sequences)
        cut = len(train) // LAYER_PART
        layers, end = (train[:cut], train[cut:]) if by_parts else (train, train)
        return cls(layers, end, held[::2], held[1::2])


@dataclass(frozen=True, slots=True, eq=False)
class _Classroom:
    """The fine-tune as a teacher."""

    teacher: Decoder
    head: nn.Module
    batch_tokens: int

    def lesson(self, sequences: Sequence[Tensor]) -> TeacherTargets:
        batches = batched(sequences, self.batch_tokens)
        return TeacherTargets(batches, last_hiddens(self.teacher, batches), self.teacher, self.head)


@dataclass(frozen=True, slots=True, eq=False)
class _Remainder:
    """What a delta leaves of a difference."""

    pair: TensorPair
    delta: MatrixDelta

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pair.shape

    def block(self, rows: slice) -> Tensor:
        return self.pair.block(rows).sub_(self.delta.dense(rows))
