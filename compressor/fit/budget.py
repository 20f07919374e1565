"""Mixed-precision allocation: bytes beyond one bit per weight go to the upgrades that save most KL divergence per byte.

Measures upgrades in a student and buys them; those of linear layers come from the layer stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.codec import code_matrix
from compressor.config import Method
from compressor.fit.distill import TeacherTargets, divergence_of
from compressor.fit.student import Student
from compressor.pairs import TensorPair
from deltastore.format.layout import TENSOR_ALIGNMENT
from deltastore.format.matrix import MatrixDelta

GAIN_BYTES = 4

UpgradeKey = tuple[str, int]  # a matrix, and the number of one of its upgrades


def spend(
    spare_bytes: int,
    deltas: Mapping[str, MatrixDelta],
    upgrades: Mapping[str, Sequence[MatrixDelta]],
    kl_saved: Mapping[UpgradeKey, float],
) -> dict[str, MatrixDelta]:
    """Return the deltas, some of them upgraded: greedily by KL divergence saved per byte, while bytes last.

    A matrix has one upgrade at a time. A larger one replaces it where the further saving per further byte is the
    best use of the bytes.

    Args:
        kl_saved: by name and the upgrade's number, the KL divergence that it alone takes away, in nats per token.
    """
    extra = {
        (name, number): stored_bytes(upgrade) - stored_bytes(deltas[name])
        for name, own in upgrades.items()
        for number, upgrade in enumerate(own)
    }
    bought = dict.fromkeys(upgrades, (0.0, 0))  # KL saved and bytes
    chosen = dict(deltas)
    while True:
        uses = []
        for key, extra_bytes in extra.items():
            saved, num_bytes = kl_saved[key] - bought[key[0]][0], extra_bytes - bought[key[0]][1]
            if saved > 0 and 0 < num_bytes <= spare_bytes:
                uses.append((-saved / num_bytes, key))
        if not uses:
            return chosen
        name, number = min(uses)[1]
        spare_bytes -= extra[name, number] - bought[name][1]
        bought[name] = kl_saved[name, number], extra[name, number]
        chosen[name] = upgrades[name][number]


def stored_bytes(delta: MatrixDelta) -> int:
    """Return the bytes of a coded matrix in an artifact, added rows aside."""
    parts = [part for plane in delta.planes for part in (plane.signs, plane.scale_out, plane.scale_in)]
    sizes = [part.nbytes for part in (*parts, delta.left, delta.right) if part is not None]
    sizes += [GAIN_BYTES] * delta.num_planes
    return sum(size + -size % TENSOR_ALIGNMENT for size in sizes)


def embedding_upgrades(
    student: Student, deltas: Mapping[str, MatrixDelta], method: Method
) -> dict[str, list[MatrixDelta]]:
    """Return the embedding with a second plane, from weights alone, because it has no inputs to be fitted to."""
    name = student.decoder.embedding_name
    if name is None or name not in deltas:
        return {}
    delta = deltas[name]
    second = code_matrix(_Remainder(student.pairs[name], delta), method).delta
    return {name: [MatrixDelta((*delta.planes, second))]} if second.axis == delta.axis else {}


@torch.no_grad()
def measure(
    student: Student, targets: TeacherTargets, upgrades: Mapping[str, Sequence[MatrixDelta]]
) -> dict[UpgradeKey, float]:
    """Return the KL divergence, in nats per token, that each upgrade alone takes away; 0 if no forward reaches it.

    The hidden states of every student with one upgrade go through the blocks together, so that each block is read
    once. Memory grows by the hidden states of `targets` per upgrade.
    """
    plain = [student.enter(ids).hidden for ids in targets.batches]
    others: dict[UpgradeKey, list[Tensor]] = {}
    for key, upgrade in _upgrades_of(upgrades, [student.decoder.embedding_name]):
        with student.replaced(key[0], upgrade):
            others[key] = [student.enter(ids).hidden for ids in targets.batches]
    for index in range(student.num_blocks):
        for key, upgrade in _upgrades_of(upgrades, student.names(index)):
            with student.replaced(key[0], upgrade):
                others[key] = _run_block(student, index, plain)
        block = student.block(index)
        for hiddens in (plain, *(own for key, own in others.items() if key[0] not in student.names(index))):
            hiddens[:] = [student.decoder.run(block, index, hidden) for hidden in hiddens]
    for key, _ in _upgrades_of(upgrades, [student.decoder.head_name]):
        # A tied embedding has hidden states of its own by now.
        others.setdefault(key, plain)
    before = divergence_of(student, targets, plain)
    kl_saved = {key: 0.0 for key, _ in _upgrades_of(upgrades, upgrades)}
    for (name, number), hiddens in others.items():
        with student.replaced(name, upgrades[name][number]):
            kl_saved[name, number] = before - divergence_of(student, targets, hiddens)
    return kl_saved


@dataclass(frozen=True, slots=True, eq=False)
class _Remainder:
    """The part of a difference that a delta leaves, as a `Difference` to code."""

    pair: TensorPair
    delta: MatrixDelta

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pair.shape

    def row_block(self, rows: slice) -> Tensor:
        return self.pair.row_block(rows).sub_(self.delta.dense(rows))


def _upgrades_of(
    upgrades: Mapping[str, Sequence[MatrixDelta]], names: Iterable[str | None]
) -> Iterator[tuple[UpgradeKey, MatrixDelta]]:
    for name in names:
        for number, upgrade in enumerate(upgrades.get(name or "", ())):
            yield (str(name), number), upgrade


def _run_block(student: Student, index: int, hiddens: Sequence[Tensor]) -> list[Tensor]:
    block = student.block(index)
    return [student.decoder.run(block, index, hidden) for hidden in hiddens]
