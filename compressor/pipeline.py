"""A delta's life in one function: two checkpoints in, one artifact out. Each step is another file's."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from compressor.blocks import workers
from compressor.calibration import Calibration
from compressor.checkpoints import Pairs, TensorPair, pair_up
from compressor.codec import Coded, Method, code_matrix, measured
from compressor.progress import byte_progress
from compressor.sources import checkpoint_directory
from compressor.variant_files import own_files
from deltastore.artifact import ArtifactWriter
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError, StorageFull, UsageError
from deltastore.manifest import Manifest, TensorSpec
from deltastore.onebit import OneBit
from deltastore.plan import is_matrix, one_bit_plan
from deltastore.validate import LARGEST_SCALE

MAX_ID_CHARS = 512  # of a base, in a manifest
Zeros = Literal["alternate", "fitted"]  # how differences of exactly zero are coded
FULL_BYTES = 2  # per weight of the checkpoint that a delta is compared with


@dataclass(frozen=True, slots=True)
class CompressConfig:
    """What to compress and how."""

    base: str  # a directory or a hub id
    finetune: str
    out: Path
    method: Method = "both"
    embeddings: Literal["compress", "whole"] = "compress"
    progress: bool = False
    calibration: Calibration | None = None  # None fits the weights alone
    refine_signs: bool = True  # with calibration: choose signs by what they do to outputs

    def settings(self) -> dict[str, Any]:
        """What changes the artifact's bytes beside the two checkpoints."""
        settings: dict[str, Any] = {
            "method": self.method,
            "calibration": "none",
            "embeddings": self.embeddings,
        }
        if self.calibration is not None:
            settings["calibration"] = asdict(self.calibration) | {
                "source": Path(self.calibration.source).name
            }
            settings["refine_signs"] = self.refine_signs
        return settings


@dataclass(frozen=True, slots=True)
class CompressResult:
    """What was made, and at what cost."""

    out: Path
    digest: str  # SHA-256, 64 hex digits
    artifact_bytes: int
    full_bytes: int  # of the fine-tune at 16 bits
    num_unchanged: int  # tensors that the fine-tune shares with its base
    seconds: float
    peak_memory_bytes: int  # by how much the process's peak grew
    manifest: Manifest

    @property
    def ratio(self) -> float:
        """How many times smaller than the fine-tune at 16 bits."""
        return self.full_bytes / self.artifact_bytes

    def as_json(self) -> dict[str, Any]:
        specs = self.manifest.tensors.items()
        return {
            "out": str(self.out),
            "digest": f"sha256:{self.digest}",
            "artifact_bytes": self.artifact_bytes,
            "device_bytes": self.manifest.device_bytes,
            "full_bytes": self.full_bytes,
            "ratio": self.ratio,
            "weight_error": self.manifest.fidelity["weight_error"],
            "num_unchanged": self.num_unchanged,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "tensors": {name: spec.model_dump(exclude_defaults=True) for name, spec in specs},
        }


@dataclass(slots=True)
class _Carried:
    """What has been written so far."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    device_bytes: int = 0
    squared_norm: float = 0.0
    squared_error: float = 0.0

    @property
    def weight_error(self) -> float:
        """Of all coded matrices together: norm of what is lost over norm of the differences."""
        return _rounded(math.sqrt(self.squared_error / self.squared_norm)) if self.squared_norm else 0.0

    def add(self, pair: TensorPair, coded: Coded, zeros: Zeros) -> None:
        self.squared_norm += coded.squared_norm
        self.squared_error += coded.squared_error
        self.specs[pair.name] = TensorSpec(
            codec="onebit",
            shape=list(pair.tensor.shape),
            axis=coded.delta.axis,
            added_rows=pair.added_rows,
            against=pair.against,
            num_zeros=coded.num_zeros,
            zeros=zeros if coded.num_zeros else None,
            error=_rounded(coded.error),
        )


def _rounded(error: float) -> float:
    """Six digits: more of them depend on the order of sums, which differs between machines."""
    return float(f"{error:.6g}")


def compress(config: CompressConfig) -> CompressResult:
    """Make the artifact of `config`; the same inputs give the same bytes.

    Raises:
        CheckpointError: a checkpoint that cannot be read, or a pair that no delta can carry.
        StorageFull: no room at `out`.
        UsageError: an `out` that cannot be written.
    """
    started = time.perf_counter()
    base = Checkpoint.open(checkpoint_directory(config.base))
    finetune = Checkpoint.open(checkpoint_directory(config.finetune))
    pairs = pair_up(base, finetune)
    memory = _peak_memory()  # by now everything is imported
    files = own_files(base, finetune)
    _check_room(config, pairs, files)
    with ArtifactWriter(config.out) as writer:
        identity = _identity(base, config)
        fitted = _fitted(pairs, finetune, config)
        carried = _carry(pairs, files, fitted, config, writer)
        manifest = _manifest(identity, config, pairs.tied, carried)
        digest = writer.finish(manifest)
    return CompressResult(
        out=config.out,
        digest=digest,
        artifact_bytes=config.out.stat().st_size,
        full_bytes=FULL_BYTES * pairs.num_weights,
        num_unchanged=len(pairs.tensors) - len(carried.specs),
        seconds=time.perf_counter() - started,
        peak_memory_bytes=_peak_memory() - memory,
        manifest=manifest,
    )


def _check_room(config: CompressConfig, pairs: Pairs, files: Mapping[str, bytes]) -> None:
    """The artifact is written to a spool and then in one piece, so it takes its room twice for a moment."""
    out = config.out
    if out.is_dir() or not out.parent.is_dir():
        place = f"{out} is a directory" if out.is_dir() else f"{out.parent}: no such directory"
        raise UsageError(f"{place}: give --out the name of a file in a directory that exists")
    coded = {pair.name: pair.shape for pair in pairs.tensors if _is_coded(pair, config)}
    whole = sum(pair.tensor.num_bytes for pair in pairs.tensors if pair.name not in coded)
    added = sum(pair.added_rows * pair.row_bytes for pair in pairs.tensors if pair.name in coded)
    needed = 2 * (one_bit_plan(coded).device_bytes + whole + added + sum(map(len, files.values())))
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise StorageFull(
            f"{out.parent}: {free} bytes are free and compressing needs up to {needed}: "
            "free some space there or choose another --out"
        )


def _identity(base: Checkpoint, config: CompressConfig) -> Base:
    identity = Base.of(base)
    return replace(identity, id=(identity.id if Path(config.base).is_dir() else config.base)[:MAX_ID_CHARS])


def _manifest(base: Base, config: CompressConfig, tied: bool, carried: _Carried) -> Manifest:
    """No paths and no times: the same inputs give the same bytes."""
    return Manifest(
        base_id=base.id,
        base_fingerprint=base.fingerprint,
        method=config.method,
        tied=tied,
        device_bytes=carried.device_bytes,
        config=dict(base.config),
        tensors=carried.specs,
        files=carried.files,
        compressor={"version": version("peraxis"), "settings": config.settings()},
        fidelity={"weight_error": carried.weight_error},
    )


def _fitted(pairs: Pairs, finetune: Checkpoint, config: CompressConfig) -> Mapping[str, OneBit]:
    """The matrices that calibration fits, by name; all others are coded from weights alone as they are written."""
    if config.calibration is None:
        return {}
    from compressor.layerwise import Fit, fit_layerwise  # brings the model library, which takes seconds

    coded = {pair.name: pair for pair in pairs.tensors if _is_coded(pair, config)}
    fit = Fit(config.method, sign_rounds=2 if config.refine_signs else 0, progress=config.progress)
    return fit_layerwise(coded, finetune, config.calibration, fit)


def _carry(
    pairs: Pairs,
    files: Mapping[str, bytes],
    fitted: Mapping[str, OneBit],
    config: CompressConfig,
    writer: ArtifactWriter,
) -> _Carried:
    carried = _Carried()
    total = sum(pair.num_bytes for pair in pairs.tensors)
    with byte_progress(total, config.out.name, config.progress) as bar, workers() as each:
        for pair in pairs.tensors:
            if _is_coded(pair, config):
                own = fitted.get(pair.name)
                coded = code_matrix(pair, config.method, each) if own is None else measured(pair, own, each)
                _carry_coded(pair, coded, writer, carried, zeros="alternate" if own is None else "fitted")
            elif pair.is_changed():
                writer.add_whole(pair.name, pair.whole())
                carried.specs[pair.name] = TensorSpec(codec="whole", shape=list(pair.tensor.shape))
            bar.update(pair.num_bytes)
    carried.device_bytes = writer.device_bytes
    for name, content in files.items():
        writer.add_file(name, content)
        carried.files.append(name)
    return carried


def _is_coded(pair: TensorPair, config: CompressConfig) -> bool:
    return is_matrix(pair.name, pair.shape, embeddings=config.embeddings == "compress")


def _carry_coded(
    pair: TensorPair, coded: Coded, writer: ArtifactWriter, carried: _Carried, zeros: Zeros
) -> None:
    if coded.is_zero and not pair.added_rows:
        return
    largest = _largest_scale(coded.delta)
    if not largest <= LARGEST_SCALE:
        raise CheckpointError(
            f"{pair.tensor.file}: tensor {pair.tensor.name!r} differs from the base's by {largest:.3g}: "
            "give the base that it was tuned from"
        )
    writer.add_onebit(pair.name, coded.delta, pair.added())
    carried.add(pair, coded, zeros)


def _largest_scale(delta: OneBit) -> float:
    largest = float(delta.factor_out().abs().max())
    return largest if delta.scale_in is None else largest * float(delta.scale_in.abs().max())


def _peak_memory() -> int:
    """The most resident bytes so far. Not getrusage's figure, which a process inherits from the one that started it."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
