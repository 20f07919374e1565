"""The methods that the quality bench compares, the text they are fitted to, and the evaluation of their deltas.

A compression runs in a process of its own. Evaluation text is other text than any method was fitted to; files have the
forms that `peraxis compress --calibration` reads.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bench.process import memory_of, reset_peak
from compressor.config import Calibration, CompressConfig, FitSettings, Method, RecipeName
from compressor.convert.merge import MergeConfig, merge
from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import DeltaModel, Weights, base_with_added_rows
from compressor.fidelity import Fidelity, Predictions, compare
from compressor.fit.calibration import batched, calibration_text
from compressor.pairs import pair_up
from compressor.pipeline import compress
from compressor.rival import BATCH_TOKENS
from deltastore.architecture import architecture
from deltastore.checkpoint import Checkpoint
from deltastore.format.artifact import Artifact
from peraxis.demo.measure import exact_match
from peraxis.demo.tasks import MAX_FILE_BYTES, Item, Split, Task, is_held_out, read_sources

# Packages of the standard library that the base is not trained on.
UNSEEN = ("idlelib", "lib2to3")
# One in so many of the base's training sources is kept out of calibration text.
OWN_PART = 10
# Fine-tunes are trained on items of seed 0.
TASK_SEED = 1


@dataclass(frozen=True, slots=True)
class Amount:
    """Amounts of text, in sequences of one length."""

    length: int = 192  # tokens
    samples: int = 256  # to fit to, those included that the compressor holds out for its choices
    test_samples: int = 64
    test_items: int = 300  # of the task, that are scored


@dataclass(frozen=True, slots=True)
class Texts:
    """The text files of one fine-tune."""

    domain: Path  # items of its task, of words that it learned
    general: Path  # pieces of sources
    domain_test: Path  # items of words that it never saw
    general_test: Path  # pieces of other sources


def write_texts(directory: Path, task: Task, amount: Amount) -> Texts:
    """Write the four files of a task's fine-tune; the same for the same arguments and standard library.

    Raises:
        UsageError: this Python comes without the sources of its library.
    """
    texts = Texts(*(directory / f"{task.name}-{name}.jsonl" for name in Texts.__slots__))
    own = read_sources()
    seen = [source for number, source in enumerate(own) if number % OWN_PART]
    _write(texts.domain, task_records(task, "train", amount.samples * amount.length))
    _write(texts.domain_test, task_records(task, "test", amount.test_samples * amount.length))
    _write(texts.general, _pieces(seen, amount.samples, amount.length))
    _write(
        texts.general_test, _pieces(unseen_sources() or own[::OWN_PART], amount.test_samples, amount.length)
    )
    return texts


def task_records(task: Task, split: Split, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield records of a split's items, enough for sequences of so many tokens in all.

    A letter is at least one token. The end of a sequence cuts its last record off, hence twice as many.
    """
    at_a_time = sum(map(is_held_out, task.words))
    items = (item for seed in count(TASK_SEED) for item in task.items(split, at_a_time, seed))
    written = 0
    while written < 2 * num_tokens:
        item = next(items)
        written += len(item.prompt) + len(item.answer)
        yield _record(item)


def unseen_sources(stdlib: Path | None = None) -> list[bytes]:
    """Return Python sources that the demo's base was not trained on; empty if Python comes without them.

    Args:
        stdlib: a folder to read instead of this interpreter's standard library.
    """
    root = stdlib or Path(sysconfig.get_paths()["stdlib"])
    paths = (path for name in UNSEEN for path in sorted((root / name).rglob("*.py")))
    return [path.read_bytes() for path in paths if path.stat().st_size <= MAX_FILE_BYTES]


def _record(item: Item) -> dict[str, Any]:
    """Return an item in the form of fine-tuning data."""
    if item.messages is None:
        return {"prompt": item.prompt, "completion": item.answer}
    return {"messages": [*item.messages, {"role": "assistant", "content": item.answer}]}


def _pieces(sources: list[bytes], num_pieces: int, length: int) -> Iterator[dict[str, str]]:
    """Yield random pieces of `length` letters; each, with the tokenizer's leading tokens, fills one sequence."""
    text = "\n".join(source.decode("utf-8", "replace") for source in sources)
    rng = random.Random(length)
    for _ in range(num_pieces):
        start = rng.randrange(len(text) - length)
        yield {"text": text[start : start + length]}


def _write(path: Path, records: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


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


Text = Literal["none", "self", "in-domain", "general"]  # that a delta is fitted to
# Before the clock starts.
IMPORTED = ("bench.quality_runs", "compressor.fit.fit", "transformers.models.llama.modeling_llama")


@dataclass(frozen=True, slots=True)
class Run:
    """One way to make a delta."""

    method: str  # what tables call it
    text: Text
    delta: Method = "both"
    recipe: RecipeName = "ours"
    rate: float = 1e-4  # of the paper's recipe
    distill_epochs: int | None = None
    embeddings: Literal["compress", "whole"] = "whole"
    budget: float = 1.0

    @property
    def name(self) -> str:
        """A unique name for the run's files."""
        rate = f"-{self.rate:g}" if self.recipe == "paper" else ""
        method = self.method.replace(", ", "-").replace(" ", "-")
        return f"{method}-{self.text}{rate}-{self.embeddings}-{self.budget:.2f}"

    def config(
        self, base: Path, finetune: Path, out: Path, files: Mapping[Text, Path], amount: Amount
    ) -> CompressConfig:
        """Return the settings of `peraxis compress`.

        Args:
            files: the calibration text of each kind that is a file.
        """
        fit_settings = None
        if self.text != "none":
            source = str(files.get(self.text, self.text))
            fit_settings = FitSettings(
                Calibration(source, amount.samples, amount.length),
                recipe=self.recipe,
                distill_epochs=self.distill_epochs,
                budget=self.budget,
                rate=self.rate,
                device="cpu",
            )
        return CompressConfig(
            str(base), str(finetune), out, self.delta, embeddings=self.embeddings, fit_settings=fit_settings
        )


SCALAR = Run("scalar", "none", delta="scalar")
BITDELTA = Run("BitDelta", "in-domain", delta="scalar", recipe="paper")
PAPER = Run("paper", "in-domain", delta="per-axis", recipe="paper")
UNTRAINED = Run("ours without training", "in-domain", distill_epochs=0)
OURS = Run("ours", "in-domain")
# As many bytes as the paper's also where matrices are so small that a second vector is some percent of them.
ONE_VECTOR = Run("ours, one vector each", "in-domain", delta="per-axis")


@dataclass(frozen=True, slots=True)
class Cost:
    """Size of a delta, and time and memory of making it."""

    artifact_bytes: int
    seconds: float
    peak_memory_bytes: int  # by how much the process's own memory grew at its peak, its imports done


def compress_apart(config: CompressConfig) -> Cost:
    """Compress in a fresh process that has done nothing but its imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(compress_here, config).result()


def compress_here(config: CompressConfig) -> Cost:
    """Compress in this process, and measure the peak of memory from now on."""
    # Makes the lazy imports of transformers.
    architecture(json.loads((Path(config.base) / "config.json").read_text()))
    own = os.getpid()
    reset_peak(own)
    before = memory_of(own)["RssAnon"]
    made = compress(config)
    after = memory_of(own)
    # Pages of files are code that a forked process maps anew; checkpoints are read, not mapped.
    peak = after["VmHWM"] - after["RssFile"] - before
    return Cost(made.artifact_bytes, round(made.seconds, 2), peak)
