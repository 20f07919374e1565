"""Moments collected block by block are those of hooks on two whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.decoder import BlockLinear
from compressor.moments import Moments, Stage, block_cache, block_moments, head_moments, moments, token_counts
from tests.decoders import CPU, one_thread, open_decoder, whole_model
from tests.tiny_models import ARCHITECTURES, make_pair

__all__ = ["one_thread"]

IDS = torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(1))
BATCHES = [IDS[:3], IDS[3:]]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The fine-tune's directory, then its base's."""
    models = make_pair(request.param, tmp_path_factory.mktemp(request.param))
    return [models.finetunes[0], models.base]


def hooked_inputs(model: Any, weight: str) -> Tensor:  # [tokens, in] float64
    """What the layer of a weight reads in the whole model."""
    seen: list[Tensor] = []
    module = model.get_submodule(weight.removesuffix(".weight"))
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        model(IDS)
    hook.remove()
    return seen[0].flatten(0, -2).double()


def stages_at(pair: list[Path], index: int) -> list[Stage]:
    """Teacher and student before a block, nothing compressed."""
    stages = []
    for path in pair:
        decoder = open_decoder(path)
        hiddens = decoder.embed(BATCHES)
        for before in range(index):
            decoder.advance(decoder.load_block(before), before, hiddens)
        stages.append(Stage(decoder, index, decoder.load_block(index), hiddens))
    return stages


def brute_force(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    """H and C in float64."""
    return student.T @ student, teacher.T @ student


def assert_moments(actual: Moments, teacher: Tensor, student: Tensor) -> None:
    gram, cross = brute_force(teacher, student)
    assert actual.count == len(student) == IDS.numel()
    assert actual.gram.dtype == torch.float64
    size = gram.diagonal().mean().item()
    torch.testing.assert_close(actual.gram, gram, rtol=1e-5, atol=1e-5 * size)
    torch.testing.assert_close(actual.gram + actual.drift, cross, rtol=1e-5, atol=1e-5 * size)


def test_moments_of_a_block_are_those_of_hooks_on_whole_models(pair: list[Path]) -> None:
    teacher, student = stages_at(pair, 1)
    models = [whole_model(path) for path in pair]
    for group in student.decoder.linears(student.block, 1):
        inputs = [hooked_inputs(model, group[-1].name) for model in models]
        assert_moments(block_moments(group[0], teacher, student), *inputs)


def test_what_was_compressed_earlier_in_a_block_is_seen_by_later_groups(pair: list[Path]) -> None:
    teacher, student = stages_at(pair, 0)
    groups = student.decoder.linears(student.block, 0)
    models = [whole_model(path) for path in pair]
    for linear in groups[0]:
        student.block.get_submodule(linear.path).get_parameter("weight").data *= 1.5
        models[1].get_parameter(linear.name).data *= 1.5
    inputs = [hooked_inputs(model, groups[1][0].name) for model in models]
    assert_moments(block_moments(groups[1][0], teacher, student), *inputs)


def test_moments_of_the_head_are_those_of_hooks_on_whole_models(pair: list[Path]) -> None:
    lasts = []
    for stage in stages_at(pair, 1):
        hiddens = list(stage.hiddens)
        stage.decoder.advance(stage.block, stage.index, hiddens)
        stage.decoder.finish_all(hiddens)
        lasts.append(hiddens)
    models = [whole_model(path) for path in pair]
    name = "embed_out.weight" if hasattr(models[0], "embed_out") else "lm_head.weight"
    inputs = [hooked_inputs(model, name) for model in models]
    assert_moments(head_moments(*lasts, CPU), *inputs)


def test_a_cache_holds_what_hooks_on_whole_models_see(pair: list[Path]) -> None:
    teacher, student = stages_at(pair, 1)
    models = [whole_model(path) for path in pair]
    for group in student.decoder.linears(student.block, 1):
        cache = block_cache(group, teacher, student)
        inputs_t, inputs = (hooked_inputs(model, group[0].name) for model in models)
        torch.testing.assert_close(cache.inputs, inputs.bfloat16(), rtol=2**-7, atol=1e-5)
        assert list(cache.outputs) == [linear.name for linear in group]
        for name, outputs in cache.outputs.items():
            expected = inputs_t @ models[0].get_parameter(name).detach().double().T
            torch.testing.assert_close(outputs, expected.bfloat16(), rtol=2**-7, atol=1e-4)


def test_the_cross_moments_of_residual_targets_come_from_small_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(500, 24, generator=generator)
    teacher = student + 1e-3 * torch.randn(500, 24, generator=generator)
    finetune = torch.randn(16, 24, generator=generator)
    delta = 1e-4 * torch.randn(16, 24, generator=generator)
    base = finetune.double() - delta.double()
    targets = teacher.double() @ finetune.double().T - student.double() @ base.T
    expected = targets.T @ student.double()
    actual = moments([teacher], [student], torch.float64).cross(delta, finetune)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().mean()))


def test_moments_do_not_depend_on_how_tokens_are_batched() -> None:
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    whole = moments([inputs + 1], [inputs], torch.float64)
    parts = moments((inputs + 1).split(7), inputs.split(7), torch.float64)
    assert parts.count == whole.count
    torch.testing.assert_close(parts.gram, whole.gram, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(parts.drift, whole.drift, rtol=1e-5, atol=1e-4)


def test_two_models_that_disagree_on_the_number_of_batches_are_a_mistake() -> None:
    inputs = torch.ones(4, 2)
    with pytest.raises(ValueError, match="longer"):
        moments([inputs], [inputs, inputs], torch.float64)


def test_moments_are_kept_in_the_dtype_asked_for(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path)
    teacher, student = stages_at([models.finetunes[0], models.base], 0)
    linear = BlockLinear("model.layers.0.mlp.down_proj.weight", "mlp.down_proj")
    assert block_moments(linear, teacher, student, torch.float32).gram.dtype == torch.float32


def test_token_counts_are_per_id() -> None:
    counts = token_counts([torch.tensor([[0, 2], [2, 2]]), torch.tensor([[5]])], 7)
    assert counts.tolist() == [1, 0, 3, 0, 0, 1, 0]
