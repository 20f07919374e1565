"""The base: a small Llama trained from scratch on source text, its matrices by Muon."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from peraxis.demo.recipe import BaseRecipe, Phase
from peraxis.demo.training_loop import TrainingRun, train

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
