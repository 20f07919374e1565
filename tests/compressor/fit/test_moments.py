"""Moments collected block by block are those of hooks on two whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.decoder.decoder import Decoder
from compressor.fit.least_squares import Moments, moments
from tests.compressor.helpers.decoders import open_decoder, whole_model
from tests.helpers.tiny_models import ARCHITECTURES, make_pair

IDS = torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(1))
BATCHES = [IDS[:3], IDS[3:]]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The fine-tune's directory, then its base's."""
    models = make_pair(request.param, tmp_path_factory.mktemp(request.param))
    return [models.finetunes[0], models.base]


def hooked_inputs(model: Any, weight: str) -> Tensor:  # [tokens, in] float64
    """Return the inputs of a weight's layer in the whole model."""
    seen: list[Tensor] = []
    module = model.get_submodule(weight.removesuffix(".weight"))
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        model(IDS)
    hook.remove()
    return seen[0].flatten(0, -2).double()


def entering(path: Path, index: int) -> tuple[Decoder, list[Tensor]]:
    """Return a decoder and the inputs of one of its blocks."""
    decoder = open_decoder(path)
    hiddens = decoder.embed(BATCHES)
    for before in range(index):
        decoder.advance(decoder.load_block(before), before, hiddens)
    return decoder, hiddens


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
    (teacher, teacher_hiddens), (student, hiddens) = (entering(path, 1) for path in pair)
    models = [whole_model(path) for path in pair]
    block = student.load_block(1)
    groups = student.linears(block, 1)
    read = teacher.advance_and_record(
        teacher.load_block(1), 1, [group[0].path for group in groups], teacher_hiddens
    )
    for group in groups:
        inputs = [hooked_inputs(model, group[-1].name) for model in models]
        own = (student.input_of(block, 1, group[0].path, hidden) for hidden in hiddens)
        assert_moments(moments(read[group[0].path], own), *inputs)


def test_recording_inputs_does_not_change_the_outputs(pair: list[Path]) -> None:
    decoder, hiddens = entering(pair[0], 0)
    expected = [hidden.clone() for hidden in hiddens]
    block = decoder.load_block(0)
    decoder.advance(block, 0, expected)
    path = decoder.linears(block, 0)[0][0].path
    decoder.advance_and_record(block, 0, [path], hiddens)
    assert all(torch.equal(one, other) for one, other in zip(hiddens, expected, strict=True))
    assert not block.get_submodule(path)._forward_pre_hooks


def test_what_was_compressed_earlier_in_a_block_is_seen_by_later_groups(pair: list[Path]) -> None:
    student, hiddens = entering(pair[1], 0)
    block = student.load_block(0)
    groups = student.linears(block, 0)
    model = whole_model(pair[1])
    for linear in groups[0]:
        block.get_submodule(linear.path).get_parameter("weight").data *= 1.5
        model.get_parameter(linear.name).data *= 1.5
    own = torch.cat([student.input_of(block, 0, groups[1][0].path, hidden) for hidden in hiddens])
    expected = hooked_inputs(model, groups[1][0].name)
    torch.testing.assert_close(own.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


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


def test_moments_are_kept_in_the_dtype_asked_for() -> None:
    inputs = torch.ones(4, 2)
    assert moments([inputs], [inputs], torch.float32).gram.dtype == torch.float32
