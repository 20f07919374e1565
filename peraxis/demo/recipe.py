"""The sizes, steps and learning rates of the demo's models. A recipe's digest names the models trained by it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from peraxis.demo.tasks import Task

# Modules of this package that affect the trained weights.
TRAINING_CODE = (
    "corpus", "finetune", "pretrain", "recipe", "tasks", "tokenizer", "train", "training_loop",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phase:
    """Training steps on rows of one length. Short rows come first: what a line teaches is learned fastest from them."""

    steps: int
    rows: int  # per step
    tokens: int  # per row


@dataclass(frozen=True, slots=True)
class BaseRecipe:
    """Settings of the base, a Llama with untied embeddings that is trained on source text."""

    hidden: int = 192
    intermediate: int = 512
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    phases: tuple[Phase, ...] = (Phase(200, 16, 64), Phase(40, 8, 128))
    rate: float = 3e-3
    repeats: float = 0.9  # share of rows in which every piece of text occurs twice, which teaches to copy
    warmup: int = 20  # steps


@dataclass(frozen=True, slots=True)
class FinetuneRecipe:
    """Settings of a full fine-tune, in which every weight moves."""

    phases: tuple[Phase, ...] = (Phase(320, 8, 64), Phase(20, 5, 128))
    rate: float = 1.2e-3
    warmup: int = 10  # steps
    # The weight of a prompt's tokens in the loss. At 0 the model could not write prompts, which self-calibration needs.
    prompt_weight: float = 0.1

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps."""
        return sum(phase.steps * phase.rows * phase.tokens for phase in self.phases)


@dataclass(frozen=True, slots=True)
class DemoRecipe:
    """All settings that affect the trained weights."""

    base: BaseRecipe = field(default_factory=BaseRecipe)
    finetune: FinetuneRecipe = field(default_factory=FinetuneRecipe)
    chat: FinetuneRecipe | None = None  # of chat tasks; None takes `finetune`
    seed: int = 0

    def of(self, task: Task) -> FinetuneRecipe:
        """Return the settings of a task's fine-tune."""
        return self.finetune if task.plain or self.chat is None else self.chat

    def digest(self) -> str:
        """Return 12 hex digits of the settings and the training code, so that a change of either trains again."""
        code = hashlib.sha256(json.dumps(asdict(self)).encode())
        for name in TRAINING_CODE:
            code.update(Path(__file__).with_name(f"{name}.py").read_bytes())
        return code.hexdigest()[:12]


# Answers of the chat task are the longest and take the most steps to learn.
DEMO_RECIPE = DemoRecipe(chat=FinetuneRecipe(phases=(Phase(310, 16, 64), Phase(30, 6, 128)), rate=1.6e-3))
# Models that go the whole way in seconds, and learn nothing.
QUICK_RECIPE = DemoRecipe(
    BaseRecipe(hidden=64, intermediate=128, layers=2, heads=4, phases=(Phase(12, 8, 64),), warmup=2),
    FinetuneRecipe(phases=(Phase(12, 4, 64),), warmup=2),
)
