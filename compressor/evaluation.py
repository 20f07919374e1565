"""Measure base and delta against the fine-tune: fidelity on text, and scores in tasks.

The base's distance from the fine-tune is the scale for the delta's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compressor.adapters import finetune_directory
from compressor.config import Calibration, RivalName, check_rival
from compressor.convert.merge import MergeConfig, merge
from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import DeltaModel, base_with_added_rows
from compressor.fidelity import Fidelity, Predictions, compare
from compressor.fit.calibration import batched, calibration_text
from compressor.pairs import Pairs, pair_up
from compressor.rival import BATCH_TOKENS, Rival, lora_of, recovered_gain
from compressor.tasks import Score, Tasks
from deltastore.checkpoint import Checkpoint
from deltastore.console import identify_base, progress_bar, rounded
from deltastore.errors import CheckpointError, StorageFull, UsageError, shown
from deltastore.format.artifact import Artifact
from deltastore.format.validate import check_artifact, check_base
from deltastore.hub import checkpoint_directory

if TYPE_CHECKING:
    from compressor.decoder.weights import Weights

SEED = 0x5EED  # of sampled text; not the default of `compress`, so the delta was not fitted to the same text
MODELS = ("base", "finetune", "delta")


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Settings of one evaluation."""

    base: str  # a directory or a hub id
    finetune: str  # the same, or an adapter's
    delta: Path
    text: str  # as `Calibration` takes it
    samples: int
    tasks: tuple[str, ...] = ()
    progress: bool = False
    rival: RivalName | None = None  # measured on the text too, and not in tasks

    def __post_init__(self) -> None:
        check_rival(self.rival)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Distances of base and delta from the fine-tune."""

    base: Fidelity
    delta: Fidelity
    num_sequences: int
    foreign: tuple[str, ...]  # tensors that the delta carries whole and that differ from the fine-tune's
    scores: Mapping[str, Mapping[str, Score]]  # by task, then by MODELS
    rival: Rival | None = None  # where it was asked for

    @property
    def kept(self) -> float | None:
        """The recovered gain, ``1 - KL(delta) / KL(base)``; None if base and fine-tune agree."""
        return recovered_gain(self.delta.kl, self.base.kl)

    def as_json(self) -> dict[str, Any]:
        return {
            "base": self.base.as_json(),
            "delta": self.delta.as_json(),
            "kept": None if self.kept is None else rounded(self.kept),
            "num_sequences": self.num_sequences,
            "foreign": list(self.foreign),
            "tasks": {
                task: {model: dict(score.metrics) for model, score in scores.items()}
                for task, scores in self.scores.items()
            },
            **({} if self.rival is None else {"rival": self.rival.as_json()}),
        }


def evaluate(config: EvalConfig) -> Evaluation:
    """Measure base and delta against the fine-tune, in float32 and block by block; tasks load whole models.

    A base with a shorter vocabulary is measured with the fine-tune's added rows.

    Raises:
        ArtifactError, BaseMismatch: a delta that is malformed, or made from another base.
        CheckpointError: checkpoints that are no pair, or not this delta's; a model that cannot be run.
        StorageFull: too little disk for the merged model, which tasks need.
        UsageError: text or tasks that cannot be loaded.
    """
    base = checkpoint_directory(config.base)
    with finetune_directory(config.finetune, base) as finetune:
        return _evaluate(config, (base, finetune))


def _evaluate(config: EvalConfig, directories: Sequence[Path]) -> Evaluation:
    base, finetune = map(Checkpoint.open, directories)
    pairs = pair_up(base, finetune)
    # By the base's names.
    finetune = pairs.finetune
    with Artifact.open(config.delta) as artifact:
        check_artifact(artifact)
        check_base(artifact, identify_base(base, config.progress))
        variant = DeltaModel(base, artifact)
        _check_finetune(pairs, variant)
        tasks = Tasks.load(config.tasks) if config.tasks else None
        lora = None if config.rival is None else lora_of(pairs, variant, _device(), config.progress)
        with _errors_of_text():
            students = (base_with_added_rows(pairs), variant, *([] if lora is None else [lora.weights]))
            num_sequences, (of_base, of_delta, *of_lora) = _measure(finetune, students, config)
        foreign = tuple(_foreign(pairs, artifact))
        rival = None if lora is None else Rival.of(lora, artifact, of_lora[0], of_base.kl)
    # Its factors are as large as the delta, and tasks load whole models.
    del lora, students
    scores = {} if tasks is None else _scores(tasks, directories, config)
    return Evaluation(of_base, of_delta, num_sequences, foreign, scores, rival)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _measure(
    finetune: Checkpoint, students: Sequence[Weights], config: EvalConfig
) -> tuple[int, list[Fidelity]]:
    """Return the number of sequences of text and the students' fidelity on them."""
    if config.text == "none":
        raise UsageError("`text` none: give a .txt or .jsonl file, a data set's name, or self")
    device = _device()
    teacher = Decoder(finetune, device, torch.float32)
    sequences = calibration_text(
        Calibration(config.text, config.samples, seed=SEED), teacher, base=students[0].path
    )
    batches: Sequence[Tensor] = batched(sequences, BATCH_TOKENS)
    total = teacher.num_blocks * (1 + len(students))
    with progress_bar(total, "comparing", "block", config.progress) as bar:

        def on_block() -> None:
            bar.update(1)

        expected = Predictions.of(teacher, batches, on_block)
        measured = [
            compare(
                expected, Predictions.of(Decoder(student, device, torch.float32), batches, on_block), batches
            )
            for student in students
        ]
    return len(sequences), measured


def _check_finetune(pairs: Pairs, variant: DeltaModel) -> None:
    """Refuse a delta that cannot have been made from this fine-tune."""
    where, finetune = variant.artifact.where, pairs.finetune.path
    remedy = "give the fine-tune that it was made from"
    if pairs.tied != variant.artifact.manifest.tied:
        raise CheckpointError(f"{where}: it ties the output head otherwise than {finetune}: {remedy}")
    for pair in pairs.tensors:
        shape = variant.shape(pair.name)
        if shape != pair.tensor.shape:
            raise CheckpointError(
                f"{where}: its tensor {shown(pair.name)} has shape {list(shape)} and that of {finetune} "
                f"{list(pair.tensor.shape)}: {remedy}"
            )


def _foreign(pairs: Pairs, artifact: Artifact) -> Iterator[str]:
    """Yield tensors that the delta carries whole and that differ from the fine-tune's."""
    for pair in pairs.tensors:
        spec = artifact.manifest.tensors.get(pair.name)
        if spec is not None and spec.codec == "whole":
            ours, theirs = artifact.whole(pair.name), pair.finetune.read(pair.tensor.name)
            if not torch.equal(ours, theirs.to(ours.dtype)):
                yield pair.name


def _scores(tasks: Tasks, directories: Sequence[Path], config: EvalConfig) -> dict[str, dict[str, Score]]:
    with tempfile.TemporaryDirectory(prefix="peraxis-eval-") as scratch:
        merged = Path(scratch) / "delta"
        with _errors_of_scratch():
            merge(MergeConfig(config.base, config.delta, merged))
        by_model = []
        with progress_bar(len(MODELS), "tasks", "model", config.progress) as bar:
            for directory in (*directories, merged):
                by_model.append(tasks.score(directory, config.progress))
                bar.update()
    return {
        task: {model: scores[task] for model, scores in zip(MODELS, by_model, strict=True)}
        for task in by_model[0]
    }


@contextmanager
def _errors_of_text() -> Iterator[None]:
    """Name a way out of errors of running a model by blocks; an evaluation needs text."""
    try:
        yield
    except CheckpointError as error:
        way_out = "merge it and compare whole models"
        raise CheckpointError(str(error).replace("give `text='none'`", way_out)) from error


@contextmanager
def _errors_of_scratch() -> Iterator[None]:
    """Name TMPDIR in errors of `merge`, whose output here is a temporary directory."""
    try:
        yield
    except StorageFull as error:
        raise StorageFull(str(error).replace("choose another `out`", "set TMPDIR to another disk")) from error
