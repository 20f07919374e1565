"""Logits that wait for masks."""

from __future__ import annotations

import torch

from server.engine.requests.request_state import RequestState, SequenceOutput
from server.engine.sampling.held_logits import HeldLogits, masked
from server.protocol.request import Request
from server.protocol.sampling_params import SamplingParams
from tests.server.engine.helpers.masks import pack

WIDTH = 40


def output(num_embeddings: int = WIDTH) -> SequenceOutput:
    """Make a constrained sequence whose mask has not come."""
    request = Request("r", "t", None, None, (1,), num_embeddings, SamplingParams(is_constrained=True))
    state = RequestState(request, lambda event: None, "device", 0.0)
    return state.outputs[state.start_sequence().index]


def allow(one: SequenceOutput, *tokens: int, num_embeddings: int = WIDTH) -> None:
    one.set_mask(0, pack(tokens, num_embeddings))


def test_rows_of_steps_with_and_without_a_variant_of_more_tokens_are_sampled_together() -> None:
    held, narrow, wide = HeldLogits(1.0), output(), output(WIDTH + 30)
    held.hold(narrow, torch.ones(WIDTH), 0.0)
    assert not held.take_ready()
    held.hold(wide, torch.full((WIDTH + 30,), 2.0), 0.0)
    allow(narrow, 3)
    allow(wide, WIDTH + 29, num_embeddings=WIDTH + 30)
    ready = held.take_ready()
    best = {
        one.output: (int(row.argmax()), float(row.max()))
        for one, row in zip(ready, masked(ready), strict=True)
    }
    assert best == {narrow: (3, 1.0), wide: (WIDTH + 29, 2.0)}


def test_a_row_that_waits_is_not_changed_by_its_step_s_memory() -> None:
    held, late, step = HeldLogits(1.0), output(), torch.zeros(2, WIDTH)
    held.hold(late, step[1], 0.0)
    assert held.take_views() == [late]
    held.keep_copy(late)
    step.fill_(torch.nan)
    allow(late, 5)
    assert masked(held.take_ready())[0, 5] == 0.0
    assert not held.take_views()


def test_a_sequence_is_late_until_its_mask_comes_even_if_its_logits_are_dropped() -> None:
    held, one, other = HeldLogits(1.0), output(), output()
    held.hold(one, torch.zeros(WIDTH), 0.0)
    held.hold(other, torch.zeros(WIDTH), 0.5)
    held.drop(one)
    assert held.late(1.2) == [one]
    assert held.late(2.0) == [one, other]
    allow(one, 1)
    assert held.late(2.0) == [other]
    held.forget(other)
    assert held.late(2.0) == []
