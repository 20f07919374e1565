"""The paper's layer stage against whole models with hooks: caches, scales, axes, and the choice by end loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.fit import paper
from compressor.fit.calibration import batched
from compressor.fit.layerwise import LayerStage, Layerwise, StudentBlock
from compressor.fit.paper import (
    ActivationCache,
    AxisChoice,
    EndLoss,
    FrozenLayer,
    LayerCaches,
    PaperAxis,
    ScaleTrainingSettings,
    choose_axis,
    compress_layer,
    gather_inputs,
)
from compressor.pairs import TensorPair
from deltastore.checkpoint import Checkpoint
from deltastore.format.matrix import SignPlane
from tests.compressor.helpers.decoders import CPU
from tests.compressor.helpers.fitting import Whole, coded, dense64, ids_of, pairs_of, weights_with
from tests.compressor.helpers.paper_oracle import squared_error, trained_scales
from tests.helpers.tiny_models import Change, TinyModels, make_pair

LENGTH, NUM_TRAIN, NUM_HELD_OUT = 10, 5, 3
SETTINGS = ScaleTrainingSettings(batch_rows=LENGTH, lr=1e-3)  # steps that FP16 keeps
ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class LayerRun:
    """One run of the layer stage, and the caches and choice of each layer."""

    models: TinyModels
    pairs: Mapping[str, TensorPair]
    layerwise: Layerwise
    caches: dict[str, LayerCaches] = field(default_factory=dict)
    choices: dict[str, AxisChoice] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of linear layers in the order in which inputs reach them."""
        return sorted(
            (name for name in self.pairs if ".layers." in name),
            key=lambda name: (name.split(".")[2], ORDER.index(name.split(".")[-2])),
        )


TEXT = [ids_of(seed, 1, LENGTH)[0] for seed in range(NUM_TRAIN + NUM_HELD_OUT)]
BATCHES = [*batched(TEXT[:NUM_TRAIN], 2 * LENGTH), *batched(TEXT[NUM_TRAIN:], 2 * LENGTH)]
HELD_OUT = BATCHES[-2:]


def run_stage(
    models: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    *,
    embeddings: bool = False,
    settings: ScaleTrainingSettings = SETTINGS,
    end_loss: EndLoss | None = None,
) -> LayerRun:
    pairs = pairs_of(models, embeddings=embeddings)
    finetune = Checkpoint.open(models.finetunes[0])
    stage = LayerRun(models, pairs, Layerwise(pairs, finetune, finetune, "per-axis", CPU))
    seen: list[tuple[LayerCaches, AxisChoice]] = []

    def look(
        layer: FrozenLayer, delta: Tensor, caches: LayerCaches, own: ScaleTrainingSettings, judge: Any
    ) -> AxisChoice:
        seen.append((caches, choose_axis(layer, delta, caches, own, judge)))
        return seen[-1][1]

    monkeypatch.setattr(paper, "choose_axis", look)
    solve = partial(compress_layer, settings, NUM_HELD_OUT * LENGTH, end_loss)
    stage.layerwise.run(LayerStage(BATCHES, gather_inputs, solve))
    for name, (caches, choice) in zip(stage.layerwise.fitted, seen, strict=True):
        stage.caches[name], stage.choices[name] = caches, choice
    return stage


def io_of(whole: Whole, name: str, weights: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return a linear layer's inputs and its outputs less the bias on all text, each ``[tokens, features]``."""
    module, read, given = whole.model.get_submodule(name.removesuffix(".weight")), [], []

    def look(module: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
        read.append(args[0].flatten(0, -2))
        given.append((output - (0 if module.bias is None else module.bias)).flatten(0, -2))

    hook = module.register_forward_hook(look)
    for ids in BATCHES:
        whole.logits(ids, weights)
    hook.remove()
    return torch.cat(read), torch.cat(given)


def near(got: Tensor, expected: Tensor, part: float) -> bool:
    return float((got.double() - expected).norm()) < part * float(expected.norm())


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # without and with biases
def test_caches_hold_the_students_inputs_and_the_finetunes_outputs_in_bf16(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_pair(architecture, tmp_path, changes=(Change(noise=0.2),))
    stage, whole = run_stage(models, monkeypatch), Whole(models)
    student = weights_with(stage.pairs, {name: torch.zeros(pair.shape) for name, pair in stage.pairs.items()})
    assert list(stage.caches) == stage.names
    for name in stage.names:
        inputs, _ = io_of(whole, name, student)
        _, outputs = io_of(whole, name)
        cut = NUM_TRAIN * LENGTH
        caches = stage.caches[name]
        for cache, rows in ((caches.train, slice(0, cut)), (caches.validation, slice(cut, None))):
            assert cache.x.dtype == cache.y.dtype == torch.bfloat16
            for got, expected in ((cache.x, inputs[rows]), (cache.y, outputs[rows])):
                assert got.shape == expected.shape
                assert torch.allclose(got.double(), expected, rtol=2**-8, atol=1e-3)
        student |= weights_with(stage.pairs, {name: dense64(stage.layerwise.fitted[name].delta)})


@pytest.mark.parametrize("cosine", [False, True])
def test_axes_and_scales_are_those_of_the_algorithms_in_float64(
    cosine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(noise=0.2),))
    settings = ScaleTrainingSettings(batch_rows=LENGTH, lr=1e-3, cosine=cosine)
    stage, whole = run_stage(models, monkeypatch, settings=settings), Whole(models)
    student = weights_with(stage.pairs, {name: torch.zeros(pair.shape) for name, pair in stage.pairs.items()})
    axes, cut = set(), NUM_TRAIN * LENGTH
    for name in stage.names:
        x, y = io_of(whole, name, student)[0].bfloat16(), io_of(whole, name)[1].bfloat16()
        pair = stage.pairs[name]
        base = pair.base.read(name).double()
        delta = pair.finetune.read(name).double() - base
        layer = FrozenLayer(base, delta > 0)
        scales: dict[PaperAxis, Tensor] = {}
        losses: dict[PaperAxis, float] = {}
        for axis in ("in", "out"):
            init = delta.abs().mean(1 if axis == "out" else 0)
            scales[axis] = trained_scales(layer, init, axis, ActivationCache(x[:cut], y[:cut]), settings)
            losses[axis] = float(squared_error(layer, scales[axis], axis, x[cut:], y[cut:]))
            assert stage.choices[name].losses[axis] == pytest.approx(losses[axis], rel=1e-3)
        chosen = min(losses, key=losses.__getitem__)
        (plane,) = stage.layerwise.fitted[name].delta.planes
        assert plane.axis == chosen
        stored = plane.scale_in if chosen == "in" else plane.scale_out
        assert stored is not None
        assert near(plane.gain * stored.double(), scales[chosen], 1e-3)
        moved = scales[chosen] - delta.abs().mean(1 if chosen == "out" else 0)
        assert float(moved.norm()) > 0.05 * float(scales[chosen].norm())  # so that training counts
        student |= weights_with(stage.pairs, {name: dense64(stage.layerwise.fitted[name].delta)})
        axes.add(chosen)
    assert axes == {"in", "out"}


@dataclass
class Judged:
    """One candidate of `EndLoss`."""

    name: str
    delta: SignPlane
    loss: float


class Recording(EndLoss):
    """An end loss that records its candidates."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.judged: list[Judged] = []

    def __call__(self, pair: TensorPair, block: StudentBlock, delta: SignPlane) -> float:
        loss = super().__call__(pair, block, delta)
        self.judged.append(Judged(pair.name, delta, loss))
        return loss


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("scalar", [False, True])
def test_an_end_loss_is_the_whole_students_with_later_layers_of_the_base(
    embeddings: bool, scalar: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(noise=0.2, added_tokens=2),))
    pairs = pairs_of(models, embeddings=embeddings)
    end_loss = Recording(Checkpoint.open(models.finetunes[0]), pairs, HELD_OUT, CPU)
    settings = ScaleTrainingSettings(batch_rows=LENGTH, epochs=1, lr=1e-3, scalar=scalar)
    stage = run_stage(models, monkeypatch, embeddings=embeddings, settings=settings, end_loss=end_loss)
    whole = Whole(models)
    student = weights_with(pairs, {name: torch.zeros(pair.shape) for name, pair in pairs.items()})
    if embeddings:  # from weights alone, before any layer
        name = "model.embed_tokens.weight"
        student |= weights_with(pairs, {name: dense64(coded(pairs, "per-axis")[name])})
    number = 3 if scalar else 2
    for index, name in enumerate(stage.names):
        candidates = end_loss.judged[number * index : number * (index + 1)]
        assert [candidate.delta.axis for candidate in candidates] == ["in", "out", "scalar"][:number]
        for candidate in candidates:
            assert candidate.name == name
            own = student | weights_with(pairs, {name: candidate.delta.dense().double()})
            losses = [(whole.logits(ids, own) - whole.logits(ids)).square().sum() for ids in HELD_OUT]
            assert candidate.loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-3)
        best = min(candidates, key=lambda candidate: candidate.loss)
        (plane,) = stage.layerwise.fitted[name].delta.planes
        assert plane.axis == best.delta.axis
        assert torch.equal(plane.dense(), best.delta.dense())
        student |= weights_with(pairs, {name: plane.dense().double()})
    assert len(end_loss.judged) == number * len(stage.names)


def test_an_end_loss_leaves_the_block_as_it_was(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(noise=0.2),))
    pairs = pairs_of(models)
    finetune = Checkpoint.open(models.finetunes[0])
    end_loss = EndLoss(finetune, pairs, HELD_OUT, CPU)
    layerwise = Layerwise(pairs, finetune, finetune, "both", CPU)
    decoder = end_loss._student
    block = decoder.load_block(0)
    before = {key: value.clone() for key, value in block.state_dict().items()}
    name = "model.layers.0.mlp.up_proj.weight"
    student_block = StudentBlock(decoder, 0, block, decoder.embed(HELD_OUT))
    losses = [end_loss(pairs[name], student_block, layerwise.delta(name).planes[0]) for _ in range(2)]
    assert losses[0] == losses[1]
    assert all(torch.equal(value, before[key]) for key, value in block.state_dict().items())
