"""A delta in its slot, and the tables through which kernels find it: addresses and vectors of each slot.

A table has one row per slot for each tensor of the checkpoint that a layer multiplies with (`server.kernels.reference`
describes a row), so a layer's cost in Python does not grow with the number of variants. Where a delta's tensors lie in
its slot follows from its header, which is read once; a load then ends with one write into the tables and one copy of
vectors. Tables never move once they are allocated, so that a captured graph can read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from deltastore.base import Base
from deltastore.checkpoint import HEAD_SUFFIXES, TORCH_DTYPE
from deltastore.errors import ArtifactError
from deltastore.format.header import Header, TensorEntry
from deltastore.format.manifest import Manifest, MatrixParts, TensorSpec, part_names
from deltastore.format.sizes import one_bit_plan
from server.errors import EngineFailed, unread_tensor
from server.kernels.reference import (
    BASE_BIAS,
    BIAS,
    FIELDS,
    LEFT,
    NUMBERS,
    PLANE_FIELDS,
    RANK,
    RIGHT,
    SINGLE,
    WHOLE,
    WHOLE_DTYPE,
    WHOLE_DTYPES,
    WHOLE_ROWS,
)

# In a layout: the column of the table holds no address.
NOWHERE = -1
_IS_NUMBER = np.isin(np.arange(FIELDS), NUMBERS)


class Slot:
    """Device memory for one delta. `generation` grows when the delta leaves, so that stale users of it are refused."""

    def __init__(self, index: int, memory: Tensor) -> None:
        self.index = index
        self.memory = memory  # [slot_bytes] uint8 on the device
        self.generation = 0


SLOT_ALIGNMENT = 4096


def size_of_slot(shapes: Mapping[str, tuple[int, ...]], headroom: float) -> int:
    """Return the bytes of a slot: the one-bit plan of these shapes times `headroom`, rounded up to `SLOT_ALIGNMENT`."""
    plan = one_bit_plan(shapes)
    return -(-int(plan.device_bytes * headroom) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def arena(num_slots: int, slot_bytes: int, device: torch.device) -> list[Slot]:
    """Allocate all slots as one block of device memory."""
    memory = torch.empty(num_slots, slot_bytes, dtype=torch.uint8, device=device)
    return [Slot(index, memory[index]) for index in range(num_slots)]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint that a layer multiplies with or looks up."""

    name: str
    num_rows: int  # that the base has
    is_beyond: bool = False  # this part is the rows that the base lacks
    # The output head: the tensor that a variant with tied embeddings takes; others name theirs as they please.
    embedding: str | None = None
    bias: int | None = None  # its vector

    def source(self, manifest: Manifest) -> str:
        """Return the name of the tensor of an artifact that acts here; "" if there is none."""
        if self.embedding is None:
            return self.name
        if manifest.tied:
            return self.embedding
        return next((name for name in manifest.tensors if name.endswith(HEAD_SUFFIXES)), "")


@dataclass(frozen=True, slots=True)
class ReadTensors:
    """The tensors that a step of vLLM's model reads, and the tokens that it has room for."""

    parts: tuple[Part, ...]
    vectors: frozenset[str]
    vocabulary: tuple[Part, ...]  # the embedding and the output head
    num_tokens: int

    def check(self, manifest: Manifest) -> None:
        """Refuse an artifact that changes a tensor which no step reads, or has more tokens than there is room for.

        Raises:
            ArtifactError: names the tensor.
        """
        for name in (part.source(manifest) for part in self.vocabulary):
            if name in manifest.tensors and manifest.tensors[name].shape[0] > self.num_tokens:
                raise ArtifactError(
                    f"{name!r} has rows for {manifest.tensors[name].shape[0]} tokens, and this vLLM for "
                    f"{self.num_tokens}: start it with room for more"
                )
        known = {part.source(manifest) for part in self.parts} | self.vectors
        if unknown := sorted(manifest.tensors.keys() - known):
            raise ArtifactError(
                f"vLLM reads {unknown[0]!r} (and {len(unknown) - 1} more) of this model where no delta can act: serve "
                "it with --backend native"
            )


@dataclass(slots=True, eq=False)
class Vector:
    """A vector parameter of the base, such as a norm's weight or a bias, and each slot's value of it."""

    name: str
    table: Tensor  # [1 + slots, features]; the first row is the base's


@dataclass(frozen=True, slots=True, eq=False)
class DeltaLayout:
    """The positions of an artifact's tensors in its device section, in the order of the tables."""

    digest: str
    rows: np.ndarray  # [parts, FIELDS] int64: offsets in the section, or NOWHERE, and numbers
    vectors: Mapping[int, TensorEntry]  # by the number of the vector
    num_added: int  # tokens that the base lacks


@dataclass(frozen=True, slots=True, eq=False)
class ResidentDelta:
    """A delta that is complete in its slot: every chunk has been verified and copied."""

    digest: str
    slot: Slot
    generation: int
    vectors: frozenset[int]  # those that it changes
    num_added: int  # tokens that the base lacks

    def check_alive(self) -> None:
        """Raise EngineFailed if the slot was given to another delta: a batch must never read those bytes."""
        if self.generation != self.slot.generation:
            raise EngineFailed(
                f"slot {self.slot.index} no longer holds delta {self.digest[:12]}: send the request again"
            )


class DeltaTables:
    """The tables of one model. Layers add their parts and vectors, then `allocate` fixes the tables' memory."""

    in_place = True  # a slot holds a device section as it is

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.vectors: list[Vector] = []
        self.rows = torch.zeros(0, 0, FIELDS, dtype=torch.int64)  # [parts, slots, FIELDS]
        self.num_added = torch.zeros(
            1, dtype=torch.int64
        )  # [1 + slots] tokens that the base lacks; 0 is the base's
        # [parts, slots] addresses of biases, and those of the base's, [parts]; 0 if a part has no bias.
        self._biases = np.zeros((0, 0), dtype=np.int64)
        self._base_biases = np.zeros(0, dtype=np.int64)

    def add_part(self, part: Part) -> int:
        """Add a part of a layer, and return its number."""
        self.parts.append(part)
        return len(self.parts) - 1

    def add_vector(self, name: str, base: Tensor) -> int:
        """Add a vector parameter, [features] of the dtype that its layer takes, and return its number."""
        self.vectors.append(Vector(name, base.detach()[None]))
        return len(self.vectors) - 1

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Allocate the tables of `num_slots` slots, in which no slot has a delta."""
        self.rows = torch.zeros(len(self.parts), num_slots, FIELDS, dtype=torch.int64, device=device)
        self.num_added = torch.zeros(1 + num_slots, dtype=torch.int64, device=device)
        for vector in self.vectors:
            vector.table = vector.table[:1].repeat(1 + num_slots, 1)
        biases = [None if part.bias is None else self.vectors[part.bias].table for part in self.parts]
        addresses = [
            [0] * (1 + num_slots) if table is None else [row.data_ptr() for row in table] for table in biases
        ]
        together = np.array(addresses, dtype=np.int64).reshape(len(self.parts), 1 + num_slots)
        self._base_biases, self._biases = together[:, 0], together[:, 1:]

    def unread(self, base: Base) -> tuple[str, ...]:
        """Return the base's tensors that no layer would read from a delta, sorted; buffers are among them."""
        read = {part.name for part in self.parts} | {vector.name for vector in self.vectors}
        return tuple(sorted(base.shapes.keys() - read))

    def check(self, manifest: Manifest) -> None:
        """Refuse an artifact with a tensor that no layer reads: its requests would get another model in silence.

        Raises:
            ArtifactError: names the tensor.
        """
        read = {part.source(manifest) for part in self.parts} | {vector.name for vector in self.vectors}
        if unread := sorted(manifest.tensors.keys() - read):
            raise unread_tensor(unread)

    def layout(self, header: Header, manifest: Manifest, digest: str) -> DeltaLayout:
        """Find where the tensors of the artifact that `digest` names lie.

        Raises:
            ArtifactError: no layer reads one of them.
        """
        self.check(manifest)
        names = [vector.name for vector in self.vectors]
        return layout_of(self.parts, names, header.tensors, manifest, digest)

    def adopt(self, layout: DeltaLayout, slot: Slot, section: Tensor | None = None) -> ResidentDelta:
        """Write the tables' rows of a slot that holds the device section of the artifact that `layout` describes.

        No step may read the slot's rows meanwhile. `section` is the same in host memory, and is not read.
        """
        start = slot.memory.data_ptr()
        rows = np.where(_IS_NUMBER, layout.rows, np.where(layout.rows == NOWHERE, 0, layout.rows + start))
        vectors = {number: view(entry, slot.memory) for number, entry in layout.vectors.items()}
        return self.hold(slot, rows, vectors, layout.digest, layout.num_added)

    def hold(
        self,
        slot: Slot,
        rows: np.ndarray,  # [parts, FIELDS] int64, changed in place
        vectors: Mapping[int, Tensor],
        digest: str = "",
        num_added: int = 0,
    ) -> ResidentDelta:
        """Let a slot's rows of the tables describe tensors, which must outlive their use."""
        own = np.array([part.bias in vectors for part in self.parts], dtype=bool)
        rows[:, BIAS] = np.where(own, self._biases[:, slot.index], 0)
        rows[:, BASE_BIAS] = self._base_biases
        self.rows[:, slot.index] = torch.from_numpy(rows).to(self.rows.device)
        self.num_added[1 + slot.index] = num_added
        if self.vectors:
            torch._foreach_copy_(
                [vector.table[1 + slot.index] for vector in self.vectors],
                [vectors.get(number, vector.table[0]) for number, vector in enumerate(self.vectors)],
            )
        return ResidentDelta(digest, slot, slot.generation, frozenset(vectors), num_added)


def layout_of(
    parts: Sequence[Part],
    vectors: Sequence[str],
    entries: Mapping[str, TensorEntry],
    manifest: Manifest,
    digest: str,
) -> DeltaLayout:
    """Find where an artifact's tensors lie.

    Args:
        parts: those of the tables.
        vectors: the names of the tables' vectors.
        entries: the positions of the stored tensors.
        manifest: the artifact's.
        digest: names the artifact.
    """
    specs = manifest.tensors
    rows = np.full((len(parts), FIELDS), NOWHERE, dtype=np.int64)
    rows[:, NUMBERS] = 0
    num_added = 0
    for row, part in zip(rows, parts, strict=True):
        source = part.source(manifest)
        # A rank may have none of a tensor's rows.
        if (spec := specs.get(source)) is not None and (part.num_rows or part.is_beyond):
            _fill(row, part, source, spec, entries)
        if part.is_beyond and part.embedding is not None:
            num_added = int(row[WHOLE_ROWS])
    found = {
        number: entries[name]
        for number, name in enumerate(vectors)
        if name in specs and specs[name].codec == "whole"
    }
    return DeltaLayout(digest, rows, found, num_added)


def view(entry: TensorEntry, memory: Tensor) -> Tensor:
    """Return a tensor of a device section."""
    return memory[entry.start : entry.end].view(TORCH_DTYPE[entry.dtype]).view(entry.shape)


def _fill(
    row: np.ndarray, part: Part, name: str, spec: TensorSpec, entries: Mapping[str, TensorEntry]
) -> None:
    """Fill a layout's row with the positions of one tensor of an artifact."""
    if spec.codec == "whole":
        entry = entries[name]
        _fill_whole(row, entry, part.num_rows if part.is_beyond else 0)
        if not part.is_beyond:
            row[WHOLE_ROWS] = min(part.num_rows, row[WHOLE_ROWS])
        return
    parts: MatrixParts[TensorEntry] = part_names(name, spec).map(entries.__getitem__)
    if part.is_beyond:
        if parts.added is not None:
            _fill_whole(row, parts.added, 0)
        return
    for number, plane in enumerate(parts.planes):
        addresses = (plane.signs, plane.scale_out, plane.scale_in, plane.gain)
        own = [NOWHERE if entry is None else entry.start for entry in addresses]
        row[PLANE_FIELDS * number : PLANE_FIELDS * (number + 1)] = own
        if plane.scale_out is not None and plane.scale_out.shape[0] < plane.signs.shape[0]:
            row[SINGLE] |= 1 << number
    if parts.left is not None and parts.right is not None:
        row[LEFT], row[RIGHT], row[RANK] = parts.left.start, parts.right.start, parts.right.shape[0]


def _fill_whole(row: np.ndarray, entry: TensorEntry, first_row: int) -> None:
    num_rows, in_features = entry.shape
    if num_rows > first_row:
        dtype = TORCH_DTYPE[entry.dtype]
        row[WHOLE] = entry.start + first_row * in_features * dtype.itemsize
        row[WHOLE_ROWS], row[WHOLE_DTYPE] = num_rows - first_row, WHOLE_DTYPES.index(dtype)


class Rows:
    """The rows of a batch by slot: of its tokens, or of the rows whose logits are computed. Tensors never move."""

    def __init__(self, max_rows: int, num_slots: int, device: torch.device) -> None:
        self.num_rows = 0
        self.is_of_base = True  # no row has a delta
        self.slot_of_row = torch.zeros(max_rows, dtype=torch.int64, device=device)  # slot + 1; 0 is the base
        self.order = torch.zeros(
            max_rows, dtype=torch.int32, device=device
        )  # rows sorted by slot, without the base's
        self.ranges = torch.zeros(
            num_slots, 2, dtype=torch.int32, device=device
        )  # each slot's positions in `order`
        self._slots = np.zeros(0, dtype=np.int64)

    def set(self, slots: np.ndarray) -> None:
        """Take the slot of each row, [rows] int64, -1 for the base.

        Raises:
            ValueError: there are more rows than the tensors have.
        """
        if np.array_equal(slots, self._slots):
            return
        if len(slots) > len(self.order):
            raise ValueError(f"a batch of {len(slots)} rows, and there is memory for {len(self.order)}")
        self._slots, self.num_rows = slots, len(slots)
        counts = np.bincount(slots + 1, minlength=len(self.ranges) + 1)
        self.is_of_base = int(counts[0]) == len(slots)
        order = np.argsort(slots, kind="stable")[counts[0] :]
        ends = np.cumsum(counts[1:])
        self.slot_of_row[: len(slots)] = torch.from_numpy(slots + 1)
        self.order[: len(order)] = torch.from_numpy(order)
        self.ranges[:] = torch.from_numpy(np.stack((ends - counts[1:], ends), axis=1))


@dataclass(slots=True)
class StepDeltas:
    """The deltas of the running step, as layers read them."""

    tokens: Rows
    logits: Rows
    vectors: frozenset[int]  # those that any delta changes
    num_added: int  # the most tokens beyond the base's that a delta with rows of logits has

    def rows(self, num_rows: int) -> Rows:
        """Return the rows that a layer with `num_rows` rows of inputs computes.

        Raises:
            EngineFailed: there are neither as many as the step has tokens nor as many as it has rows of logits.
        """
        return self.tokens if num_rows == self.tokens.num_rows else self.logit_rows(num_rows)

    def logit_rows(self, num_rows: int) -> Rows:
        """Return the rows that the output head computes, which are `num_rows`. Raises as `rows`."""
        if num_rows == self.logits.num_rows:
            return self.logits
        raise EngineFailed(
            f"a layer has {num_rows} rows of a step of {self.tokens.num_rows} tokens and {self.logits.num_rows} "
            "rows of logits: this model cannot serve variants"
        )


@dataclass(slots=True, eq=False)
class BatchContext:
    """The object through which layers find the deltas of the running step. Used on the engine thread alone."""

    tables: DeltaTables = field(default_factory=DeltaTables)
    current: StepDeltas | None = None  # None if all rows are the base's
    hooks: list[RemovableHandle] = field(default_factory=list)  # of layers
    _tokens: Rows | None = None
    _logits: Rows | None = None

    def allocate(self, num_slots: int, max_rows: int, device: torch.device) -> None:
        """Allocate the tables of `num_slots` slots, for steps of at most `max_rows` tokens."""
        self.tables.allocate(num_slots, device)
        self.reserve(max_rows)

    def reserve(self, max_rows: int) -> None:
        """Allocate memory for steps of at most `max_rows` tokens, in place of what there was."""
        device, num_slots = self.tables.rows.device, self.tables.rows.shape[1]
        self._tokens, self._logits = (Rows(max_rows, num_slots, device) for _ in range(2))

    @contextmanager
    def step(
        self,
        deltas: Sequence[ResidentDelta | None],
        num_tokens: Sequence[int],
        num_logits: Sequence[int],
    ) -> Iterator[None]:
        """Apply deltas to the sequences of a flat batch while the model runs.

        Args:
            deltas: each sequence's delta, None for the base.
            num_tokens: each sequence's tokens in this step.
            num_logits: each sequence's rows whose logits are computed.

        Raises:
            EngineFailed: the slot of one of the deltas holds other bytes by now.
        """
        own = {delta for delta in deltas if delta is not None}
        for delta in own:
            delta.check_alive()
        if own:
            assert self._tokens is not None
            assert self._logits is not None
            slots = np.array([-1 if delta is None else delta.slot.index for delta in deltas])
            self._tokens.set(slots.repeat(num_tokens))
            self._logits.set(slots.repeat(num_logits))
            vectors = frozenset[int]().union(*(delta.vectors for delta in own))
            with_logits = (delta for delta, count in zip(deltas, num_logits, strict=True) if count)
            num_added = max((delta.num_added for delta in with_logits if delta is not None), default=0)
            self.current = StepDeltas(self._tokens, self._logits, vectors, num_added)
        try:
            yield
        finally:
            self.current = None
