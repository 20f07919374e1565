"""Tensor parallelism: what one rank of a model has of a delta, cut from an artifact's device section on the host.

A rank has rows of some tensors (their signs and `scale_out`, with all of `scale_in`), columns of others (the reverse),
and others whole, as its part of the model does. `RankShare` says which; a `Shard` says what to copy for one artifact,
and where the tensors lie in the rank's slot then. Signs are eight to a byte, so columns that begin within a byte are
packed again; all else is copied as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deltastore.errors import ArtifactError, ArtifactTooLarge
from deltastore.format.header import DTYPE_BYTES, Header, TensorEntry
from deltastore.format.layout import TENSOR_ALIGNMENT
from deltastore.format.manifest import Manifest, TensorSpec, part_names
from deltastore.loader import Loader
from server.deltas.resident import (
    DeltaLayout,
    DeltaTables,
    Part,
    ReadTensors,
    ResidentDelta,
    Slot,
    layout_of,
)

# Rows that are packed again at a time.
BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows and columns that a rank has of a tensor."""

    rows: tuple[tuple[int, int], ...] | None = None  # ranges, in the rank's order; None is all
    columns: tuple[int, int] | None = None  # None is all

    @property
    def num_rows(self) -> int:
        """The rows of a cut that names them."""
        return sum(max(0, end - begin) for begin, end in self.rows or ())

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a tensor's share."""
        if not shape:
            return ()
        num_rows = sum(end - begin for begin, end in self.row_ranges(shape[0]))
        begin, end = self.columns or (0, shape[1] if len(shape) > 1 else 0)
        return (num_rows, end - begin, *shape[2:]) if len(shape) > 1 else (num_rows,)

    def row_ranges(self, num_rows: int) -> list[tuple[int, int]]:
        """Return the ranges of a tensor that has `num_rows` rows, without empty ones."""
        if self.rows is None:
            return [(0, num_rows)]
        ranges = ((min(begin, num_rows), min(end, num_rows)) for begin, end in self.rows)
        return [(begin, end) for begin, end in ranges if begin < end]


WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class RankShare:
    """The tensors of a delta that one rank's model reads, in the order of its tables."""

    parts: tuple[Part, ...]
    cuts: tuple[Cut, ...]  # of each part's tensor
    vectors: tuple[tuple[str, Cut], ...]
    read: ReadTensors  # by a step of all ranks
    num_base_tokens: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows of an artifact's device section, of which a shard takes the bits from `begin` up to `end`."""

    source: int  # byte of the first row
    target: int  # byte in the shard
    num_rows: int
    row_bytes: int  # of the section's rows
    begin: int
    end: int

    @property
    def width(self) -> int:
        """The bytes of a row in the shard."""
        return -(-(self.end - self.begin) // 8)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """How a rank's slot is filled with its share of one artifact."""

    layout: DeltaLayout  # of the slot
    copies: tuple[Copy, ...]
    num_bytes: int


def shard_of(header: Header, manifest: Manifest, digest: str, share: RankShare) -> Shard:
    """Plan a rank's share of an artifact.

    Raises:
        ArtifactError: the artifact changes a tensor that no step reads, or one that layers divide differently.
        ArtifactTooLarge: the share does not fit the rank's slot.
    """
    share.read.check(manifest)
    cuts = _cuts_of(manifest, share)
    entries: dict[str, TensorEntry] = {}
    copies: list[Copy] = []
    position = 0
    for name, cut in cuts.items():
        for entry, own, bits in _stored_parts(name, manifest.tensors[name], header, cut):
            start = position
            for copy in _copies_of(entry, own, bits, start):
                copies.append(copy)
                position = copy.target + copy.num_rows * copy.width
            shape = own.shape(entry.shape)
            if bits == 1 and own.columns is not None:
                shape = (shape[0], -(-shape[1] // 8))
            entries[entry.name] = TensorEntry(entry.name, entry.dtype, shape, start, position)
            position += -position % TENSOR_ALIGNMENT
    if position > share.slot_bytes:
        raise ArtifactTooLarge(
            f"a rank's share of it needs {position} bytes and a slot has {share.slot_bytes}: compress it with a "
            "smaller --budget, or raise the server's --slot-headroom"
        )
    own_manifest = manifest.model_copy(update={"tensors": {name: manifest.tensors[name] for name in cuts}})
    layout = layout_of(share.parts, [name for name, _ in share.vectors], entries, own_manifest, digest)
    # Any rank hides tokens, which another one may have.
    return Shard(replace(layout, num_added=_num_added(manifest, share)), tuple(copies), position)


def _num_added(manifest: Manifest, share: RankShare) -> int:
    """Return how many tokens of an artifact the base lacks."""
    heads = (part.source(manifest) for part in share.read.vocabulary if part.embedding is not None)
    shapes = (manifest.tensors[name].shape for name in heads if name in manifest.tensors)
    return max((max(0, shape[0] - share.num_base_tokens) for shape in shapes), default=0)


def _cuts_of(manifest: Manifest, share: RankShare) -> dict[str, Cut]:
    """Return what the rank has of each of an artifact's tensors; those of which it has nothing are left out."""
    cuts: dict[str, Cut] = {}
    for part, cut in zip(share.parts, share.cuts, strict=True):
        source = part.source(manifest)
        if source not in manifest.tensors or 0 in cut.shape(manifest.tensors[source].shape):
            continue
        if cuts.setdefault(source, cut) != cut:
            raise ArtifactError(
                f"its tensor {source!r} is in two layers of this model that ranks divide differently: serve it with "
                "--tensor-parallel-size 1"
            )
    cuts |= {name: cut for name, cut in share.vectors if name in manifest.tensors}
    return cuts


def _stored_parts(
    name: str, spec: TensorSpec, header: Header, cut: Cut
) -> Iterator[tuple[TensorEntry, Cut, int]]:
    """Yield each stored tensor of one of the manifest's, what the rank has of it, and the bits of an element."""
    entries = header.tensors
    if spec.codec == "whole":
        entry = entries[name]
        yield entry, cut, 8 * DTYPE_BYTES[entry.dtype]
        return
    parts = part_names(name, spec).map(entries.__getitem__)
    by_row = Cut(cut.rows)
    by_column = Cut(None if cut.columns is None else (cut.columns,))
    for plane in parts.planes:
        yield plane.signs, cut, 1
        if plane.scale_out is not None:
            yield plane.scale_out, WHOLE if spec.axis == "scalar" else by_row, 16
        if plane.scale_in is not None:
            yield plane.scale_in, by_column, 16
        yield plane.gain, WHOLE, 32
    if parts.left is not None and parts.right is not None:
        yield parts.left, by_row, 16
        yield parts.right, Cut(None, cut.columns), 16
    if parts.added is not None and cut.rows is not None:
        # They are stored apart from those of the base.
        first = spec.base_rows
        rows = tuple((max(0, begin - first), max(0, end - first)) for begin, end in cut.rows)
        yield parts.added, Cut(rows), 8 * DTYPE_BYTES[parts.added.dtype]


def _copies_of(entry: TensorEntry, cut: Cut, bits: int, target: int) -> Iterator[Copy]:
    """Yield the copies of what a rank has of a stored tensor whose elements have `bits` bits, to `target` and on."""
    row_bytes = entry.num_bytes // entry.shape[0]
    begin, end = (0, 8 * row_bytes) if cut.columns is None else (bits * cut.columns[0], bits * cut.columns[1])
    for first, last in cut.row_ranges(entry.shape[0]):
        copy = Copy(entry.start + first * row_bytes, target, last - first, row_bytes, begin, end)
        yield copy
        target += copy.num_rows * copy.width


def pack(copies: Sequence[Copy], section: np.ndarray, memory: np.ndarray) -> None:
    """Write a shard, ``[num_bytes]`` uint8, from an artifact's device section, ``[device_bytes]`` uint8."""
    for copy in copies:
        rows = section[copy.source : copy.source + copy.num_rows * copy.row_bytes]
        own = memory[copy.target : copy.target + copy.num_rows * copy.width]
        if copy.width == copy.row_bytes and copy.begin == 0:
            np.copyto(own, rows)
        else:
            _pack_columns(copy, rows.reshape(-1, copy.row_bytes), own.reshape(-1, copy.width))
        if used := (copy.end - copy.begin) % 8:
            own.reshape(-1, copy.width)[:, -1] &= (1 << used) - 1


def _pack_columns(copy: Copy, rows: np.ndarray, own: np.ndarray) -> None:
    first, shift = divmod(copy.begin, 8)
    wanted = rows[:, first : -(-copy.end // 8)]
    if not shift:
        np.copyto(own, wanted)
        return
    for start in range(0, len(rows), BLOCK_ROWS):
        block, packed = wanted[start : start + BLOCK_ROWS], own[start : start + BLOCK_ROWS]
        np.right_shift(block[:, : copy.width], shift, out=packed)
        following = block[:, 1 : copy.width + 1]
        packed[:, : following.shape[1]] |= following << (8 - shift)


class ShardTables:
    """The tables of one rank, whose slots hold its shards of deltas."""

    in_place = False

    def __init__(self, tables: DeltaTables, share: RankShare, device: torch.device) -> None:
        self._tables = tables
        self._share = share
        self._filling = threading.Lock()
        # A copy to CUDA begins in pinned memory; on the CPU a shard is packed into its slot.
        self._staging = None
        if device.type == "cuda":
            self._staging = torch.empty(share.slot_bytes, dtype=torch.uint8, pin_memory=True)
            self._loader = Loader(device, num_threads=1)

    def layout(self, header: Header, manifest: Manifest, digest: str) -> Shard:
        """Plan this rank's share of an artifact. Raises as `shard_of`."""
        return shard_of(header, manifest, digest, self._share)

    def adopt(self, shard: Shard, slot: Slot, section: Tensor) -> ResidentDelta:
        """Fill a slot that no step reads from a device section in host memory."""
        with self._filling:
            if self._staging is None:
                pack(shard.copies, section.numpy(), slot.memory.numpy())
            else:
                pack(shard.copies, section.numpy(), self._staging.numpy())
                self._loader.copy(self._staging[: shard.num_bytes], slot.memory)
        return self._tables.adopt(shard.layout, slot)
