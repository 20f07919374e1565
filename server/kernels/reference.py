"""The arguments of kernels, and what they compute in plain torch: the oracle of every kernel.

A row of a table describes, by addresses, what one delta adds to one tensor's products:

| columns | hold |
|---|---|
| ``4 p`` to ``4 p + 3`` | plane p: signs, `scale_out`, `scale_in` and gain; all 0 if there is no such plane |
| LEFT, RIGHT, RANK | the low-rank part |
| WHOLE, WHOLE_ROWS, WHOLE_DTYPE | a tensor that is stored whole and replaces the base's |
| BIAS, BASE_BIAS | the variant's bias, 0 if it is the base's; and the base's, 0 if there is none |
| SINGLE | bit p is set if `scale_out` of plane p is one number for all outputs |

Signs are uint8 ``[out, ceil(in / 8)]``; a set bit is +1 and bit i of byte j belongs to input 8 j + i. Scales are
float16 ``[out]`` and ``[in]``, and one gain is float32; a missing scale is ones. `left` is float16 ``[out, rank]``,
`right` float16 ``[rank, in]``. A whole tensor is ``[rows, in]`` of a dtype of `WHOLE_DTYPES`. Biases are float32
``[out]``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from deltastore.compiled.sources import Sources

SOURCES = Sources.of(Path(__file__).parent)

MAX_PLANES = 4
SIGNS, SCALE_OUT, SCALE_IN, GAIN = range(4)
PLANE_FIELDS = 4
LEFT, RIGHT, RANK, WHOLE, WHOLE_ROWS, WHOLE_DTYPE, BIAS, BASE_BIAS, SINGLE = range(16, 25)
FIELDS = 25
# Columns that hold no address.
NUMBERS = (RANK, WHOLE_ROWS, WHOLE_DTYPE, SINGLE)
# Dtypes of whole tensors, by the number in the column WHOLE_DTYPE.
WHOLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements of a whole tensor that are widened at a time.
BLOCK_NUMEL = 1 << 22


class Draw(msgspec.Struct, frozen=True, eq=False):
    """How the next token of one row of logits is drawn.

    Biases are added, then the tokens that were seen are penalized, and of what the temperature divides top-k, top-p and
    min-p keep a part, each of what the ones before it have kept.
    """

    num_tokens: int  # logits from here on are another variant's, and not read
    uniform: float = 0.0  # the draw, from 0 to below 1
    temperature: float = 1.0  # 0 takes the greatest logit
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0
    # One for all: nothing is ever added to them.
    seen: array[int] = array("i")  # each token once
    biased: array[int] = array("i")  # tokens
    biases: array[float] = array("f")  # what is added to their logits


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """The options that a model passes to attention beside queries, keys and values."""

    scaling: float | None  # None is ``key_dim ** -0.5``
    window: int | None  # keys that a token sees, itself included; None is all
    softcap: float | None  # scores s become ``softcap * tanh(s / softcap)``
    sinks: Tensor | None  # [heads]: a score per head that enters the softmax and has no value


@dataclass(frozen=True, slots=True, eq=False)
class AttentionGroup:
    """Sequences of a step with equally many new tokens, for one call. The cache has the new tokens' keys."""

    row_index: Tensor  # [sequences, new tokens] int64: rows of the flat batch
    page_table: Tensor  # [sequences, pages] int64, padded with any page
    positions: Tensor  # [sequences, new tokens] int64
    # By window, made on first use: [sequences, 1, new tokens, keys] bool.
    masks: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """One sign plane, with its factors in float32."""

    signs: Tensor  # [out, ceil(in / 8)] uint8
    factor_out: Tensor  # [out] float32: gain times `scale_out`
    factor_in: Tensor | None  # [in] float32: `scale_in`; None is ones

    def product(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out] float32
        """Return ``factor_out * (B @ (factor_in * x))``, with an unpacked copy of the signs."""
        inputs = x.float() if self.factor_in is None else x.float() * self.factor_in
        return inputs @ _unpack(self.signs, x.shape[-1]).T * self.factor_out

    def rows(self, ids: Tensor, in_features: int) -> Tensor:  # [rows] -> [rows, in] float32
        """Return rows of the dense delta, with the order of operations of `SignPlane.dense`."""
        delta = _unpack(self.signs[ids], in_features) * self.factor_out[ids, None]
        return delta if self.factor_in is None else delta * self.factor_in


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """The terms that one row of a table describes, as tensors over the memory that it names."""

    planes: Sequence[Plane]
    left: Tensor | None
    right: Tensor | None
    whole: Tensor | None
    bias: Tensor | None
    base_bias: Tensor | None

    @classmethod
    def of(cls, fields: Sequence[int], out_features: int, in_features: int, device: torch.device) -> Terms:
        """Read a row of a table, ``[FIELDS]``, of a tensor ``[out_features, in_features]``."""

        def at(column: int, shape: tuple[int, ...], typestr: str) -> Tensor | None:
            return _at(fields[column], shape, typestr, device) if fields[column] else None

        planes = []
        for number in range(MAX_PLANES):
            first, num_scales = PLANE_FIELDS * number, 1 if fields[SINGLE] >> number & 1 else out_features
            signs = at(first + SIGNS, (out_features, (in_features + 7) // 8), "|u1")
            gain = at(first + GAIN, (1,), "<f4")
            if signs is None or gain is None:
                break
            scale_out = at(first + SCALE_OUT, (num_scales,), "<f2")
            scale_in = at(first + SCALE_IN, (in_features,), "<f2")
            factor_out = (gain if scale_out is None else scale_out.float() * gain).expand(out_features)
            planes.append(Plane(signs, factor_out, None if scale_in is None else scale_in.float()))
        rank, dtype = fields[RANK], WHOLE_DTYPES[fields[WHOLE_DTYPE]]
        whole = at(WHOLE, (fields[WHOLE_ROWS], in_features), "<i4" if dtype.itemsize == 4 else "<i2")
        return cls(
            planes,
            at(LEFT, (out_features, rank), "<f2"),
            at(RIGHT, (rank, in_features), "<f2"),
            None if whole is None else whole.view(dtype),
            at(BIAS, (out_features,), "<f4"),
            at(BASE_BIAS, (out_features,), "<f4"),
        )

    @property
    def is_empty(self) -> bool:
        return not self.planes and all(part is None for part in (self.left, self.whole, self.bias))


def row_of(
    planes: Sequence[tuple[Tensor, Tensor | None, Tensor | None, Tensor]] = (),
    low_rank: tuple[Tensor, Tensor] | None = None,
    whole: Tensor | None = None,
    bias: Tensor | None = None,
    base_bias: Tensor | None = None,
) -> Tensor:  # [FIELDS] int64
    """Return the row of a table that describes tensors, which must outlive it.

    Args:
        planes: signs, `scale_out`, `scale_in` and gain of each plane.
        low_rank: ``left`` and ``right``.
        whole: a tensor that replaces the base's.
        bias: the variant's bias.
        base_bias: the base's bias.
    """
    row = [0] * FIELDS
    for number, plane in enumerate(planes):
        addresses = [0 if part is None else part.data_ptr() for part in plane]
        row[PLANE_FIELDS * number : PLANE_FIELDS * (number + 1)] = addresses
        signs, scale_out, *_ = plane
        if scale_out is not None and len(scale_out) < len(signs):
            row[SINGLE] |= 1 << number
    if low_rank is not None:
        left, right = low_rank
        row[LEFT], row[RIGHT], row[RANK] = left.data_ptr(), right.data_ptr(), len(right)
    if whole is not None:
        row[WHOLE], row[WHOLE_ROWS] = whole.data_ptr(), len(whole)
        row[WHOLE_DTYPE] = WHOLE_DTYPES.index(whole.dtype)
    for column, vector in ((BIAS, bias), (BASE_BIAS, base_bias)):
        row[column] = 0 if vector is None else vector.data_ptr()
    return torch.tensor(row)


def add_planes(
    output: Tensor,  # [rows, out of all parts], any float dtype, changed in place
    x: Tensor,  # [rows, in], any float dtype
    table: Tensor,  # [parts, slots, FIELDS] int64
    order: Tensor,  # [positions] int32
    ranges: Tensor,  # [slots, 2] int32
    ends: Sequence[int],
) -> None:
    """Compute `server.kernels.add_planes` with unpacked copies of the signs."""
    for part, slot, rows in _rows_of(table, order, ranges):
        begin = ends[part - 1] if part else 0
        columns = slice(begin, ends[part])
        terms = Terms.of(table[part, slot].tolist(), ends[part] - begin, x.shape[1], x.device)
        if not terms.is_empty:
            output[rows, columns] = summed(output[rows, columns], x[rows], terms).to(output.dtype)


def summed(
    output: Tensor,  # [rows, out], any float dtype: the base's products
    x: Tensor,  # [rows, in], any float dtype
    terms: Terms,
    add_plane: Callable[[Tensor, Tensor, Plane], None] | None = None,
) -> Tensor:  # [rows, out] float32
    """Return the base's products with all terms of a delta. `add_plane` adds a plane's product with x to float32."""
    total = output.to(torch.float32, copy=True)
    if terms.whole is not None:
        own = _product(x, terms.whole)
        # A delta may have fewer rows that the base lacks than the widest one of the batch.
        total[:, : own.shape[1]] = own[:, : total.shape[1]]
    for plane in terms.planes:
        if add_plane is None:
            total += plane.product(x)
        else:
            add_plane(total, x, plane)
    if terms.left is not None and terms.right is not None:
        total += x.float() @ terms.right.float().T @ terms.left.float().T
    if terms.whole is not None:
        own_bias = terms.base_bias if terms.bias is None else terms.bias
        return total if own_bias is None else total + own_bias
    if terms.bias is not None and terms.base_bias is not None:
        return total + (terms.bias - terms.base_bias)
    return total


def _product(x: Tensor, whole: Tensor) -> Tensor:
    """Return the product with a whole tensor, [rows, out]: as the base's in its own dtype, else in float32."""
    if x.dtype == whole.dtype:
        return x @ whole.T
    num_rows = max(1, BLOCK_NUMEL // whole.shape[1])
    return torch.cat([x.float() @ block.float().T for block in whole.split(num_rows)], 1)


def add_rows(
    output: Tensor,  # [rows, in], any float dtype, changed in place
    ids: Tensor,  # [rows] int64
    table: Tensor,  # [1 or 2, slots, FIELDS] int64
    order: Tensor,  # [positions] int32
    ranges: Tensor,  # [slots, 2] int32
    num_ids: int,
    scale: float,
) -> None:
    """Compute `server.kernels.add_rows` with unpacked copies of the signs."""
    in_features = output.shape[1]
    for part, slot, rows in _rows_of(table, order, ranges):
        terms = Terms.of(table[part, slot].tolist(), num_ids, in_features, output.device)
        if terms.is_empty:
            continue
        own = ids[rows] - part * num_ids
        chosen = (own >= 0) & (own < (num_ids if not part or terms.whole is None else len(terms.whole)))
        rows, own = rows[chosen], own[chosen]
        total = output[rows].float()
        if terms.whole is not None:
            total = terms.whole[own].float() * scale
        for plane in terms.planes:
            total = total + plane.rows(own, in_features) * scale
        if terms.left is not None and terms.right is not None:
            total = total + terms.left[own].float() @ terms.right.float() * scale
        output[rows] = total.to(output.dtype)


# Weights that are added up at a time, in the order of the tokens.
DRAW_BLOCK = 512


def draw(
    logits: Tensor,  # [rows, vocab] float32
    draws: Sequence[Draw],
) -> tuple[Tensor, Tensor]:  # [rows] int64 and float32, on the same device
    """Compute `server.kernels.draw` in operations of torch on the whole batch, which read nothing on the host."""
    device = logits.device
    sizes = torch.tensor([one.num_tokens for one in draws], device=device)[:, None]
    x = logits.masked_fill(torch.arange(logits.shape[1], device=device) >= sizes, -torch.inf)
    for own, one in zip(x, draws, strict=True):
        if one.biased:
            biased = torch.tensor(one.biased, dtype=torch.long, device=device)
            own.index_add_(0, biased, torch.tensor(one.biases, dtype=torch.float32, device=device))
        if one.penalty != 1:
            seen = torch.tensor(one.seen, dtype=torch.long, device=device)
            own[seen] = torch.where(own[seen] < 0, own[seen] * one.penalty, own[seen] / one.penalty)
    greatest, best = x.max(-1, keepdim=True)
    best = torch.where(greatest.isfinite(), best, -1)
    if all(one.temperature == 0 for one in draws):
        return best[:, 0], greatest[:, 0]
    uniform, temperature, top_k, top_p, min_p = torch.tensor(
        [(one.uniform, one.temperature, one.top_k, one.top_p, one.min_p) for one in draws],
        dtype=torch.float64,
        device=device,
    ).T[:, :, None]
    weights = ((x - greatest) / temperature.clamp(min=1e-30).float()).exp()
    keys = _keys(x)
    least = _least_key(keys, torch.ones_like(weights), top_k.clamp(max=x.shape[1]))
    kept = (weights * (keys >= least)).sum(-1, keepdim=True, dtype=torch.float64)
    least = torch.maximum(least, _least_key(keys, weights, torch.where(top_p < 1, top_p * kept, 0.0)))
    likely = torch.where(min_p > 0, greatest + temperature * min_p.log(), -torch.inf).float()
    is_kept = (keys >= least) & (x >= likely) & (x > -torch.inf)
    sums = nn.functional.pad(weights * is_kept, (0, -x.shape[1] % DRAW_BLOCK)).unflatten(-1, (-1, DRAW_BLOCK))
    blocks = sums.sum(-1, dtype=torch.float64).cumsum(-1)
    block = torch.searchsorted(blocks, uniform * blocks[:, -1:], right=True).clamp(max=blocks.shape[1] - 1)
    before = blocks.gather(1, block) - sums.gather(1, block[..., None].expand(-1, -1, DRAW_BLOCK)).sum(
        -1, dtype=torch.float64
    )
    inside = sums.gather(1, block[..., None].expand(-1, -1, DRAW_BLOCK))[:, 0].double().cumsum(-1)
    place = torch.searchsorted(inside, uniform * blocks[:, -1:] - before, right=True)
    # A sum in another order may end before the target: then the last kept token has it.
    last = torch.where(inside == inside[:, -1:], 0, 1).sum(-1, keepdim=True)
    token = block * DRAW_BLOCK + torch.minimum(place, last)
    lowest = torch.where(is_kept, x, torch.inf).amin(-1, keepdim=True)
    is_greedy = (temperature == 0) | ~greatest.isfinite()
    return torch.where(is_greedy, best, token)[:, 0], torch.where(is_greedy, greatest, lowest)[:, 0]


def score(
    logits: Tensor,  # [rows, vocab] float32
    tokens: Sequence[int],
    num_top: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `server.kernels.score`."""
    totals = logits.logsumexp(-1, keepdim=True)
    wanted = torch.tensor(tokens, dtype=torch.long, device=logits.device)
    best = logits.topk(min(num_top, logits.shape[1]))
    return (logits.gather(1, wanted[:, None]) - totals)[:, 0], best.indices, best.values - totals


def _keys(x: Tensor) -> Tensor:
    """Return integers that order as the numbers do, int64."""
    bits = (x + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _least_key(keys: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Return the greatest key ``[rows, 1]`` down to which weights sum up to `target`, float64; the least one for 0."""
    low = torch.full_like(target, -(1 << 31), dtype=torch.int64)
    high = torch.full_like(low, 1 << 31)
    for _ in range(33):
        middle = (low + high) // 2
        reaches = (weights * (keys >= middle)).sum(-1, keepdim=True, dtype=torch.float64) >= target
        low, high = torch.where(reaches, middle, low), torch.where(reaches, high, middle)
    return torch.where(target > 0, low, -(1 << 31))


def _rows_of(table: Tensor, order: Tensor, ranges: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield each part and slot with rows in the batch, and those rows."""
    for part in range(len(table)):
        for slot, (first, last) in enumerate(ranges.tolist()):
            if first < last:
                yield part, slot, order[first:last].long()


class _Memory:
    """An array at an address, for numpy and torch. It does not own the memory: the slot outlives the call."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        interface: dict[str, Any] = {
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
        }
        self.__array_interface__ = self.__cuda_array_interface__ = interface


def _at(address: int, shape: tuple[int, ...], typestr: str, device: torch.device) -> Tensor:
    memory = _Memory(address, shape, typestr)
    if device.type == "cpu":
        return torch.from_numpy(np.asarray(memory))
    return torch.as_tensor(memory, device=device)


def _unpack(packed: Tensor, in_features: int) -> Tensor:
    """Return signs as float32, [rows, in]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[:, :, None] >> shifts & 1).flatten(1)[:, :in_features]
    return bits.float().mul_(2).sub_(1)
