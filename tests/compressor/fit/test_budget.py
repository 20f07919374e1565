"""Bytes over one bit per weight: the gain and size of upgrades, and the choice of those to buy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from compressor.config import Calibration, FitSettings
from compressor.fit.budget import UpgradeKey, measure, spend, stored_bytes
from compressor.pipeline import CompressResult
from deltastore.format.artifact import ArtifactWriter
from deltastore.format.matrix import AXES, Axis, MatrixDelta
from deltastore.format.sizes import one_bit_plan
from tests.compressor.helpers.compressing import compressed
from tests.compressor.helpers.fitting import (
    Whole,
    coded,
    dense64,
    ids_of,
    pairs_of,
    random_delta,
    student_of,
    targets_of,
    weights_with,
)
from tests.helpers.tiny_models import Change, TinyModels, make_pair

FEW = Calibration("self", 24, 24)
BLOCK_MATRICES = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def upgraded(delta: MatrixDelta, planes: int, rank: int) -> MatrixDelta:
    """A delta with further planes and a residual of its own magnitude."""
    shape = (delta.out_features, delta.in_features)
    more = random_delta(shape, delta.axis, planes, rank, size=float(delta.dense().std()))
    return MatrixDelta((*delta.planes, *more.planes[1:]), more.left, more.right)


@pytest.mark.parametrize(
    ("architecture", "outside"),
    [("llama", (EMBEDDING, HEAD)), ("qwen2", (EMBEDDING,))],
    ids=["untied", "tied"],
)
def test_gains_are_those_of_whole_models_with_one_upgrade_each(
    architecture: str, outside: tuple[str, ...], tmp_path: Path
) -> None:
    models = make_pair(architecture, tmp_path, changes=(Change(noise=0.3, added_tokens=2),))
    deltas = coded(pairs_of(models))
    upgrades = {
        name: [upgraded(deltas[name], *form) for form in ((2, 0), (1, 3))]
        for name in (*BLOCK_MATRICES, *outside)
    }
    student, batches = student_of(models, deltas), [ids_of(seed, 2, 10, 261) for seed in range(2)]
    kl_saved = measure(student, targets_of(models, batches), upgrades)
    whole, plain = Whole(models), {name: dense64(delta) for name, delta in deltas.items()}

    def divergence(own: Mapping[str, MatrixDelta]) -> float:
        weights = weights_with(student.pairs, plain | {name: dense64(delta) for name, delta in own.items()})
        return sum(float(whole.kl(ids, weights)) for ids in batches) / len(batches)

    before = divergence({})
    assert kl_saved.keys() == {(name, number) for name in upgrades for number in (0, 1)}
    for (name, number), saved in kl_saved.items():
        expected = before - divergence({name: upgrades[name][number]})
        assert saved == pytest.approx(expected, abs=1e-3 * before)
        assert abs(expected) > 0.01 * before  # so that the comparison above can fail


def test_what_no_forward_reaches_gains_nothing(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(noise=0.2),))
    deltas = coded(pairs_of(models))
    student, targets = student_of(models, deltas), targets_of(models, [ids_of(1, 1, 6)])
    student.deltas["beside"] = student.deltas[HEAD]
    upgrades = {"beside": [upgraded(deltas[HEAD], 2, 0)]}
    assert measure(student, targets, upgrades) == {("beside", 0): 0.0}


def choices() -> tuple[dict[str, MatrixDelta], dict[str, list[MatrixDelta]]]:
    """Three matrices of one shape; an upgrade is a second plane, or a residual of another size."""
    deltas = {name: random_delta((16, 32)) for name in "abc"}
    return deltas, {name: [upgraded(delta, 2, 0), upgraded(delta, 1, 2)] for name, delta in deltas.items()}


def bought(chosen: Mapping[str, MatrixDelta], upgrades: Mapping[str, list[MatrixDelta]]) -> set[UpgradeKey]:
    return {(n, k) for n, own in upgrades.items() for k, upgrade in enumerate(own) if chosen[n] is upgrade}


def test_the_budget_goes_where_gain_per_byte_is_largest() -> None:
    deltas, upgrades = choices()
    plane, residual = (stored_bytes(upgrades["a"][number]) - stored_bytes(deltas["a"]) for number in (0, 1))
    assert plane < residual
    kl_saved = {("a", 0): 5.0 * plane, ("a", 1): 6.0 * residual, ("b", 0): 4.0 * plane, ("b", 1): 3.0 * plane}
    kl_saved |= {("c", 0): 1.0 * plane, ("c", 1): -1.0}
    for spare, expected in (
        (0, set[UpgradeKey]()),
        (plane - 1, set[UpgradeKey]()),
        (plane, {("a", 0)}),
        (residual, {("a", 1)}),
        (residual + plane, {("a", 1), ("b", 0)}),
        (10 * plane + 10 * residual, {("a", 1), ("b", 0), ("c", 0)}),
    ):
        chosen = spend(spare, deltas, upgrades, kl_saved)
        assert bought(chosen, upgrades) == expected
        assert sum(map(stored_bytes, chosen.values())) - sum(map(stored_bytes, deltas.values())) <= spare


def test_an_upgrade_gives_way_to_a_larger_one_while_bytes_last() -> None:
    deltas, upgrades = choices()
    plane, residual = (stored_bytes(upgrades["a"][number]) - stored_bytes(deltas["a"]) for number in (0, 1))
    kl_saved = {(name, number): 0.0 for name in "abc" for number in (0, 1)}
    kl_saved |= {("a", 0): 5.0 * plane, ("a", 1): 5.0 * plane + (residual - plane), ("b", 0): 2.0 * plane}
    for spare, expected in (
        (plane, {("a", 0)}),
        (residual, {("a", 1)}),
        (2 * plane, {("a", 0), ("b", 0)}),
        (plane + residual, {("a", 1), ("b", 0)}),
    ):
        assert bought(spend(spare, deltas, upgrades, kl_saved), upgrades) == expected


def test_what_does_not_fit_leaves_room_for_what_does() -> None:
    deltas, upgrades = choices()
    plane, residual = (stored_bytes(upgrades["a"][number]) - stored_bytes(deltas["a"]) for number in (0, 1))
    kl_saved = {(name, number): 0.0 for name in "abc" for number in (0, 1)}
    chosen = spend(residual - 1, deltas, upgrades, kl_saved | {("a", 1): 100.0, ("b", 0): 1.0})
    assert plane < residual
    assert bought(chosen, upgrades) == {("b", 0)}


def test_nothing_is_bought_that_gains_nothing() -> None:
    deltas, upgrades = choices()
    kl_saved = {(name, number): -float(number) for name in "abc" for number in (0, 1)}
    assert spend(1 << 20, deltas, upgrades, kl_saved) == deltas


def test_equal_gains_are_bought_in_the_same_order_whatever_order_they_come_in() -> None:
    deltas, upgrades = choices()
    kl_saved = {(name, number): 1.0 for name in "abc" for number in (0, 1)}
    spare = stored_bytes(upgrades["a"][0]) - stored_bytes(deltas["a"])
    backwards = dict(reversed(upgrades.items()))
    chosen = [spend(spare, deltas, own, kl_saved) for own in (upgrades, backwards)]
    assert bought(chosen[0], upgrades) == bought(chosen[1], upgrades) != set()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("shape", [(16, 64), (13, 37), (3, 9)])
def test_stored_bytes_are_what_an_artifact_grows_by(
    shape: tuple[int, int], axis: Axis, tmp_path: Path
) -> None:
    for planes, rank in ((1, 0), (2, 0), (1, 1), (2, 3)):
        delta = random_delta(shape, axis, planes, rank)
        with ArtifactWriter(tmp_path / "delta") as writer:
            for number in range(2):
                before = writer.device_bytes
                writer.add_onebit(f"m{number}.weight", delta)
                assert writer.device_bytes - before == stored_bytes(delta)


def plan_bytes(models: TinyModels, result: CompressResult) -> int:
    shapes = {name: tuple(spec.shape) for name, spec in result.manifest.tensors.items()}
    return one_bit_plan(shapes).device_bytes


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_budget_is_kept_and_brings_the_delta_nearer(architecture: str, tmp_path: Path) -> None:
    models = make_pair(architecture, tmp_path, changes=(Change(noise=0.2),))
    sizes, divergences, forms = [], [], []
    for budget in (1.0, 1.1, 1.5):
        fit_settings = FitSettings(FEW, distill_epochs=0, budget=budget)
        result = compressed(models, tmp_path / f"{budget}", fit_settings=fit_settings)
        norms = sum(spec.codec == "whole" for spec in result.manifest.tensors.values())
        wide = 2 * 64 * norms  # norms of float32 checkpoints, which the plan takes for 16 bits
        assert result.manifest.device_bytes <= budget * plan_bytes(models, result) + wide
        sizes.append(result.manifest.device_bytes)
        divergences.append(result.manifest.fidelity["held_out"]["kl"])
        forms.append({(spec.planes, spec.rank > 0) for spec in result.manifest.tensors.values()})
    assert sizes == sorted(set(sizes))
    assert divergences[2] < divergences[1] < divergences[0]
    assert forms[0] == {(1, False)}
    assert (2, False) in forms[2]


def test_a_tied_embedding_can_be_given_a_second_plane(tmp_path: Path) -> None:
    models = make_pair("qwen2", tmp_path, changes=(Change(noise=0.2),))
    result = compressed(
        models, tmp_path / "delta", fit_settings=FitSettings(FEW, distill_epochs=1, budget=2.0)
    )
    assert result.manifest.tensors[EMBEDDING].planes == 2
