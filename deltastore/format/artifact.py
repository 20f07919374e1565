"""The artifact: one immutable safetensors file that holds a delta. Writes it in layer order, opens it, reads its parts.

FORMAT.md in this directory specifies the file byte by byte. Numbers are read unchecked; `validate.py` checks them.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import torch
from torch import Tensor

from deltastore.checkpoint import DTYPE_NAME, TORCH_DTYPE
from deltastore.errors import ArtifactError, CheckpointError, StorageFull, UsageError, shown
from deltastore.format.header import (
    Header,
    TensorEntry,
    encode_header,
    open_file,
    read_exactly,
    read_header,
    read_into,
)
from deltastore.format.layout import TENSOR_ALIGNMENT, check_layout
from deltastore.format.manifest import MatrixParts, PlaneParts, file_tensor, padding_tensor, part_names
from deltastore.format.matrix import MatrixDelta, SignPlane, StackDelta, are_gains, is_gain

if TYPE_CHECKING:
    from deltastore.format.manifest import Manifest

COPY_BYTES = 4 << 20


class ArtifactWriter:
    """Writes one artifact: data to a temporary file as it is added, then header and data under the final name.

    Use as a context manager; leaving it without `finish` leaves nothing behind. Add tensors in layer order, then the
    variant's files. While `finish` runs, the data is on the disk twice.

    Raises:
        UsageError: The directory of `path` cannot be written to.
        StorageFull: The disk is full.
        CheckpointError: Two tensors would have the same name in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, TensorEntry] = {}
        self._position = 0
        self._device_bytes: int | None = None
        try:
            # Closed by __exit__.
            self._spool: BinaryIO = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"{path.parent}: {error.strerror}: choose another `out`") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing flushes, which fails on a full disk; these bytes are thrown away.
        with contextlib.suppress(OSError):
            self._spool.close()

    @property
    def device_bytes(self) -> int:
        """Bytes before the variant's files, padding included; a slot must hold as many."""
        return self._position if self._device_bytes is None else self._device_bytes

    def add_onebit(self, name: str, delta: MatrixDelta, added: Tensor | None = None) -> None:
        """Append a coded matrix.

        Args:
            name: The tensor's name in the fine-tune.
            delta: The coded matrix ``[out, in]``.
            added: The rows that the base lacks, ``[rows, in]`` in any float dtype.

        Raises:
            CheckpointError: A tensor of this name was added before.
            StorageFull: The disk is full.
            ValueError: A file was added before.
        """
        # Deferred: it imports pydantic, which readers of a slot's bytes do without.
        from deltastore.format.manifest import TensorSpec

        num_added = 0 if added is None else len(added)
        spec = TensorSpec(
            codec="onebit",
            shape=[delta.out_features + num_added, delta.in_features],
            axis=delta.axis,
            planes=delta.num_planes,
            rank=delta.rank,
            added_rows=num_added,
        )
        planes = tuple(_plane_parts(plane) for plane in delta.planes)
        parts = MatrixParts(planes, delta.left, delta.right, added if num_added else None)
        for tensor_name, tensor in zip(part_names(name, spec).all(), parts.all(), strict=True):
            self.add_whole(tensor_name, tensor)

    def add_stack(self, name: str, delta: StackDelta) -> None:
        """Append a stack of experts; raises as `add_onebit` does."""
        # Deferred: it imports pydantic, which readers of a slot's bytes do without.
        from deltastore.format.manifest import TensorSpec

        spec = TensorSpec(
            codec="stack", shape=list(delta.shape), axis=delta.axis, transposed=delta.transposed
        )
        (names,) = part_names(name, spec).planes
        for tensor_name, tensor in zip(names.all(), _stack_parts(delta).all(), strict=True):
            self.add_whole(tensor_name, tensor)

    def add_whole(self, name: str, tensor: Tensor) -> None:
        """Append a tensor unchanged; raises as `add_onebit` does."""
        if self._device_bytes is not None:
            raise ValueError(f"tensor {shown(name)} comes after a file: add tensors first")
        self._append(name, tensor)

    def add_file(self, filename: str, content: bytes) -> None:
        """Append one of the variant's files; no tensor may follow. Raises as `add_onebit` does."""
        if self._device_bytes is None:
            self._device_bytes = self._position
        data = torch.empty(len(content), dtype=torch.uint8)
        data.numpy().data[:] = content
        self._append(file_tensor(filename), data)

    def finish(self, manifest: Manifest) -> str:
        """Write header and data under the final name and return the file's SHA-256 as 64 hex digits.

        Raises:
            StorageFull: The disk is full, or the file cannot be written.
            ValueError: The manifest states other `device_bytes` than were written.
        """
        if manifest.device_bytes != self.device_bytes:
            raise ValueError(f"{manifest.device_bytes} device bytes stated, {self.device_bytes} written")
        digest = hashlib.sha256()
        header = encode_header(self._entries.values(), manifest.to_metadata())
        try:
            descriptor, partial = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name[:64]}.")
            try:
                with os.fdopen(descriptor, "wb") as out:
                    self._write_all(out, digest, header)
                    os.fchmod(out.fileno(), 0o644)
                    out.flush()
                    os.fsync(out.fileno())
                # Last, so that a reader finds the whole artifact or none.
                os.replace(partial, self.path)
            finally:
                Path(partial).unlink(missing_ok=True)
        except OSError as error:
            raise StorageFull(
                f"{self.path}: {error.strerror}: free some space there or choose another `out`"
            ) from error
        return digest.hexdigest()

    def _write_all(self, out: BinaryIO, digest: Any, header: bytes) -> None:
        out.write(header)
        digest.update(header)
        self._spool.flush()
        self._spool.seek(0)
        while block := self._spool.read(COPY_BYTES):
            out.write(block)
            digest.update(block)

    def _append(self, name: str, tensor: Tensor) -> None:
        data = tensor.detach().contiguous()
        self._write(TensorEntry(name, DTYPE_NAME[data.dtype], tuple(data.shape), 0, data.nbytes), data)
        if padding := -self._position % TENSOR_ALIGNMENT:
            zeros = torch.zeros(padding, dtype=torch.uint8)
            self._write(TensorEntry(padding_tensor(len(self._entries)), "U8", (padding,), 0, padding), zeros)

    def _write(self, entry: TensorEntry, data: Tensor) -> None:
        if entry.name in self._entries:
            raise CheckpointError(
                f"two tensors would be called {shown(entry.name)} in the artifact: rename one"
            )
        start = self._position
        self._position += entry.end
        self._entries[entry.name] = TensorEntry(entry.name, entry.dtype, entry.shape, start, self._position)
        try:
            self._spool.write(data.view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise StorageFull(
                f"{self.path.parent}: {error.strerror}: free some space or choose another `out`"
            ) from error


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector, which would look at each of a hundred thousand new objects several times."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """An opened artifact. Header and manifest are parsed and agree; tensors are read on demand, unchecked."""

    path: Path
    where: str  # its name in messages
    fd: int
    header: Header
    manifest: Manifest
    size_bytes: int

    @classmethod
    def open(cls, path: Path, where: str | None = None) -> Artifact:
        """Open a file and parse its header and manifest; use as a context manager.

        Args:
            path: The artifact.
            where: Its name in messages; by default its path.

        Raises:
            ArtifactError: The file is missing or not safetensors, or its manifest is of another format version or does
                not describe the file's tensors.
        """
        # Deferred: it imports pydantic.
        from deltastore.format.manifest import Manifest

        where = where or str(path)
        fd = open_file(path, where)
        try:
            with _uncollected():
                header = read_header(fd, where)
                manifest = Manifest.from_metadata(header.metadata, where)
                check_layout(header, manifest, where)
            return cls(path, where, fd, header, manifest, header.data_start + header.data_bytes)
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)

    def parts(self, name: str) -> MatrixParts[TensorEntry]:
        """The header entries of a coded matrix's parts."""
        return part_names(name, self.manifest.tensors[name]).map(self.header.tensors.__getitem__)

    def read(self, entry: TensorEntry) -> Tensor:
        """Read one tensor into newly allocated memory."""
        return self._read(entry, 0, entry.num_bytes).view(entry.shape)

    def blocks(self, entry: TensorEntry) -> Iterator[Tensor]:
        """Read one tensor, flat, in blocks of at most 4 MiB."""
        for start in range(0, entry.num_bytes, COPY_BYTES):
            yield self._read(entry, start, min(COPY_BYTES, entry.num_bytes - start))

    def _read_if(self, entry: TensorEntry | None) -> Tensor | None:
        return None if entry is None else self.read(entry)

    def _read(self, entry: TensorEntry, start: int, num_bytes: int) -> Tensor:
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        read_into(self.fd, flat.numpy().data, self.header.data_start + entry.start + start, self.where)
        return flat.view(TORCH_DTYPE[entry.dtype])

    def onebit(self, name: str) -> MatrixDelta:
        """Read the coded matrix of a tensor whose codec is `onebit`.

        Raises:
            ArtifactError: A gain is not a power of two, or the file has become shorter.
        """
        parts, in_features = self.parts(name), self.manifest.tensors[name].shape[1]
        planes = tuple(
            SignPlane(
                self.read(plane.signs),
                in_features,
                self.gain(plane.gain),
                self._read_if(plane.scale_out),
                self._read_if(plane.scale_in),
            )
            for plane in parts.planes
        )
        return MatrixDelta(planes, self._read_if(parts.left), self._read_if(parts.right))

    def gain(self, entry: TensorEntry) -> float:
        """Read the gain of one plane.

        Raises:
            ArtifactError: It is not a power of two.
        """
        value = float(self.read(entry))
        if not is_gain(value):
            raise ArtifactError(
                f"{self.where}: gain {value} in tensor {shown(entry.name)} is not a power of two: "
                "compress or upload it again"
            )
        return value

    def stack(self, name: str) -> StackDelta:
        """Read the experts of a tensor whose codec is `stack`.

        Raises:
            ArtifactError: A gain is not a power of two, or the file has become shorter.
        """
        spec, (plane,) = self.manifest.tensors[name], self.parts(name).planes
        scales = [self._read_if(plane.scale_out), self._read_if(plane.scale_in)]
        if spec.transposed and spec.axis != "scalar":
            scales.reverse()
        of_rows, of_columns = scales
        signs, gains = self.read(plane.signs), self.gains(plane.gain).tolist()
        experts = tuple(
            SignPlane(
                signs[number],
                spec.shape[2],
                gain,
                None if of_rows is None else of_rows[number],
                None if of_columns is None else of_columns[number],
            )
            for number, gain in enumerate(gains)
        )
        return StackDelta(experts, spec.transposed)

    def gains(self, entry: TensorEntry) -> Tensor:  # [experts] float32
        """Read the gains of a stack's experts.

        Raises:
            ArtifactError: One is not a power of two.
        """
        values = self.read(entry)
        if not are_gains(values).all():
            number = int(are_gains(values).long().argmin())
            raise ArtifactError(
                f"{self.where}: gain {float(values[number])} of expert {number} in tensor {shown(entry.name)} is not "
                "a power of two: compress or upload it again"
            )
        return values

    def added(self, name: str) -> Tensor | None:
        """Read the rows that the base lacks; None if there are none."""
        return self._read_if(self.parts(name).added)

    def whole(self, name: str) -> Tensor:
        """Read a tensor whose codec is `whole`."""
        return self.read(self.header.tensors[name])

    def file(self, filename: str) -> bytes:
        """Read one of the variant's files."""
        entry = self.header.tensors[file_tensor(filename)]
        return read_exactly(self.fd, entry.num_bytes, self.header.data_start + entry.start, self.where)

    def digest(self) -> str:
        """Compute the SHA-256 of the whole file, 64 hex digits."""
        total = hashlib.sha256()
        for start in range(0, self.size_bytes, COPY_BYTES):
            total.update(read_exactly(self.fd, min(COPY_BYTES, self.size_bytes - start), start, self.where))
        return total.hexdigest()


def _plane_parts(plane: SignPlane) -> PlaneParts[Tensor]:
    gain = torch.tensor([plane.gain], dtype=torch.float32)
    return PlaneParts(plane.signs, plane.scale_out, plane.scale_in, gain)


def _stack_parts(delta: StackDelta) -> PlaneParts[Tensor]:
    """Return the parts of all experts, one after the other."""
    gains = torch.tensor([plane.gain for plane in delta.experts], dtype=torch.float32)
    of_rows, of_columns = (
        _stacked([plane.scale_out for plane in delta.experts]),
        _stacked([plane.scale_in for plane in delta.experts]),
    )
    if delta.transposed and delta.axis != "scalar":
        of_rows, of_columns = of_columns, of_rows
    return PlaneParts(torch.stack([plane.signs for plane in delta.experts]), of_rows, of_columns, gains)


def _stacked(scales: Sequence[Tensor | None]) -> Tensor | None:
    """Return the scale vectors of all experts as one tensor; None if they have none."""
    present = [scale for scale in scales if scale is not None]
    return torch.stack(present) if present else None
