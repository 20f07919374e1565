"""Every kind of layer on a mixed batch: each row equals the output of a layer with that variant's own weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from deltastore.format.matrix import MatrixDelta, SignPlane, pack_signs
from server.deltas.layers import EmbeddingDelta, HeadDelta, LinearDelta, NormDelta
from server.deltas.resident import BatchContext, ResidentDelta
from server.errors import EngineFailed
from tests.server.helpers.placed import new_slot, placed

CPU = torch.device("cpu")
# The variant of each sequence, None for the base, and its number of rows.
VARIANTS = [None, 0, 1, 0]
COUNTS = [2, 3, 1, 2]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coded(out_features: int, in_features: int, seed: int) -> MatrixDelta:
    """Draw a matrix of one plane if the seed is 1, otherwise one of three planes and a residual of rank 2."""
    planes = [drawn(out_features, in_features, seed=10 * seed + k) for k in range(1 if seed == 1 else 3)]
    return MatrixDelta(
        tuple(
            SignPlane.from_scales(pack_signs(delta), in_features, delta.abs().mean(1), delta.abs().mean(0))
            for delta in planes
        ),
        None if seed == 1 else drawn(out_features, 2, seed=seed).half(),
        None if seed == 1 else drawn(2, in_features, seed=seed + 1).half(),
    )


# Its matrices and its whole tensors.
Content = tuple[dict[str, MatrixDelta], dict[str, Tensor]]


def resident(
    context: BatchContext,
    *deltas: Content,
    added: dict[str, Tensor] | None = None,
    tied: bool = False,
) -> list[ResidentDelta]:
    """Put deltas, each with its matrices and whole tensors, into slots of their own; the first one has added rows."""
    context.allocate(len(deltas), 64, CPU)
    return [
        placed(context.tables, new_slot(index), matrices, whole, None if index else added, tied=tied)
        for index, (matrices, whole) in enumerate(deltas)
    ]


def batch(deltas: list[ResidentDelta]) -> tuple[list[ResidentDelta | None], list[int], list[int]]:
    own = [None if variant is None else deltas[variant] for variant in VARIANTS]
    return own, COUNTS, COUNTS


def by_row(values: list[Tensor]) -> list[Tensor]:
    """Return the value of each row. `values` has the base's, then each variant's."""
    return [
        values[0 if variant is None else variant + 1]
        for variant, count in zip(VARIANTS, COUNTS, strict=True)
        for _ in range(count)
    ]


def test_linear_rows_have_their_own_weights_and_biases() -> None:
    layer, context = nn.Linear(13, 7).requires_grad_(False), BatchContext()
    first, second = coded(7, 13, seed=1), coded(7, 13, seed=2)
    bias = drawn(7, seed=3)
    LinearDelta(layer, "l", context)
    deltas = resident(context, ({"l.weight": first}, {"l.bias": bias}), ({"l.weight": second}, {}))
    x = drawn(1, sum(COUNTS), 13, seed=4)
    with context.step(*batch(deltas)):
        got = layer(x)[0]
    weights = by_row([layer.weight, layer.weight + first.dense(), layer.weight + second.dense()])
    biases = by_row([layer.bias, bias, layer.bias])
    want = torch.stack([w @ row + b for w, row, b in zip(weights, x[0], biases, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_whole_matrix_replaces_the_bases() -> None:
    layer, context = nn.Linear(13, 7).requires_grad_(False), BatchContext()
    first, second = coded(7, 13, seed=1), drawn(7, 13, seed=2)
    LinearDelta(layer, "l", context)
    x = drawn(1, sum(COUNTS), 13, seed=4)
    deltas = resident(context, ({"l.weight": first}, {}), ({}, {"l.weight": second}))
    with context.step(*batch(deltas)):
        got = layer(x)[0]
    weights = by_row([layer.weight, layer.weight + first.dense(), second])
    want = torch.stack([w @ row + layer.bias for w, row in zip(weights, x[0], strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_base_is_unchanged_after_a_mixed_step() -> None:
    layer, context = nn.Linear(13, 7).requires_grad_(False), BatchContext()
    x = drawn(1, sum(COUNTS), 13, seed=4)
    weight, plain = layer.weight.clone(), layer(x)
    LinearDelta(layer, "l", context)
    deltas = resident(context, *(({"l.weight": coded(7, 13, seed=s)}, {}) for s in (1, 2)))
    with context.step(*batch(deltas)):
        layer(x)
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer(x), plain)


def test_embedding_rows_are_each_variants_own_added_ones_included() -> None:
    layer, context = nn.Embedding(11, 6).requires_grad_(False), BatchContext()
    first, second, added = coded(11, 6, seed=1), coded(11, 6, seed=2), drawn(2, 6, seed=3)
    EmbeddingDelta(layer, "e", context)
    ids = torch.tensor([3, 10, 12, 3, 11, 0, 5, 12])
    own: list[Content] = [({"e.weight": first}, {}), ({"e.weight": second}, {})]
    with context.step(*batch(resident(context, *own, added={"e.weight": added}))):
        got = layer(ids[None])[0]
    tables = by_row(
        [layer.weight, torch.cat([layer.weight + first.dense(), added]), layer.weight + second.dense()]
    )
    torch.testing.assert_close(got, torch.stack([t[i] for t, i in zip(tables, ids, strict=True)]))


def test_logits_of_tokens_that_a_variant_lacks_are_minus_infinity() -> None:
    layer, context = nn.Linear(6, 11, bias=False).requires_grad_(False), BatchContext()
    first, second, added = coded(11, 6, seed=1), coded(11, 6, seed=2), drawn(2, 6, seed=3)
    HeadDelta(layer, "lm_head", "e", context)
    x = drawn(1, sum(COUNTS), 6, seed=4)
    own: list[Content] = [({"lm_head.weight": first}, {}), ({"lm_head.weight": second}, {})]
    with context.step(*batch(resident(context, *own, added={"lm_head.weight": added}))):
        got = layer(x)[0]
    heads = by_row(
        [layer.weight, torch.cat([layer.weight + first.dense(), added]), layer.weight + second.dense()]
    )
    want = torch.full((sum(COUNTS), 13), -torch.inf)
    for row, (head, features) in enumerate(zip(heads, x[0], strict=True)):
        want[row, : len(head)] = head @ features
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_tied_variant_uses_its_embedding_as_its_head(seed: int) -> None:
    layer, context = nn.Linear(6, 11, bias=False).requires_grad_(False), BatchContext()
    delta = coded(11, 6, seed)
    HeadDelta(layer, "e", "e", context)
    x = drawn(1, sum(COUNTS), 6, seed=4)
    own: Content = ({"e.weight": delta}, {})
    with context.step(*batch(resident(context, own, own, tied=True))):
        got = layer(x)[0]
    torch.testing.assert_close(got[2:], x[0, 2:] @ (layer.weight + delta.dense()).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("heads", [None, 1, sum(COUNTS)])
def test_norm_rows_have_their_own_weights(kind: type[nn.Module], heads: int | None) -> None:
    norm, context = kind(10).requires_grad_(False), BatchContext()
    values = [{name: drawn(10, seed=seed) for name, _ in norm.named_parameters()} for seed in (1, 2)]
    shape = (1, sum(COUNTS), 10) if heads is None else (1, sum(COUNTS), heads, 10)
    x = drawn(*shape, seed=3)
    base = {name: value.clone() for name, value in norm.named_parameters()}
    rows = by_row([torch.func.functional_call(norm, own, (x,))[0] for own in (base, *values)])
    want = torch.stack([result[row] for row, result in enumerate(rows)])
    NormDelta(norm, "n", context)
    deltas = resident(context, *(({}, {f"n.{k}": v for k, v in own.items()}) for own in values))
    with context.step(*batch(deltas)):
        got = norm(x)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_logit_rows_of_the_head_are_counted_apart_from_tokens() -> None:
    layer, context = nn.Linear(6, 11, bias=False).requires_grad_(False), BatchContext()
    first, second = coded(11, 6, seed=1), coded(11, 6, seed=2)
    HeadDelta(layer, "lm_head", "e", context)
    deltas = resident(context, ({"lm_head.weight": first}, {}), ({"lm_head.weight": second}, {}))
    x = drawn(1, 4, 6, seed=4)
    with context.step([None, *deltas], [3, 5, 2], [1, 0, 3]):
        got = layer(x)[0]
    want = torch.cat([x[0, :1] @ layer.weight.T, x[0, 1:] @ (layer.weight + second.dense()).T])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_rows_are_the_same_bits_in_any_batch() -> None:
    layer, context = nn.Linear(100, 70, bias=False).requires_grad_(False), BatchContext()
    LinearDelta(layer, "l", context)
    deltas = resident(context, *(({"l.weight": coded(70, 100, seed=seed)}, {}) for seed in (1, 2)))
    x, base = drawn(5, 100, seed=4), nn.functional.linear
    with context.step([*deltas], [3, 2], [0, 0]):
        together = layer(x[None])[0] - base(x, layer.weight)
    for delta, rows in zip(deltas, (slice(0, 3), slice(3, 5)), strict=True):
        with context.step([None, delta], [rows.start, rows.stop - rows.start], [0, 0]):
            alone = layer(x[None, : rows.stop])[0, rows] - base(x[: rows.stop], layer.weight)[rows]
        torch.testing.assert_close(together[rows], alone, rtol=0, atol=1e-5)


def test_a_whole_matrix_takes_the_variants_bias_or_the_bases() -> None:
    layer, context = nn.Linear(13, 7).requires_grad_(False), BatchContext()
    LinearDelta(layer, "l", context)
    whole, bias, x = drawn(7, 13, seed=2), drawn(7, seed=3), drawn(1, 2, 13, seed=4)
    deltas = resident(context, ({}, {"l.weight": whole, "l.bias": bias}), ({}, {"l.weight": whole}))
    with context.step(deltas, [1, 1], [0, 0]):
        got = layer(x)[0]
    want = torch.stack([whole @ x[0, 0] + bias, whole @ x[0, 1] + layer.bias])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_vocabulary_stored_whole_has_added_tokens(dtype: torch.dtype) -> None:
    embedding, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    context = BatchContext()
    for module in (embedding.requires_grad_(False), head.requires_grad_(False)):
        if module is embedding:
            EmbeddingDelta(embedding, "e", context)
        else:
            HeadDelta(head, "lm_head", "e", context)
    rows, logits = drawn(13, 6, seed=1).to(dtype), drawn(12, 6, seed=2).to(dtype)
    (delta,) = resident(context, ({}, {"e.weight": rows, "lm_head.weight": logits}))
    ids, x = torch.tensor([3, 10, 12, 3]), drawn(1, 4, 6, seed=4)
    with context.step([delta, None], [3, 1], [3, 1]):
        embedded, got = embedding(ids[None])[0], head(x)[0]
    assert torch.equal(embedded, torch.cat([rows[ids[:3]].float(), embedding.weight[3:4]]))
    torch.testing.assert_close(got[:3], x[0, :3] @ logits.float().T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[3, :11], head.weight @ x[0, 3], rtol=1e-5, atol=1e-5)
    assert got[3, 11] == -torch.inf


def test_a_layer_whose_rows_fit_no_rows_of_the_step_fails() -> None:
    layer, context = nn.Linear(6, 11).requires_grad_(False), BatchContext()
    LinearDelta(layer, "l", context)
    (delta,) = resident(context, ({"l.weight": coded(11, 6, seed=1)}, {}))
    x = drawn(1, 5, 6, seed=4)
    with (
        pytest.raises(EngineFailed, match="a layer has 5 rows of a step of 4 tokens and 1 rows of logits"),
        context.step([delta], [4], [1]),
    ):
        layer(x)


def test_tables_stay_where_they_are_when_slots_are_filled() -> None:
    norm, layer, context = LlamaRMSNorm(6).requires_grad_(False), nn.Linear(6, 11), BatchContext()
    NormDelta(norm, "n", context)
    LinearDelta(layer.requires_grad_(False), "l", context)
    context.allocate(2, 64, CPU)
    tables = context.tables

    def addresses() -> list[int]:
        return [tables.rows.data_ptr(), *(vector.table.data_ptr() for vector in tables.vectors)]

    before = addresses()
    for seed in range(3):
        slot = new_slot(seed % 2)
        placed(tables, slot, {"l.weight": coded(11, 6, seed)}, {"n.weight": drawn(6, seed=seed)})
    assert addresses() == before


def test_a_slots_next_delta_is_not_taken_for_the_last_one() -> None:
    layer, context = nn.Linear(6, 11, bias=False).requires_grad_(False), BatchContext()
    slot = new_slot(0)
    LinearDelta(layer, "l", context)
    context.allocate(1, 64, CPU)
    x = drawn(1, 2, 6, seed=4)
    # The first one has more terms than the second, of which none may be left.
    for seed in (2, 1):
        delta = coded(11, 6, seed)
        own = placed(context.tables, slot, {"l.weight": delta})
        with context.step([own], [2], [0]):
            got = layer(x)[0]
        torch.testing.assert_close(got, x[0] @ (layer.weight + delta.dense()).T, rtol=1e-5, atol=1e-5)
        slot.generation += 1
        with (
            pytest.raises(EngineFailed, match="no longer holds delta"),
            context.step([own], [2], [0]),
        ):
            pass


def test_a_batch_never_reads_a_slot_that_was_freed() -> None:
    context = BatchContext()
    (delta,) = resident(context, ({}, {}))
    delta.slot.generation += 1
    with (
        pytest.raises(EngineFailed, match="no longer holds delta"),
        context.step([delta], [1], [1]),
    ):
        pass
