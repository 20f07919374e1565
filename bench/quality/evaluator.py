"""Evaluate deltas of one fine-tune: fidelity on text that no method was fitted to, and the score in its task.

Knows artifacts and checkpoints; nothing of how a delta was made.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.quality.text import Amount, Texts
from compressor.blockwise.decoder import Decoder
from compressor.blockwise.delta_model import DeltaModel, base_with_added_rows
from compressor.blockwise.weights import Weights
from compressor.convert.merge import MergeConfig, merge
from compressor.evaluate.evaluation import BATCH_TOKENS
from compressor.evaluate.fidelity import Fidelity, Predictions, compare
from compressor.fitting.calibration import Calibration, batched, calibration_text
from compressor.io.pairs import pair_up
from deltastore.base.checkpoint import Checkpoint
from deltastore.format.artifact import Artifact
from peraxis.demo.score import exact_match
from peraxis.demo.tasks import Item, Task

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Scores:
    """Fidelity to the fine-tune, and the score in its task."""

    domain: Fidelity  # on text of the fine-tune's domain
    general: Fidelity  # on text of the base's domain
    score: float  # share of the task's items that are correct

    def as_json(self) -> dict[str, Any]:
        return {"domain": self.domain.as_json(), "general": self.general.as_json(), "score": self.score}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Scores:
        """Read the document of `as_json`, which has six digits."""
        return cls(Fidelity(**document["domain"]), Fidelity(**document["general"]), document["score"])


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutText:
    """One text, and the fine-tune's predictions on it."""

    batches: Sequence[Tensor]  # [sequences, tokens] int64 each
    expected: Predictions

    @classmethod
    def of(cls, teacher: Decoder, text: Path, amount: Amount) -> HeldOutText:
        sequences = calibration_text(Calibration(str(text), amount.test_samples, amount.length), teacher)
        batches = batched(sequences, BATCH_TOKENS)
        return cls(batches, Predictions.of(teacher, batches))

    def fidelity(self, student: Weights) -> Fidelity:
        """Compare a model, computed in float32, with the fine-tune."""
        return compare(
            self.expected, Predictions.of(Decoder(student, CPU, torch.float32), self.batches), self.batches
        )


@dataclass(frozen=True, slots=True, eq=False)
class Evaluator:
    """Evaluates the base, the fine-tune and any delta on the same texts and items."""

    base: Path
    finetune: Path
    task: Task
    items: list[Item]
    domain: HeldOutText
    general: HeldOutText

    @classmethod
    def of(cls, base: Path, finetune: Path, task: Task, texts: Texts, amount: Amount) -> Evaluator:
        teacher = Decoder(Checkpoint.open(finetune), CPU, torch.float32)
        items = task.items("test", amount.test_items)
        held_out = (HeldOutText.of(teacher, text, amount) for text in (texts.domain_test, texts.general_test))
        return cls(base, finetune, task, items, *held_out)

    def of_delta(self, artifact: Path) -> Scores:
        """Measure base and delta in float32, and the score of the checkpoint that `peraxis merge` writes."""
        with Artifact.open(artifact) as opened:
            variant = DeltaModel(Checkpoint.open(self.base), opened)
            domain, general = self.domain.fidelity(variant), self.general.fidelity(variant)
        with tempfile.TemporaryDirectory(prefix="peraxis-quality-") as scratch:
            merged = Path(scratch) / "merged"
            merge(MergeConfig(str(self.base), artifact, merged))
            return Scores(domain, general, exact_match(merged, self.task, self.items))

    def of_base(self) -> Scores:
        """Evaluate the base, the lower bound."""
        base = Checkpoint.open(self.base)
        longer = base_with_added_rows(pair_up(base, Checkpoint.open(self.finetune)))
        score = exact_match(self.base, self.task, self.items)
        return Scores(self.domain.fidelity(longer), self.general.fidelity(longer), score)

    def of_finetune(self) -> Scores:
        """Evaluate the fine-tune, the upper bound."""
        itself = Checkpoint.open(self.finetune)
        score = exact_match(self.finetune, self.task, self.items)
        return Scores(self.domain.fidelity(itself), self.general.fidelity(itself), score)
