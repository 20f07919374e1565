"""What an interrupted compression has made so far: a directory beside the artifact, gone when the artifact is there.

Knows files, deltas and tensors; nothing of what the stages are. A stage's file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltastore.errors import CheckpointError, FidelityError, StorageFull, UsageError
from deltastore.matrix import MatrixDelta
from deltastore.onebit import OneBit

SUFFIX = ".progress"
INPUTS = "inputs.json"
FULL_BYTES = 1 << 20  # with less, a failed write is taken for one of a full disk


class Progress:
    """Finished stages, by name."""

    def __init__(self, out: Path, inputs: Mapping[str, Any], *, resume: bool) -> None:
        """Begin anew, or go on with what a run of the same inputs left for `out`.

        Raises:
            UsageError: what is there was made from other inputs.
        """
        self.directory = out.with_name(out.name + SUFFIX)
        self.is_damaged = False  # no use going on
        self._inputs = json.dumps(inputs, sort_keys=True, default=str).encode()
        if not resume or not (self.directory / INPUTS).is_file():
            self.discard()
        elif (self.directory / INPUTS).read_bytes() != self._inputs:
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
        return self.directory.is_dir()

    def tensors(self, stage: str) -> dict[str, Tensor] | None:
        """What a stage kept; None where it has not ended."""
        path = self.directory / f"{stage}.safetensors"
        if not path.is_file():
            return None
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise self._damaged(path) from error

    def keep_tensors(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        own = {name: tensor.clone() for name, tensor in tensors.items()}  # the library wants no shared memory
        self._keep(f"{stage}.safetensors", lambda path: save_file(own, path))

    def deltas(self, stage: str) -> dict[str, list[MatrixDelta]] | None:
        """By matrix, the delta that a stage kept and others that it may have instead; None where it has not ended."""
        tensors = self.tensors(stage)
        return None if tensors is None else joined(tensors)

    def keep_deltas(self, stage: str, deltas: Mapping[str, Sequence[MatrixDelta]]) -> None:
        self.keep_tensors(stage, taken_apart(deltas))

    def state(self, stage: str) -> Any:
        """Tensors in plain containers; None where there is none."""
        path = self.directory / f"{stage}.pt"
        if not path.is_file():
            return None
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            raise self._damaged(path) from error

    def keep_state(self, stage: str, state: Any) -> None:
        self._keep(f"{stage}.pt", lambda path: torch.save(state, path))

    def _keep(self, filename: str, write: Callable[[Path], object]) -> None:
        partial = self.directory / f".{filename}"
        try:
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
def kept(out: Path, inputs: Mapping[str, Any], *, resume: bool) -> Iterator[Progress]:
    """Progress towards `out`; where the block fails after a stage was kept, one line says how to go on."""
    progress = Progress(out, inputs, resume=resume)
    try:
        yield progress
    except BaseException as error:
        if isinstance(error, FidelityError):
            progress.discard()
        elif progress.is_begun and not progress.is_damaged:
            print(f"{progress.directory} keeps what is done so far: go on with --resume", file=sys.stderr)
        raise


def taken_apart(deltas: Mapping[str, Sequence[MatrixDelta]]) -> dict[str, Tensor]:
    """Deltas as plain tensors, of which `joined` makes them again."""
    return {
        f"{name}|{number}|{part}": tensor
        for name, options in deltas.items()
        for number, delta in enumerate(options)
        for part, tensor in _parts(delta)
    }


def joined(tensors: Mapping[str, Tensor]) -> dict[str, list[MatrixDelta]]:
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
