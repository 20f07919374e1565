"""A delta's life in one function: two checkpoints in, one artifact out. Each step is another file's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compressor.blockwise.delta_model import DeltaModel, base_with_added_rows, finetune_with_own_head
from compressor.config import CompressConfig
from compressor.io.adapters import finetune_directory
from compressor.io.checkpoint_store import CheckpointStore, open_checkpoint_store
from compressor.io.delta_writer import Carried, Coding, carry, changed
from compressor.io.outputs import check_apart
from compressor.io.pairs import Pairs, pair_up
from compressor.io.side_files import own_files
from compressor.io.sources import checkpoint_directory
from compressor.planning import Needs, check_memory, check_place, check_room, needs
from compressor.report import Report, check_report, write_report
from deltastore.base.base import Base
from deltastore.base.checkpoint import Checkpoint
from deltastore.errors import FidelityError
from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.manifest import Manifest
from deltastore.format.plan import OneBitPlan, is_matrix, one_bit_plan
from deltastore.memory import return_freed_memory
from deltastore.progress import identify_base

if TYPE_CHECKING:  # brings the model library, which takes seconds
    from compressor.fitting.fit import Fitted

MAX_ID_CHARS = 512  # of a base, in a manifest
NUM_EXAMPLES = 4  # in a report
FULL_BYTES = 2  # per weight of the checkpoint that a delta is compared with


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
            "fidelity": self.manifest.fidelity,
            "num_unchanged": self.num_unchanged,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "tensors": {name: spec.model_dump(exclude_defaults=True) for name, spec in specs},
        }


def compress(config: CompressConfig) -> CompressResult:
    """Make the artifact of `config`; the same inputs give the same bytes.

    Raises:
        CheckpointError: a checkpoint that cannot be read, or a pair that no delta can carry.
        MemoryTooSmall: less memory than fitting needs.
        FidelityError: a delta below `min_agreement`, which is not written.
        StorageFull: no room at `out`.
        UsageError: an `out` that cannot be written, calibration text that cannot be had.
    """
    started = time.perf_counter()
    text = None if config.training is None else config.training.calibration.source
    check_apart(config.out, {"--base": config.base, "--finetune": config.finetune, "--calibration": text})
    if config.report is not None:
        check_report(config.report)
    base_directory = checkpoint_directory(config.base)
    with finetune_directory(config.finetune, base_directory) as directory:
        base, finetune = Checkpoint.open(base_directory), Checkpoint.open(directory)
        pairs = pair_up(base, finetune)
        memory = _peak_memory()  # by now everything is imported
        manifest, digest, texts = _make(config, base, finetune, pairs)
        if config.report is not None:
            _report(config, config.report, pairs, texts)
    return CompressResult(
        out=config.out,
        digest=digest,
        artifact_bytes=config.out.stat().st_size,
        full_bytes=FULL_BYTES * pairs.num_weights,
        num_unchanged=len(pairs.tensors) - len(manifest.tensors),
        seconds=time.perf_counter() - started,
        peak_memory_bytes=max(0, _peak_memory() - memory),  # Linux counts by processor, and may read low
        manifest=manifest,
    )


def plan(config: CompressConfig) -> Needs:
    """The memory, time and disk that `compress` will take; reads headers alone, beside an adapter, which is merged.

    Raises:
        CheckpointError, UsageError: as `compress`.
    """
    check_place(config.out)
    base_directory = checkpoint_directory(config.base)
    with finetune_directory(config.finetune, base_directory) as directory:
        base, finetune = Checkpoint.open(base_directory), Checkpoint.open(directory)
        pairs = pair_up(base, finetune)
        return needs(config, pairs, _coded(config, pairs), own_files(base, finetune))


def _make(
    config: CompressConfig, base: Checkpoint, finetune: Checkpoint, pairs: Pairs
) -> tuple[Manifest, str, Sequence[Tensor]]:
    """Fit and write: the manifest, the artifact's digest, and text that nothing was fitted to."""
    files, coded = own_files(base, finetune), _coded(config, pairs)
    check_room(config, pairs, coded, files)
    check_memory(config, pairs, coded)
    identity = _identity(base, config)
    with ArtifactWriter(config.out) as writer:
        if config.training is None:
            carried = carry(pairs, files, Coding(coded, config.method, {}, _shown(config)), writer)
            manifest = _manifest(identity, config, pairs, carried)
            return manifest, writer.finish(manifest), ()
        inputs = _inputs(identity, finetune, config)
        with open_checkpoint_store(config.out, inputs, resume=config.resume) as store:
            fitted = _fit(config, pairs, coded, store)
            _check_agreement(config, fitted)
            coding = Coding(coded, config.method, fitted.deltas, _shown(config))
            carried = carry(pairs, files, coding, writer)
            manifest = _manifest(identity, config, pairs, carried, fitted)
            digest = writer.finish(manifest)
            store.discard()
    return manifest, digest, fitted.unseen


def _report(config: CompressConfig, directory: Path, pairs: Pairs, texts: Sequence[Tensor]) -> None:
    """The page about what was made, with examples where there was text."""
    from compressor.evaluate.examples import examples  # brings the model library, which takes seconds

    base, finetune = pairs.tensors[0].base, pairs.tensors[0].finetune
    finetune_id = Path(config.finetune).name if Path(config.finetune).is_dir() else config.finetune
    with Artifact.open(config.out) as artifact:
        device = torch.device("cpu") if config.training is None else config.training.place()
        own = DeltaModel(base, artifact)
        shown = examples(base_with_added_rows(base, pairs), finetune, own, texts[:NUM_EXAMPLES], device)
        write_report(directory, Report.of(base, finetune, artifact, shown, finetune_id))


def _fit(config: CompressConfig, pairs: Pairs, coded: frozenset[str], store: CheckpointStore) -> Fitted:
    """What calibration text makes of the matrices."""
    from compressor.fitting.fit import Fit  # brings the model library, which takes seconds

    assert config.training is not None
    spare = int((config.training.budget - 1) * _plan(config, pairs).device_bytes)
    wanted = coded & changed(pairs)
    return_freed_memory()
    fit = Fit(
        pairs={pair.name: pair for pair in pairs.tensors if pair.name in wanted},
        base=base_with_added_rows(pairs.tensors[0].base, pairs),
        finetune=finetune_with_own_head(pairs.tensors[0].finetune, pairs),
        method=config.method,
        training=config.training,
        spare_bytes=spare,
        store=store,
        shows=config.progress,
    )
    return fit.run()


def _inputs(base: Base, finetune: Checkpoint, config: CompressConfig) -> dict[str, Any]:
    """What a run must share with one that it goes on with."""
    assert config.training is not None
    return {
        "base": base.fingerprint,
        "finetune": identify_base(finetune, config.progress).fingerprint,
        "version": version("peraxis"),
        "settings": config.settings(),
        "text": config.training.calibration.source,
    }


def _check_agreement(config: CompressConfig, fitted: Fitted) -> None:
    if config.min_agreement is not None and fitted.fidelity.agreement < config.min_agreement:
        raise FidelityError(
            f"{config.finetune}: the delta agrees with it on {fitted.fidelity.agreement:.2%} of held-out tokens, less "
            f"than --min-agreement {config.min_agreement:.2%}: give a larger --budget, more --samples or text nearer "
            "its use, or --resume with a lower --min-agreement"
        )


def _plan(config: CompressConfig, pairs: Pairs) -> OneBitPlan:
    """What one bit per weight takes of everything that differs."""
    return one_bit_plan(
        {pair.name: pair.shape for pair in pairs.tensors}, embeddings=config.embeddings == "compress"
    )


def _identity(base: Checkpoint, config: CompressConfig) -> Base:
    identity = identify_base(base, config.progress)
    return replace(identity, id=(identity.id if Path(config.base).is_dir() else config.base)[:MAX_ID_CHARS])


def _manifest(
    base: Base, config: CompressConfig, pairs: Pairs, carried: Carried, fitted: Fitted | None = None
) -> Manifest:
    """No paths and no times: the same inputs give the same bytes."""
    return Manifest(
        base_id=base.id,
        base_fingerprint=base.fingerprint,
        method=config.method,
        tied=pairs.tied,
        device_bytes=carried.device_bytes,
        config=dict(base.config),
        tensors=carried.specs,
        files=carried.files,
        compressor={"version": version("peraxis"), "settings": config.settings()}
        | ({} if fitted is None else {"num_sequences": fitted.num_sequences}),
        fidelity={"weight_error": carried.weight_error} | ({} if fitted is None else fitted.as_json()),
    )


def _coded(config: CompressConfig, pairs: Pairs) -> frozenset[str]:
    """The names of what is coded at one bit where it differs."""
    embeddings = config.embeddings == "compress"
    return frozenset(
        pair.name for pair in pairs.tensors if is_matrix(pair.name, pair.shape, embeddings=embeddings)
    )


def _shown(config: CompressConfig) -> str:
    return config.out.name if config.progress else ""


def _peak_memory() -> int:
    """The most resident bytes so far. Not getrusage's figure, which a process inherits from the one that started it."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
