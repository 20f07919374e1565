"""What an interrupted compression has made so far: a directory beside the artifact, gone when the artifact is there.

Knows files, deltas and tensors; nothing of what the stages are. A stage's file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deltastore.errors import CheckpointError, StorageFull, UsageError
from deltastore.format.matrix import MatrixDelta
from deltastore.format.onebit import OneBit
from deltastore.memory import is_out_of_memory

SUFFIX = ".progress"
INPUTS = "inputs.json"
CHECKSUM = "checksum"  # of what a file holds, in it
FULL_BYTES = 1 << 20  # with less, a failed write is taken for one of a full disk


class CheckpointStore:
    """Finished stages, by name."""

    def __init__(self, out: Path, inputs: Mapping[str, Any], *, resume: bool) -> None:
        """Begin anew, or go on with what a run of the same inputs left for `out`.

        What another run left is removed when this one keeps its first stage, so that a mistaken command costs nothing.

        Raises:
            UsageError: what is there was made from other inputs, or is no progress at all.
        """
        self.directory = out.with_name(out.name + SUFFIX)
        self.is_damaged = False  # no use going on
        self._inputs = json.dumps(inputs, sort_keys=True, default=str).encode()
        self._check_place()
        self._is_anothers = not resume or not (self.directory / INPUTS).is_file()
        if not self._is_anothers and (self.directory / INPUTS).read_bytes() != self._inputs:
            raise UsageError(
                f"{self.directory}: it was left by a run with other inputs or settings: give the same ones, or leave "
                "--resume away to begin anew"
            )

    def discard(self) -> None:
        """Remove everything."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)

    @property
    def is_begun(self) -> bool:
        """Whether there is anything to go on with."""
        return not self._is_anothers and self.directory.is_dir()

    def load_tensors(self, stage: str) -> dict[str, Tensor] | None:
        """What a stage kept; None where it has not ended."""
        path = self.directory / f"{stage}.safetensors"
        if self._is_anothers or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as opened:
                noted = (opened.metadata() or {}).get(CHECKSUM)
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise self._damaged(path) from error
        if noted != str(checksum(tensors)):
            raise self._damaged(path)
        return tensors

    def save_tensors(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        own = {name: tensor.clone() for name, tensor in tensors.items()}  # the library wants no shared memory
        noted = {CHECKSUM: str(checksum(own))}
        self._keep(f"{stage}.safetensors", lambda path: save_file(own, path, metadata=noted))

    def load_deltas(self, stage: str) -> dict[str, list[MatrixDelta]] | None:
        """By matrix, the delta that a stage kept and others that it may have instead; None where it has not ended."""
        tensors = self.load_tensors(stage)
        return None if tensors is None else unflatten_deltas(tensors)

    def save_deltas(self, stage: str, deltas: Mapping[str, Sequence[MatrixDelta]]) -> None:
        self.save_tensors(stage, flatten_deltas(deltas))

    def load_state(self, stage: str) -> Any:
        """Tensors in plain containers; None where there is none."""
        path = self.directory / f"{stage}.pt"
        if self._is_anothers or not path.is_file():
            return None
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            if is_out_of_memory(error):
                raise
            raise self._damaged(path) from error
        if not isinstance(loaded, dict) or loaded.get(CHECKSUM) != checksum(loaded.get(stage)):
            raise self._damaged(path)
        return loaded[stage]

    def save_state(self, stage: str, state: Any) -> None:
        noted = {stage: state, CHECKSUM: checksum(state)}
        self._keep(f"{stage}.pt", lambda path: torch.save(noted, path))

    def _check_place(self) -> None:
        """What has our name is ours, so that nothing else is ever removed."""
        if not os.path.lexists(self.directory):
            return
        is_directory = self.directory.is_dir() and not self.directory.is_symlink()
        # A run may have ended before its first file was whole.
        is_ours = is_directory and (
            (self.directory / INPUTS).is_file() or set(os.listdir(self.directory)) <= {f".{INPUTS}"}
        )
        if not is_ours:
            raise UsageError(
                f"{self.directory}: progress would be kept there, and this is none: move it away, or choose another "
                "--out"
            )

    def _keep(self, filename: str, write: Callable[[Path], object]) -> None:
        partial = self.directory / f".{filename}"
        try:
            if self._is_anothers:
                self.discard()
                self._is_anothers = False
            if not self.is_begun:
                self.directory.mkdir()
                self._keep(INPUTS, lambda path: path.write_bytes(self._inputs))
            write(partial)
            os.replace(partial, self.directory / filename)
        except OSError as error:
            raise self._full(error.strerror or str(error)) from error
        except (SafetensorError, RuntimeError) as error:  # the libraries' own for a full disk
            if shutil.disk_usage(self.directory).free > FULL_BYTES:
                raise
            raise self._full("no space left") from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()

    def _full(self, reason: str) -> StorageFull:
        return StorageFull(
            f"{self.directory}: {reason}: free some space for what is done so far and run again with --resume"
        )

    def _damaged(self, path: Path) -> CheckpointError:
        self.is_damaged = True
        return CheckpointError(f"{path}: it is damaged: leave --resume away to begin anew")


@contextmanager
def open_checkpoint_store(out: Path, inputs: Mapping[str, Any], *, resume: bool) -> Iterator[CheckpointStore]:
    """Progress towards `out`; where the block fails after a stage was kept, one line says how to go on."""
    store = CheckpointStore(out, inputs, resume=resume)
    try:
        yield store
    except BaseException:
        if store.is_begun and not store.is_damaged:
            print(f"{store.directory} keeps what is done so far: go on with --resume", file=sys.stderr)
        raise


def checksum(value: Any, start: int = 0) -> int:
    """CRC-32 of tensors in plain containers: their names, shapes and bytes, wherever they are."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(flat.numpy().data, checksum((str(value.dtype), *value.shape), start))
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return checksum([part for item in items for part in item], start)
    if isinstance(value, (list, tuple)):
        for part in value:
            start = checksum(part, start)
        return start
    return zlib.crc32(repr(value).encode(), start)


def flatten_deltas(deltas: Mapping[str, Sequence[MatrixDelta]]) -> dict[str, Tensor]:
    """Deltas as plain tensors, of which `joined` makes them again."""
    return {
        f"{name}|{number}|{part}": tensor
        for name, options in deltas.items()
        for number, delta in enumerate(options)
        for part, tensor in _parts(delta)
    }


def unflatten_deltas(tensors: Mapping[str, Tensor]) -> dict[str, list[MatrixDelta]]:
    """The inverse of `taken_apart`."""
    parts: dict[tuple[str, int], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, option, part = key.rsplit("|", 2)
        parts.setdefault((name, int(option)), {})[part] = tensor
    deltas: dict[str, list[MatrixDelta]] = {}
    for name, number in sorted(parts):
        deltas.setdefault(name, []).append(_delta(parts[name, number]))
    return deltas


def _parts(delta: MatrixDelta) -> Iterator[tuple[str, Tensor]]:
    for number, plane in enumerate(delta.planes):
        yield f"signs.{number}", plane.signs
        yield f"facts.{number}", torch.tensor([plane.in_features, plane.gain], dtype=torch.float64)
        if plane.scale_out is not None:
            yield f"out.{number}", plane.scale_out
        if plane.scale_in is not None:
            yield f"in.{number}", plane.scale_in
    if delta.left is not None and delta.right is not None:
        yield from (("left", delta.left), ("right", delta.right))


def _delta(parts: Mapping[str, Tensor]) -> MatrixDelta:
    planes: list[OneBit] = []
    while (signs := parts.get(f"signs.{len(planes)}")) is not None:
        in_features, gain = parts[f"facts.{len(planes)}"].tolist()
        scales = (parts.get(f"{part}.{len(planes)}") for part in ("out", "in"))
        planes.append(OneBit(signs, int(in_features), gain, *scales))
    return MatrixDelta(tuple(planes), parts.get("left"), parts.get("right"))
