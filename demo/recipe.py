"""How the demo's models are made: sizes, steps and rates. A recipe's digest names what was trained by it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Modules of this package whose text decides what comes out of a training.
TRAINING_CODE = ("corpus", "finetune", "muon", "pace", "pretrain", "recipe", "tasks", "tokenizer", "train")


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps on windows of one length. Short ones come first: what is learned within a line is learned soonest there."""

    steps: int
    rows: int
    tokens: int  # of a row


@dataclass(frozen=True, slots=True)
class BaseRecipe:
    """The base: a Llama with untied embeddings, trained on source text."""

    hidden: int = 192
    intermediate: int = 512
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    phases: tuple[Phase, ...] = (Phase(400, 16, 64), Phase(100, 8, 128), Phase(60, 4, 256))
    rate: float = 3e-3
    repeats: float = 0.5  # share of rows in which every piece of text stands twice, which teaches to copy
    warmup: int = 20


@dataclass(frozen=True, slots=True)
class FinetuneRecipe:
    """A full fine-tune: every weight moves."""

    phases: tuple[Phase, ...] = (Phase(140, 32, 64), Phase(80, 10, 192))
    rate: float = 2e-3
    warmup: int = 10
    prompt_weight: float = (
        0.1  # of a prompt's tokens in the loss; without any the model could not write prompts itself
    )


@dataclass(frozen=True, slots=True)
class DemoRecipe:
    """Everything that decides what comes out."""

    base: BaseRecipe = field(default_factory=BaseRecipe)
    finetune: FinetuneRecipe = field(default_factory=FinetuneRecipe)
    seed: int = 0

    def digest(self) -> str:
        """12 hex digits of the settings and of the training code, so that a change of either trains anew."""
        code = hashlib.sha256(json.dumps(asdict(self)).encode())
        for name in TRAINING_CODE:
            code.update(Path(__file__).with_name(f"{name}.py").read_bytes())
        return code.hexdigest()[:12]
