"""Distillation: gradients against autograd through whole models in float64, and the effect of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adafactor

from compressor.config import Calibration, FitSettings
from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import Overlay, weight_with_delta
from compressor.fidelity import fidelity
from compressor.fit import distill
from compressor.fit.distill import Distillation, DistillSettings, Loss, TeacherTargets, divergence
from compressor.fit.fit import recipe_of
from compressor.fit.student import Student
from compressor.memory import state_bytes
from compressor.resume import CheckpointStore
from deltastore.checkpoint import Checkpoint
from deltastore.format.matrix import unpack_signs
from tests.compressor.helpers.decoders import CPU
from tests.compressor.helpers.fitting import (
    Whole,
    coded,
    ids_of,
    pairs_of,
    random_delta,
    student_of,
    targets_of,
    weights_with,
)
from tests.helpers.tiny_models import Change, TinyModels, make_pair

ONCE = {
    "kl": DistillSettings("kl", 1, 0.0),
    "squared": DistillSettings("squared", 1, 0.0),
}
SIGNS = DistillSettings("kl", epochs=4, rate=0.01, sign_rate=0.02, signs_from=2)


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    return make_pair("llama", tmp_path, changes=(Change(noise=0.2),))


def targets(models: TinyModels) -> TeacherTargets:
    return targets_of(models, [ids_of(seed, 2, 12) for seed in range(4)])


def leaves_of(student: Student) -> list[Tensor]:
    return [
        leaf
        for delta in student.trained.values()
        for leaf in (*delta.parameters(), *(latents.values for latents in delta.latents()))
    ]


@pytest.mark.parametrize("loss", ["kl", "squared"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma", "gpt_neox"])
def test_gradients_are_those_of_autograd_through_the_whole_model(
    architecture: str, loss: Loss, tmp_path: Path
) -> None:
    models = make_pair(architecture, tmp_path, changes=(Change(added_tokens=2, noise=0.2),))
    student, ids = student_of(models), ids_of(3, 2, 12, 261)
    Distillation(student, targets_of(models, [ids]), ONCE[loss]).epoch(0)
    scales, dense = {}, {}
    for name, delta in coded(student.pairs).items():
        plane = delta.planes[0]
        assert plane.scale_in is not None
        scales[name] = [factor.double().requires_grad_() for factor in (plane.factor_out(), plane.scale_in)]
        signs = unpack_signs(plane.signs, plane.in_features).double()
        dense[name] = scales[name][0][:, None] * signs * scales[name][1]
    whole, weights = Whole(models), weights_with(student.pairs, dense)
    torch.autograd.backward(whole.kl(ids, weights) if loss == "kl" else whole.squared(ids, weights))
    for name, (scale_out, scale_in) in scales.items():
        trained = student.deltas[name].planes[0]
        for own, oracle in ((trained.scale_out, scale_out), (trained.scale_in, scale_in)):
            assert own is not None
            assert own.leaf.grad is not None
            assert oracle.grad is not None
            expected, got = oracle.grad, own.leaf.grad.double() / own.unit
            assert torch.allclose(got, expected, rtol=2e-3, atol=1e-4 * float(expected.abs().max()))


def test_room_on_the_disk_is_asked_for_two_states(models: TinyModels) -> None:
    student, fit_settings = student_of(models), FitSettings(Calibration("self"))
    run = Distillation(student, targets(models), DistillSettings("kl", 2, 0.01, sign_rate=0.003))
    for epoch in range(2):
        run.epoch(epoch)

    def size(value: Any) -> int:
        if isinstance(value, Tensor):
            return value.nbytes
        return sum(
            map(size, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        )

    shapes = [pair.shape for pair in student.pairs.values()]
    recipe = recipe_of(fit_settings, "both").distillation
    asked = state_bytes(recipe, 1.0, sum(map(math.prod, shapes)), sum(map(sum, shapes)))
    assert 1.8 * size(run.state()) < asked < 2.2 * size(run.state())
    fixed = replace(fit_settings, learn_signs=False)
    recipe = recipe_of(fixed, "both").distillation
    assert state_bytes(recipe, 1.0, 1 << 31, 10) == 2 * 3 * 10 * 4


def test_signs_that_move_at_once_move_as_they_would_after_the_whole_batch(models: TinyModels) -> None:
    """Covers a tied embedding, too, whose gradient comes in two parts."""
    tied = make_pair("qwen2", models.base.parent / "tied", changes=(Change(noise=0.2),))
    for own in (models, tied):
        ids = [ids_of(1, 2, 12)]
        student, other = student_of(own), student_of(own)
        recipe = DistillSettings("kl", 1, 0.0, sign_rate=0.05, signs_from=0)
        Distillation(student, targets_of(own, ids), recipe).epoch(0)
        other.unfreeze_signs()
        list(distill._backward(other, targets_of(own, ids), 0, "kl"))
        for name, delta in other.trained.items():
            (latents,) = delta.latents()
            assert latents.gradient is not None
            leaf = latents.values.float().requires_grad_()
            leaf.grad = latents.gradient
            Adafactor([leaf], lr=0.05, eps=(None, 1.0)).step()
            (moved,) = student.deltas[name].latents()
            assert not torch.equal(moved.values, latents.values)
            assert torch.equal(moved.values, leaf.detach().half())


def test_logits_are_there_for_some_tokens_at_a_time(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(distill, "LOGITS_TOKENS", 1)
    for numel in (1 << 24, 5 * 259, 1):
        monkeypatch.setattr(distill, "LOGITS_NUMEL", numel)
        student = student_of(models)
        Distillation(student, targets(models).first(2), ONCE["kl"]).epoch(0)
        gradients = [leaf.grad for leaf in leaves_of(student) if leaf.grad is not None]
        found.append(
            (torch.cat([gradient.flatten() for gradient in gradients]), divergence(student, targets(models)))
        )
    for gradient, kl in found[1:]:
        assert torch.allclose(gradient, found[0][0], rtol=1e-3, atol=1e-4 * float(found[0][0].abs().max()))
        assert kl == pytest.approx(found[0][1], rel=1e-5)


def test_divergence_falls_on_the_text_that_is_learnt(models: TinyModels) -> None:
    student = student_of(models)
    found = [divergence(student, targets(models))]
    run = Distillation(student, targets(models), DistillSettings("kl", 4, 0.01, sign_rate=0.003))
    for epoch in range(4):
        run.epoch(epoch)
        found.append(divergence(student, targets(models)))
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.8 * found[0]


@pytest.mark.parametrize("ends", [1, 2, 3])
def test_a_state_goes_on_to_bit_equal_results(models: TinyModels, tmp_path: Path, ends: int) -> None:
    store = CheckpointStore(tmp_path / "out", {}, resume=False)
    deltas = coded(pairs_of(models))
    name = "model.layers.0.mlp.up_proj.weight"
    deltas[name] = random_delta((92, 64), planes=2, rank=3)
    found = []
    for resumed in (False, True):
        student = student_of(models, deltas)
        run, begun = Distillation(student, targets(models), SIGNS), 0
        if resumed:
            run.restore(store.load("end"))
            begun = ends
        for epoch in range(begun, SIGNS.epochs):
            run.epoch(epoch)
            if not resumed and epoch + 1 == ends:
                store.save("end", run.state())
        found.append((leaves_of(student), student.stored()))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, other)
    for key, delta in found[0][1].items():
        assert torch.equal(delta.dense(), found[1][1][key].dense())


def test_signs_move_only_from_their_epoch_on(models: TinyModels) -> None:
    student = student_of(models)
    begun = {name: delta.dense().sign() for name, delta in student.stored().items()}
    run = Distillation(student, targets(models), SIGNS)
    moved = []
    for epoch in range(SIGNS.epochs):
        run.epoch(epoch)
        stored = student.stored()
        moved.append(sum(int((stored[name].dense().sign() != sign).sum()) for name, sign in begun.items()))
    assert moved[:2] == [0, 0]
    assert moved[2] > 0
    assert moved[3] < 0.2 * sum(sign.numel() for sign in begun.values())


def test_without_a_rate_of_their_own_signs_stay(models: TinyModels) -> None:
    student = student_of(models)
    begun = {name: delta.planes[0].signs for name, delta in student.stored().items()}
    run = Distillation(student, targets(models), DistillSettings("kl", 2, 0.01))
    for epoch in range(2):
        run.epoch(epoch)
    for name, delta in student.stored().items():
        assert torch.equal(delta.planes[0].signs, begun[name])


@pytest.mark.parametrize("cosine", [True, False])
def test_rates_fall_as_half_a_cosine_over_all_steps(models: TinyModels, cosine: bool) -> None:
    recipe = DistillSettings("kl", 2, 0.01, cosine=cosine, sign_rate=0.02)
    run, rates = Distillation(student_of(models), targets(models), recipe), []
    for epoch in range(2):
        run.epoch(epoch, lambda: rates.append([group.param_groups[0]["lr"] for group in run._optimizers]))
    parts = [(1 + math.cos(math.pi * step / 8)) / 2 if cosine else 1.0 for step in range(8)]
    assert [rate for rate, *_ in rates] == pytest.approx([0.01 * part for part in parts])
    assert [rate for _, *more in rates for rate in more] == pytest.approx([0.02 * part for part in parts[4:]])


def test_each_epoch_takes_every_batch_once_in_an_order_of_its_own(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = Distillation(student_of(models), targets(models), DistillSettings("kl", 3, 0.01)), list[int]()
    learn = distill._backward

    def look(student: Student, text: TeacherTargets, number: int, loss: Loss) -> Iterator[str]:
        seen.append(number)
        return learn(student, text, number, loss)

    monkeypatch.setattr(distill, "_backward", look)
    orders = []
    for epoch in range(3):
        run.epoch(epoch)
        orders.append(tuple(seen))
        seen.clear()
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len(set(orders)) > 1


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_divergence_is_the_kl_that_fidelity_measures(architecture: str, tmp_path: Path) -> None:
    models = make_pair(architecture, tmp_path, changes=(Change(added_tokens=2, noise=0.2),))
    student, text = student_of(models), targets(models)
    weights = Overlay(
        Checkpoint.open(models.finetunes[0]),
        lambda name: (
            weight_with_delta(student.pairs[name], student.deltas[name].stored())
            if name in student.pairs
            else None
        ),
    )
    expected = fidelity(text.teacher, Decoder(weights, CPU, torch.float32), text.batches).kl
    assert divergence(student, text) == pytest.approx(expected, rel=1e-4)
    for seed in (1, 2):
        part = targets_of(models, [ids_of(seed, 2, 12)])
        assert divergence(student, part) == pytest.approx(
            fidelity(part.teacher, Decoder(weights, CPU, torch.float32), part.batches).kl, rel=1e-4
        )
