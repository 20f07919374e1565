"""Where more bytes than one bit per weight go: to the upgrades whose measured gain per byte is largest.

Knows a student, what its matrices could become, and bytes; nothing of how upgrades are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from compressor.fitting.distillation.distill import divergence_of
from compressor.fitting.distillation.student import Student
from compressor.fitting.distillation.teacher import TeacherTargets
from deltastore.format.layout import TENSOR_ALIGNMENT
from deltastore.format.matrix import MatrixDelta

GAIN_BYTES = 4

Upgrade = tuple[str, int]  # a matrix, and which of its upgrades


def spend(
    spare_bytes: int,
    deltas: Mapping[str, MatrixDelta],
    upgrades: Mapping[str, Sequence[MatrixDelta]],
    gains: Mapping[Upgrade, float],
) -> dict[str, MatrixDelta]:
    """The deltas, some of them upgraded: greedily by gain per byte, while bytes last.

    A matrix has one upgrade at a time. It gives way to a larger one where that is the best use of the bytes between
    them, by what it gains more.

    Args:
        gains: by name and the upgrade's number, the KL divergence that it alone takes away.
    """
    extra = {
        (name, number): stored_bytes(upgrade) - stored_bytes(deltas[name])
        for name, options in upgrades.items()
        for number, upgrade in enumerate(options)
    }
    bought = dict.fromkeys(upgrades, (0.0, 0))  # gain and bytes
    chosen = dict(deltas)
    while True:
        uses = []
        for key, extra_bytes in extra.items():
            gain, num_bytes = gains[key] - bought[key[0]][0], extra_bytes - bought[key[0]][1]
            if gain > 0 and 0 < num_bytes <= spare_bytes:
                uses.append((-gain / num_bytes, key))
        if not uses:
            return chosen
        name, number = min(uses)[1]
        spare_bytes -= extra[name, number] - bought[name][1]
        bought[name] = gains[name, number], extra[name, number]
        chosen[name] = upgrades[name][number]


def stored_bytes(delta: MatrixDelta) -> int:
    """What a coded matrix takes in an artifact, added rows aside."""
    parts = [part for plane in delta.planes for part in (plane.signs, plane.scale_out, plane.scale_in)]
    sizes = [part.nbytes for part in (*parts, delta.left, delta.right) if part is not None]
    sizes += [GAIN_BYTES] * delta.num_planes
    return sum(size + -size % TENSOR_ALIGNMENT for size in sizes)


@torch.no_grad()
def measure(
    student: Student, lesson: TeacherTargets, upgrades: Mapping[str, Sequence[MatrixDelta]]
) -> dict[Upgrade, float]:
    """How much KL divergence each upgrade alone takes away, in nats per token; nothing for what no forward reaches.

    One pass over the blocks: the hidden states of every student with one upgrade go through each block together, so
    memory grows by the lesson's hidden states per upgrade.
    """
    plain = [student.enter(ids).hidden for ids in lesson.batches]
    others: dict[Upgrade, list[Tensor]] = {}
    for key, upgrade in _of(upgrades, [student.decoder.embedding_name]):
        with student.replaced(key[0], upgrade):
            others[key] = [student.enter(ids).hidden for ids in lesson.batches]
    for index in range(student.num_blocks):
        for key, upgrade in _of(upgrades, student.names(index)):
            with student.replaced(key[0], upgrade):
                others[key] = _through(student, index, plain)
        block = student.block(index)
        for hiddens in (plain, *(own for key, own in others.items() if key[0] not in student.names(index))):
            hiddens[:] = [student.decoder.run(block, index, hidden) for hidden in hiddens]
    for key, _ in _of(upgrades, [student.decoder.head_name]):
        others.setdefault(key, plain)  # a tied embedding has its own by now
    before = divergence_of(student, lesson, plain)
    gains = {key: 0.0 for key, _ in _of(upgrades, upgrades)}
    for (name, number), hiddens in others.items():
        with student.replaced(name, upgrades[name][number]):
            gains[name, number] = before - divergence_of(student, lesson, hiddens)
    return gains


def _of(
    upgrades: Mapping[str, Sequence[MatrixDelta]], names: Iterable[str | None]
) -> Iterator[tuple[Upgrade, MatrixDelta]]:
    for name in names:
        for number, upgrade in enumerate(upgrades.get(name or "", ())):
            yield (str(name), number), upgrade


def _through(student: Student, index: int, hiddens: Sequence[Tensor]) -> list[Tensor]:
    block = student.block(index)
    return [student.decoder.run(block, index, hidden) for hidden in hiddens]
