"""How good a delta of one fine-tune is: on text that nothing was fitted to, and at its task.

Knows artifacts and what they are compared with; nothing of how they were made.
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
from demo.score import exact_match
from demo.tasks import Item, Task

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is kept of a fine-tune."""

    domain: Fidelity  # on text like what the fine-tune learned
    general: Fidelity  # on text like what the base learned
    score: float  # share of the task's items that are answered right

    def as_json(self) -> dict[str, Any]:
        return {"domain": self.domain.as_json(), "general": self.general.as_json(), "score": self.score}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Verdict:
        """What `as_json` gave, with its six digits."""
        return cls(Fidelity(**document["domain"]), Fidelity(**document["general"]), document["score"])


@dataclass(frozen=True, slots=True, eq=False)
class Exam:
    """One text, and what the fine-tune predicts on it."""

    batches: Sequence[Tensor]  # [sequences, tokens] int64 each
    expected: Predictions

    @classmethod
    def of(cls, teacher: Decoder, text: Path, amount: Amount) -> Exam:
        sequences = calibration_text(Calibration(str(text), amount.test_samples, amount.length), teacher)
        batches = batched(sequences, BATCH_TOKENS)
        return cls(batches, Predictions.of(teacher, batches))

    def fidelity(self, student: Weights) -> Fidelity:
        """Of a student in float32."""
        return compare(
            self.expected, Predictions.of(Decoder(student, CPU, torch.float32), self.batches), self.batches
        )


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """Of everything that stands for one fine-tune."""

    base: Path
    finetune: Path
    task: Task
    items: list[Item]
    domain: Exam
    general: Exam

    @classmethod
    def of(cls, base: Path, finetune: Path, task: Task, texts: Texts, amount: Amount) -> Judge:
        teacher = Decoder(Checkpoint.open(finetune), CPU, torch.float32)
        items = task.items("test", amount.test_items)
        exams = (Exam.of(teacher, text, amount) for text in (texts.domain_test, texts.general_test))
        return cls(base, finetune, task, items, *exams)

    def of_delta(self, artifact: Path) -> Verdict:
        """Fidelity of base and delta in float32; the score is that of the checkpoint that `peraxis merge` writes."""
        with Artifact.open(artifact) as opened:
            variant = DeltaModel(Checkpoint.open(self.base), opened)
            domain, general = self.domain.fidelity(variant), self.general.fidelity(variant)
        with tempfile.TemporaryDirectory(prefix="peraxis-quality-") as scratch:
            merged = Path(scratch) / "merged"
            merge(MergeConfig(str(self.base), artifact, merged))
            return Verdict(domain, general, exact_match(merged, self.task, self.items))

    def of_base(self) -> Verdict:
        """What there was to gain."""
        base = Checkpoint.open(self.base)
        longer = base_with_added_rows(pair_up(base, Checkpoint.open(self.finetune)))
        score = exact_match(self.base, self.task, self.items)
        return Verdict(self.domain.fidelity(longer), self.general.fidelity(longer), score)

    def of_finetune(self) -> Verdict:
        """What there is to keep."""
        itself = Checkpoint.open(self.finetune)
        score = exact_match(self.finetune, self.task, self.items)
        return Verdict(self.domain.fidelity(itself), self.general.fidelity(itself), score)
