"""The demo's models: tokenizers, recipes, the training of a base and its fine-tunes, and where they are kept.

Each model is trained once, saved whole and found again by the recipe's digest. The base is a small Llama trained on
source text, its matrices by Muon. One token per byte lets a small model learn a word's letters.

The optimizer is AdamW without weight decay, so that only the task moves a weight away from the base's. A row holds
several items, each from BOS to its end token, so that the model learns to begin another item where one has ended.

Fine-tunes are trained side by side, in a process per core: small matrix products gain little from a second thread.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.logging import disable_progress_bar

from deltastore.errors import PeraxisError, UsageError
from peraxis.demo.tasks import Item, Task, frequent_words, make_tasks, read_sources

# Modules of this package that affect the trained weights.
TRAINING_CODE = ("tasks", "train")


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


# The models' context length.
MAX_TOKENS = 512
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
BASE_SPECIAL_TOKENS = (BOS, EOS, PAD)
# The chat variant adds these to the base's vocabulary.
CHAT_TOKENS = (USER, ASSISTANT, END)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def base_tokenizer() -> PreTrainedTokenizerFast:
    """Make the base's tokenizer: ids 0 to 255 are bytes, then come the special tokens. A text begins with BOS."""
    alphabet = bytes_to_unicode()
    words = [*(alphabet[byte] for byte in range(256)), *BASE_SPECIAL_TOKENS]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, words.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Make the chat variant's tokenizer: the base's with three added tokens, a chat template, and END as end token."""
    tokenizer = base_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(CHAT_TOKENS)})
    tokenizer.add_special_tokens({"eos_token": END})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def prompt_ids(tokenizer: PreTrainedTokenizerBase, item: Item) -> list[int]:
    """Encode an item's prompt. The base lacks the chat tokens and reads their names as plain text."""
    if item.messages is None:
        return list(tokenizer(item.prompt)["input_ids"])
    text = tokenizer.apply_chat_template(
        item.messages, chat_template=CHAT_TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


LINE_INTERVAL_S = 5.0
CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The length of a training and the receiver of its progress lines."""

    name: str
    num_steps: int
    num_warmup_steps: int
    progress: Callable[[str], None]


def train(
    model: torch.nn.Module,
    optimizers: Sequence[Optimizer],
    losses: Iterator[Tensor],
    run: TrainingRun,
) -> None:
    """Take one step for each of the first `run.num_steps` losses; `losses` computes each from the current weights.

    Learning rates rise linearly from 0 over the warmup and then fall to 0 by half a cosine.
    """
    schedules = [
        get_cosine_schedule_with_warmup(optimizer, run.num_warmup_steps, run.num_steps)
        for optimizer in optimizers
    ]
    model.train()
    last_line_s = time.monotonic()
    for step in range(1, run.num_steps + 1):
        loss = next(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if time.monotonic() - last_line_s >= LINE_INTERVAL_S or step == run.num_steps:
            last_line_s = time.monotonic()
            run.progress(f"training {run.name}: step {step} of {run.num_steps}, loss {loss.item():.3f}")
    model.eval()


# The default of transformers, 0.02, suits wider models; this one would learn slowly at first.
INITIAL_STD = 0.05
WEIGHT_DECAY = 0.1
# Range of the length of a repeated piece of text.
PIECE_TOKENS = (6, 40)
# Momentum of Muon.
MOMENTUM = 0.95
ORTHOGONAL_STEPS = 5
# The coefficients of Jordan's quintic iteration, which brings small singular values near 1 in few steps.
A, B, C = 3.4445, -4.7750, 2.0315
# The root mean square of a typical AdamW step over its learning rate, so that one learning rate serves both.
RMS_OF_ADAM = 0.2


def train_base(
    recipe: BaseRecipe,
    sources: list[bytes],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    progress: Callable[[str], None],
) -> LlamaForCausalLM:
    """Train a base in float32 on source files."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_config(recipe, tokenizer))
    text = _joined(sources, tokenizer.eos_token_id)
    windows = _windows(recipe, text, tokenizer.bos_token_id, torch.Generator().manual_seed(seed))
    losses = (model(input_ids=rows, labels=rows, use_cache=False).loss for rows in windows)
    steps = sum(phase.steps for phase in recipe.phases)
    train(model, _optimizers(model, recipe.rate), losses, TrainingRun("base", steps, recipe.warmup, progress))
    return model


def _config(recipe: BaseRecipe, tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=INITIAL_STD,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _optimizers(model: LlamaForCausalLM, rate: float) -> list[Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for embeddings, head and norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    ids = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    return [
        Muon(matrices, lr=rate, weight_decay=WEIGHT_DECAY),
        AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _joined(sources: list[bytes], eos: int) -> Tensor:
    """Concatenate all sources, each followed by `eos`, into one int16 row of tokens."""
    end = torch.tensor([eos], dtype=torch.int16)
    return torch.cat([part for source in sources for part in (torch.tensor(bytearray(source)).short(), end)])


def _windows(recipe: BaseRecipe, text: Tensor, bos: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches ``[rows, 1 + tokens]`` int64; each row begins with `bos`."""
    for phase in recipe.phases:
        for _ in range(phase.steps):
            rows = [_row(recipe, phase, text, generator) for _ in range(phase.rows)]
            yield torch.cat([torch.full((phase.rows, 1), bos), torch.stack(rows).long()], dim=1)


def _row(recipe: BaseRecipe, phase: Phase, text: Tensor, generator: torch.Generator) -> Tensor:
    if torch.rand((), generator=generator).item() >= recipe.repeats:
        return _piece(text, phase.tokens, generator)
    pieces: list[Tensor] = []
    while sum(map(len, pieces)) < phase.tokens:
        length = int(torch.randint(*PIECE_TOKENS, (), generator=generator))
        pieces += [_piece(text, length, generator)] * 2
    return torch.cat(pieces)[: phase.tokens]


def _piece(text: Tensor, length: int, generator: torch.Generator) -> Tensor:
    start = int(torch.randint(len(text) - length, (), generator=generator))
    return text[start : start + length]


class Muon(Optimizer):
    """The Muon optimizer (Jordan et al., 2024) for weight matrices: each step is the orthogonalized momentum.

    It reaches the base's loss in half of AdamW's steps. Parameters of other than two dimensions need another optimizer.
    `torch.optim.Muon` multiplies in bfloat16, which on processors without bfloat16 instructions takes a hundred times
    as long as float32.
    """

    def __init__(self, parameters: Iterable[Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(list(parameters), {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; closures are not supported."""
        for group in self.param_groups:
            for shape, matrices in self._by_shape(group["params"]).items():
                rate = group["lr"] * RMS_OF_ADAM * math.sqrt(max(shape))
                updates = _orthogonal(torch.stack([self._direction(matrix) for matrix in matrices]))
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)

    def _by_shape(self, parameters: list[Parameter]) -> dict[torch.Size, list[Parameter]]:
        # Matrices of one shape are multiplied in one batch: one call per small matrix would cost more than its product.
        shapes = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is not None:
                shapes[parameter.shape].append(parameter)
        return shapes

    def _direction(self, parameter: Parameter) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(parameter.grad, 1 - MOMENTUM)
        # Nesterov momentum.
        return parameter.grad.lerp(momentum, MOMENTUM)


def _orthogonal(
    matrices: Tensor,  # [n, rows, columns] float32
) -> Tensor:  # [n, rows, columns]
    """Bring all singular values to about 0.7 to 1.2 and keep the singular vectors, by Newton-Schulz iteration."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for _ in range(ORTHOGONAL_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if is_tall else x


SHORTEST_ITEM_TOKENS = 14


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of items, right-padded."""

    input_ids: Tensor  # [rows, tokens] int64
    weights: Tensor  # [rows, tokens] float32, of each token in the loss; 0 for padding


def train_finetune(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    recipe: FinetuneRecipe,
    seed: int,
    progress: Callable[[str], None],
) -> None:
    """Train `model`, the base in float32, into the fine-tune in place. Its embedding gets rows for added tokens."""
    if len(tokenizer) > model.config.vocab_size:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    losses = (_loss(model, batch) for batch in _batches(tokenizer, task, recipe, seed))
    optimizer = AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.99), weight_decay=0.0)
    steps = sum(phase.steps for phase in recipe.phases)
    train(model, [optimizer], losses, TrainingRun(task.name, steps, recipe.warmup, progress))


def make_rows(
    tokenizer: PreTrainedTokenizerBase, items: Iterator[Item], tokens: int, prompt_weight: float
) -> Iterator[tuple[list[int], list[float]]]:
    """Yield ids and loss weights of rows of `tokens` tokens: as many whole items as fit, then padding."""
    ids, weights = list[int](), list[float]()
    for item in items:
        prompt, answer = prompt_ids(tokenizer, item), _answer_ids(tokenizer, item)
        if len(ids) + len(prompt) + len(answer) > tokens:
            missing = tokens - len(ids)
            yield ids + [tokenizer.pad_token_id] * missing, weights + [0.0] * missing
            ids, weights = [], []
        ids += prompt + answer
        weights += [prompt_weight] * len(prompt) + [1.0] * len(answer)


def _answer_ids(tokenizer: PreTrainedTokenizerBase, item: Item) -> list[int]:
    return [*tokenizer(item.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _batches(
    tokenizer: PreTrainedTokenizerBase, task: Task, recipe: FinetuneRecipe, seed: int
) -> Iterator[Batch]:
    # No row holds more items than this.
    count = sum(phase.steps * phase.rows * (phase.tokens // SHORTEST_ITEM_TOKENS) for phase in recipe.phases)
    items = iter(task.items("train", count, seed))
    for phase in recipe.phases:
        rows = make_rows(tokenizer, items, phase.tokens, recipe.prompt_weight)
        for _ in range(phase.steps):
            ids, weights = zip(*(next(rows) for _ in range(phase.rows)), strict=True)
            yield Batch(torch.tensor(ids), torch.tensor(weights))


def _loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return the weighted mean cross entropy of the next token."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), batch.input_ids[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


SAVED_DTYPE = torch.float16
WORDS_FILE = "words.json"
# On matrix products this small, more threads wait for each other longer than they compute.
MAX_THREADS = 8
# Of one fine-tune: its directory, the base's, its task, the recipe and the receiver of progress lines.
FinetuneArguments = tuple[Path, Path, Task, DemoRecipe, Callable[[str], None]]


class TrainingFailed(PeraxisError):
    """A fine-tune's process ended before its training did."""


@dataclass(frozen=True, slots=True)
class Models:
    """Hugging Face checkpoints of a base and its fine-tunes, and each fine-tune's task."""

    base: Path
    finetunes: dict[str, Path]  # by task name
    tasks: dict[str, Task]


def prepare(
    workdir: Path,
    progress: Callable[[str], None],
    recipe: DemoRecipe = DEMO_RECIPE,
    names: Collection[str] | None = None,
    processes: int | None = None,
) -> Models:
    """Train the recipe's models that are missing in `workdir`.

    A model gets its name only when it is complete, so a call after an interruption trains the models that are missing.

    Args:
        workdir: The directory of trained models, by digest of the recipe.
        progress: Gets a line every few seconds of training; with several processes it must be picklable.
        recipe: The sizes and steps of the models.
        names: The tasks to train fine-tunes for; by default all.
        processes: How many fine-tunes are trained at a time; by default one per core.

    Raises:
        UsageError: `workdir` cannot be written, or the sources of Python's standard library are not installed.
    """
    home = workdir / recipe.digest()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{home}: the models cannot be kept there ({error.strerror}): give --work a directory that can be written"
        ) from error
    base = home / "base"
    num_cores = len(os.sched_getaffinity(0))
    if not base.exists():
        with _threads(num_cores):
            _make_base(base, recipe, progress)
    known = make_tasks(json.loads((base / WORDS_FILE).read_text()))
    tasks = {name: task for name, task in known.items() if names is None or name in names}
    finetunes = {name: home / name for name in tasks}
    missing = [
        (finetunes[name], base, task, recipe, progress)
        for name, task in tasks.items()
        if not finetunes[name].exists()
    ]
    # The longest first, so that none is left alone at the end.
    missing.sort(key=lambda arguments: recipe.of(arguments[2]).num_tokens, reverse=True)
    num_processes = min(processes or num_cores, len(missing))
    if num_processes > 1:
        _side_by_side(missing, num_processes, num_cores // num_processes)
    else:
        with _threads(num_cores):
            for arguments in missing:
                _make_finetune(*arguments)
    return Models(base, finetunes, tasks)


def _side_by_side(missing: list[FinetuneArguments], num_processes: int, num_threads: int) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, _start_worker, (num_threads,)) as pool:
        try:
            for future in [pool.submit(_make_finetune, *arguments) for arguments in missing]:
                future.result()
        except BrokenProcessPool as error:
            raise TrainingFailed(
                f"a process that trained was killed, as where memory runs out: free 1 GB for each of {num_processes}"
            ) from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_worker(num_threads: int) -> None:
    # Ctrl-C reaches the whole process group. The parent alone reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    disable_progress_bar()
    torch.set_num_threads(min(max(1, num_threads), MAX_THREADS))


def _end_with_parent() -> None:
    # A parent that is killed ends no worker.
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def _make_base(directory: Path, recipe: DemoRecipe, progress: Callable[[str], None]) -> None:
    sources = read_sources()
    progress(f"training base on {sum(map(len, sources)) / 1e6:.1f} MB of Python's own sources")
    tokenizer = base_tokenizer()
    model = train_base(recipe.base, sources, tokenizer, recipe.seed, progress)
    with _whole(directory) as partial:
        _save(model, tokenizer, partial)
        (partial / WORDS_FILE).write_text(json.dumps(frequent_words(sources)))


def _make_finetune(
    directory: Path, base: Path, task: Task, recipe: DemoRecipe, progress: Callable[[str], None]
) -> None:
    tokenizer = base_tokenizer() if task.plain else chat_tokenizer()
    # The base as it was saved, so that the delta does not hold the base's rounding.
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    train_finetune(model, tokenizer, task, recipe.of(task), recipe.seed, progress)
    with _whole(directory) as partial:
        _save(model, tokenizer, partial)


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    torch.nn.Module.to(model, SAVED_DTYPE)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """Yield a directory that is renamed to `directory` if the block succeeds and removed if it raises."""
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        partial = Path(scratch) / directory.name
        partial.mkdir()
        yield partial
        # Another process may have trained the same model meanwhile.
        if not directory.exists():
            partial.rename(directory)


@contextmanager
def _threads(num_cores: int) -> Iterator[None]:
    """Let torch use a thread per core, but at most `MAX_THREADS`, inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(num_cores, MAX_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)
