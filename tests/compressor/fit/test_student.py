"""The student: its blocks against whole models in float64, with tied, scaled, added, resident and expert weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.config import Calibration, FitSettings
from compressor.convert.merge import MergeConfig, merge
from compressor.fit.distill import Distillation, DistillSettings, divergence
from compressor.fit.student import Student
from deltastore.format.artifact import Artifact
from tests.compressor.helpers.compressing import compressed
from tests.compressor.helpers.decoders import whole_model
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
    with_experts,
)
from tests.helpers.tiny_models import Change, TinyModels, make_pair

SHAPES: dict[str, tuple[str, Change]] = {
    "untied": ("llama", Change(added_tokens=2, noise=0.2)),
    "tied": ("qwen2", Change(added_tokens=3, noise=0.2)),
    "scaled embeddings": ("gemma", Change(noise=0.2)),
    "untied by the fine-tune": ("qwen2", Change(tied=False, noise=0.2)),
}
EXPERTS = ("mixtral", "qwen3_moe")


def logits(student: Student, ids: Tensor) -> Tensor:
    hidden = student.enter(ids).hidden
    for index in range(student.num_blocks):
        hidden = student.decoder.run(student.block(index), index, hidden)
    return student.decoder.logits(student.head(), student.decoder.finish(hidden))


@pytest.mark.parametrize("shape", SHAPES)
def test_its_logits_are_those_of_the_whole_model(shape: str, tmp_path: Path) -> None:
    architecture, change = SHAPES[shape]
    models = make_pair(architecture, tmp_path, changes=(change,))
    deltas = coded(pairs_of(models))
    student = student_of(models, deltas)
    ids = ids_of(1, 2, 9, 259 + change.added_tokens)
    ids[0, :3] = torch.tensor([258, 258, 258 + change.added_tokens])
    weights = weights_with(student.pairs, {name: dense64(delta) for name, delta in deltas.items()})
    expected = Whole(models).logits(ids, weights)
    with torch.no_grad():
        got = logits(student, ids)
    assert torch.allclose(got.double(), expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_matrix_of_a_dense_model_trains(shape: str, tmp_path: Path) -> None:
    architecture, change = SHAPES[shape]
    student = student_of(make_pair(architecture, tmp_path, changes=(change,)))
    assert student.trained.keys() == student.pairs.keys()


def learnt(models: TinyModels, num_resident: int) -> list[Tensor]:
    student, targets = student_of(models), targets_of(models, [ids_of(2, 2, 9), ids_of(3, 2, 9)])
    student._num_resident = num_resident
    run = Distillation(student, targets, DistillSettings("kl", 2, 0.01, sign_rate=0.02, signs_from=0))
    for epoch in range(2):
        run.epoch(epoch)
    assert len(student._resident) == num_resident
    deltas = student.trained.values()
    latents = [latents.values for delta in deltas for latents in delta.latents()]
    return [*latents, *(leaf.detach() for delta in deltas for leaf in delta.parameters())]


@pytest.mark.parametrize("num_resident", [0, 1])
def test_blocks_that_are_read_anew_learn_the_same_as_resident_ones(num_resident: int, tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(noise=0.2),))
    for one, other in zip(learnt(models, 2), learnt(models, num_resident), strict=True):
        assert torch.equal(one, other)


def test_as_many_blocks_stay_as_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = make_pair("llama", tmp_path, num_hidden_layers=4)
    block = student_of(models).decoder.block_bytes(0)
    for room, resident in ((0, 0), (1.5, 1), (3.5, 3), (4, 4)):
        monkeypatch.setattr("compressor.fit.student.HOST_BYTES", int(room * block))
        assert student_of(models)._num_resident == resident


def test_a_replaced_delta_counts_while_the_block_runs_and_no_longer(tmp_path: Path) -> None:
    models = make_pair("qwen2", tmp_path, changes=(Change(noise=0.2),))
    student, ids = student_of(models), ids_of(4, 1, 8)
    name = "model.layers.1.mlp.down_proj.weight"
    other = random_delta((64, 92), "out", planes=2, rank=2)
    deltas = {key: dense64(delta) for key, delta in coded(student.pairs).items()} | {name: dense64(other)}
    expected = Whole(models).logits(ids, weights_with(student.pairs, deltas))
    with torch.no_grad():
        before = logits(student, ids)
        with student.replaced(name, other):
            during = logits(student, ids)
        assert torch.equal(logits(student, ids), before)
    assert torch.allclose(during.double(), expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_and_their_routers_keep_their_deltas_while_the_rest_trains(
    architecture: str, tmp_path: Path
) -> None:
    models = with_experts(architecture, tmp_path)
    student, targets = student_of(models), targets_of(models, [ids_of(2, 2, 9)])
    # In this version of transformers neither is a linear layer.
    fixed = {name for name in student.pairs if ".experts." in name or name.endswith(".gate.weight")}
    assert sum(".experts." in name for name in fixed) == 2 * 4 * 3  # blocks, experts, matrices of one
    assert student.trained.keys() == student.pairs.keys() - fixed
    before = student.stored()
    first = divergence(student, targets)
    run = Distillation(student, targets, DistillSettings("kl", 4, 0.01, sign_rate=0.01))
    for epoch in range(4):
        run.epoch(epoch)
    after = student.stored()
    for name in student.pairs:
        assert torch.equal(before[name].dense(), after[name].dense()) == (name not in student.trained)
    assert divergence(student, targets) < 0.9 * first


@pytest.mark.parametrize("architecture", EXPERTS)
def test_a_model_with_experts_compresses_with_all_its_matrices_coded(
    architecture: str, tmp_path: Path
) -> None:
    models = with_experts(architecture, tmp_path)
    fit_settings = FitSettings(Calibration("self", 16, 16), distill_epochs=1, budget=1.2)
    result = compressed(models, tmp_path / "delta", fit_settings=fit_settings)
    specs = result.manifest.tensors
    pairs = pairs_of(models)
    assert {name for name, spec in specs.items() if spec.codec == "onebit"} == pairs.keys()
    weights_only = coded(pairs)
    with Artifact.open(tmp_path / "delta") as artifact:
        for name, spec in specs.items():
            if ".experts." in name:
                assert (spec.planes, spec.rank) == (1, 0)
                own = artifact.onebit(name).dense()
                assert torch.allclose(own, weights_only[name].dense(), rtol=2e-3, atol=1e-8)
    assert result.manifest.fidelity["held_out"]["kl"] < result.manifest.fidelity["base"]["kl"]


@pytest.mark.parametrize("architecture", EXPERTS)
def test_a_model_with_experts_compresses_as_in_the_paper(architecture: str, tmp_path: Path) -> None:
    models = with_experts(architecture, tmp_path)
    paper = FitSettings(Calibration("self", 16, 16), recipe="paper", distill_epochs=1, axis_loss="end")
    result = compressed(models, tmp_path / "delta", method="per-axis", fit_settings=paper)
    assert result.manifest.fidelity["held_out"]["kl"] < result.manifest.fidelity["base"]["kl"]


@pytest.mark.parametrize("architecture", EXPERTS)
def test_the_fidelity_of_a_model_with_experts_is_that_of_the_merged_one(
    architecture: str, tmp_path: Path
) -> None:
    models = with_experts(architecture, tmp_path)
    deltas = coded(pairs_of(models))
    targets = targets_of(models, [ids_of(5, 2, 12)])
    compressed(models, tmp_path / "delta")
    merge(MergeConfig(str(models.base), tmp_path / "delta", tmp_path / "merged", "float32"))
    with torch.no_grad():
        target, got = (
            whole_model(path)(input_ids=targets.batches[0]).logits.double().log_softmax(-1)
            for path in (models.finetunes[0], tmp_path / "merged")
        )
    expected = float((target.exp() * (target - got)).sum(-1).mean())
    assert divergence(student_of(models, deltas), targets) == pytest.approx(expected, rel=1e-3)
