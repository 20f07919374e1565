"""Draws of a batch: the kernel equals the reference, both keep what transformers keeps, and draw as its weights say."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from server.kernels import Draw, draw, reference, score

TEMPERATURES, TOP_KS, TOP_PS, MIN_PS = (
    [0.0, 0.3, 1.0, 2.5, 100.0],
    [0, 1, 5, 50, 1000],
    [1.0, 0.99, 0.9, 0.5, 1e-9],
    [0.0, 0.05, 0.5],
)


def drawn(chance: random.Random, vocab: int) -> Draw:
    """Draw parameters for a row of `vocab` logits."""
    num_tokens = chance.randrange(max(1, vocab - 5), vocab + 1)
    biased = chance.sample(range(num_tokens), min(num_tokens, 4))
    return Draw(
        num_tokens,
        chance.random(),
        chance.choice(TEMPERATURES),
        chance.choice(TOP_KS),
        chance.choice(TOP_PS),
        chance.choice(MIN_PS),
        chance.choice([1.0, 1.3, 0.7]),
        array("i", chance.sample(range(num_tokens), min(num_tokens, 30))),
        array("i", biased),
        array("f", [chance.gauss(0, 1) for _ in biased]),
    )


def logits_of(chance: random.Random, rows: int, vocab: int) -> Tensor:
    """Draw logits: flat or peaked, some with ties, some with tokens that a mask does not allow."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    logits = torch.randn(rows, vocab, generator=generator) * chance.choice([0.1, 3.0, 30.0])
    if chance.random() < 0.2:
        logits = logits.round()
    if chance.random() < 0.2:
        # As a sample of every few tokens would not show it.
        logits[:, :: max(1, vocab // 1024)] -= chance.choice([-5.0, 5.0])
    if chance.random() < 0.2:
        logits[:, torch.rand(vocab, generator=generator) < 0.5] = -torch.inf
        logits[:, 0] = 0.0
    return logits


@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_equals_the_reference_and_restores_the_logits(seed: int) -> None:
    chance = random.Random(seed)
    vocab = chance.choice([1, 2, 3, 100, 511, 512, 513, 4095, 4096, 4097, 20_000, 50_001])
    logits, draws = logits_of(chance, 5, vocab), [drawn(chance, vocab) for _ in range(5)]
    before = logits.clone()
    tokens, least = draw(logits, draws)
    assert torch.equal(logits, before)
    want_tokens, want_least = reference.draw(logits, draws)
    assert tokens == want_tokens.tolist()
    # The kernel names the bound, and the reference the least of the logits that are kept.
    assert all(bound <= lowest for bound, lowest in zip(least, want_least.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_what_is_kept_is_what_transformers_keeps(seed: int) -> None:
    """Logits that equal the least one are all kept; transformers may drop some of them."""
    chance = random.Random(seed)
    vocab, temperature = chance.choice([2, 100, 3000, 30_000]), chance.choice(TEMPERATURES[1:])
    top_k, top_p, min_p = chance.choice(TOP_KS), chance.choice(TOP_PS), chance.choice(MIN_PS)
    logits = logits_of(chance, 4, vocab)
    _, least = draw(logits, [Draw(vocab, 0.5, temperature, top_k, top_p, min_p) for _ in range(len(logits))])
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    wanted = warpers(torch.empty((1, 0), dtype=torch.long), logits.clone()) > -torch.inf  # type: ignore[arg-type]
    for row, bound, want in zip(logits, least, wanted, strict=True):
        got = row >= bound
        assert got[want].all()
        assert len(row[got & ~want].unique()) <= 1


@pytest.mark.parametrize(
    "given",
    [
        {}, {"temperature": 0.4}, {"temperature": 3.0, "top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "penalty": 1.4},
    ],
    ids=str,
)  # fmt: skip
def test_draws_have_the_probabilities_that_transformers_computes(given: dict[str, float]) -> None:
    vocab, count = 40, 20_000
    logits = 2 * torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    seen = [3, 5, 8]
    warpers = LogitsProcessorList()
    if "penalty" in given:
        warpers.append(RepetitionPenaltyLogitsProcessor(given["penalty"]))
    warpers.append(TemperatureLogitsWarper(float(given.get("temperature", 1.0))))
    if "top_k" in given:
        warpers.append(TopKLogitsWarper(int(given["top_k"])))
    if "top_p" in given:
        warpers.append(TopPLogitsWarper(given["top_p"]))
    if "min_p" in given:
        warpers.append(MinPLogitsWarper(given["min_p"]))
    expected = warpers(torch.tensor([seen]), logits[None].clone())[0].softmax(-1) * count  # type: ignore[arg-type]
    uniforms = np.random.default_rng(7).random(count)
    draws = [Draw(vocab, float(uniform), seen=array("i", seen), **given) for uniform in uniforms]  # type: ignore[arg-type]
    tokens, _ = draw(logits.expand(count, vocab).contiguous(), draws)
    found = torch.bincount(torch.tensor(tokens), minlength=vocab)
    assert not found[expected == 0].any()
    likely = expected >= 5
    statistic = float(((found - expected) ** 2 / expected)[likely].sum())
    freedom = int(likely.sum()) - 1
    # Six standard deviations of chi-square.
    assert statistic < freedom + 6 * (2 * max(freedom, 1)) ** 0.5


def test_a_rows_token_does_not_depend_on_the_batch() -> None:
    chance = random.Random(1)
    # As many logits as are drawn on several threads.
    logits = torch.cat([logits_of(chance, 1, 5000) for _ in range(40)])
    draws = [drawn(chance, 5000) for _ in logits]
    together, _ = draw(logits, draws)
    order = chance.sample(range(40), 40)
    again, _ = draw(logits[order], [draws[row] for row in order])
    alone = [draw(row[None], [one])[0][0] for row, one in zip(logits, draws, strict=True)]
    assert together == alone == [token for _, token in sorted(zip(order, again, strict=True))]


def extreme(values: Sequence[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


@pytest.mark.parametrize(
    ("logits", "kept"),
    [
        (extreme([3e38, -3e38, 0.0, 1.0]), {0}),
        (extreme([-torch.inf, -torch.inf, -5.0, -torch.inf]), {2}),
        (extreme([-3e38, -3e38, -3e38]), {0, 1, 2}),
        (extreme([0.0, -0.0, 0.0, -1e-45]), {0, 1, 2, 3}),
        (extreme([2.0**-number for number in range(120)]), set(range(120))),
    ],
)
def test_logits_of_any_size_are_drawn(logits: Tensor, kept: set[int]) -> None:
    for top_k, top_p in ((0, 1.0), (0, 0.999999), (200, 1.0), (200, 0.999999)):
        draws = [Draw(logits.shape[1], uniform / 500, 1.0, top_k, top_p) for uniform in range(500)]
        for own in (draw, reference.draw):
            tokens = own(logits.expand(500, -1).contiguous(), draws)[0]
            found = set(torch.as_tensor(tokens).tolist())
            assert found <= kept
            assert len(found) >= min(len(kept), 3)


def test_top_p_of_almost_nothing_keeps_the_likeliest() -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    tokens, _ = draw(logits, [Draw(1000, uniform, 50.0, 0, 1e-9) for uniform in (0.0, 0.5, 0.999)])
    assert tokens == logits.argmax(-1).tolist()


def test_a_penalty_that_leaves_no_finite_greatest_logit_draws_no_token() -> None:
    logits = torch.tensor([[3e38, 1.0], [3e38, 1.0]])
    draws = [Draw(2, 0.5, temperature, penalty=0.01, seen=array("i", [0])) for temperature in (0.0, 1.0)]
    assert draw(logits, draws)[0] == reference.draw(logits, draws)[0].tolist() == [-1, -1]


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf])
def test_a_row_with_nan_or_infinity_draws_no_token_and_its_neighbours_do(value: float) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2))
    logits[1, 4321] = value
    for one in (Draw(5000, 0.3, 0.0), Draw(5000, 0.3), Draw(5000, 0.3, top_k=7), Draw(5000, 0.3, top_p=0.9)):
        for tokens in (draw(logits, [one] * 3)[0], reference.draw(logits, [one] * 3)[0].tolist()):
            assert [token < 0 for token in tokens] == [False, True, False]
    assert draw(torch.full((1, 600), -torch.inf), [Draw(600, 0.3)])[0] == [-1]


@pytest.mark.parametrize("vocab", [1, 3, 600, 5000, 40_000])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_the_likeliest_tokens_and_their_log_probabilities_equal_the_references(
    vocab: int, num_top: int
) -> None:
    logits = 3 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(5))
    tokens = [0, vocab // 2, vocab - 1, vocab // 3]
    own, ids, values = score(logits, tokens, num_top)
    want_own, want_ids, want_values = reference.score(logits, tokens, num_top)
    assert ids == want_ids.tolist()
    torch.testing.assert_close(torch.tensor(own), want_own, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(values).view(want_values.shape), want_values, rtol=0, atol=1e-5)


def test_of_equally_likely_tokens_the_first_are_named_and_impossible_ones_come_last() -> None:
    logits = torch.full((2, 9000), -torch.inf)
    logits[0] = 1.0
    logits[0, 8000] = 2.0
    logits[1, [7, 5]] = torch.tensor([0.5, 0.25])
    _, ids, values = score(logits, [0, 7], 4)
    assert ids[0] == [8000, 0, 1, 2]
    assert ids[1][:2] == [7, 5]
    assert values[1][2:] == [-torch.inf, -torch.inf]
