"""Compress two checkpoints into one artifact: check, fit, write, report. Each step is implemented in its own file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compressor.adapters import finetune_directory
from compressor.config import CompressConfig, FitSettings
from compressor.decoder.weights import (
    CodedStacks,
    DeltaModel,
    Overlay,
    base_with_added_rows,
    finetune_with_own_head,
)
from compressor.memory import Requirements, check_memory, disk_bytes, requirements_of
from compressor.model_card import DeltaFacts, check_card_directory, write_card
from compressor.outputs import (
    MAX_ROWS,
    check_file_name,
    check_files,
    check_free_disk,
    check_not_an_input,
    check_written,
    checked_at_end,
)
from compressor.pairs import (
    PairCoding,
    Pairs,
    changed_names,
    check_order,
    check_related,
    check_towers,
    delta_tensors,
    pair_up,
)
from compressor.resume import CheckpointStore, open_checkpoint_store
from compressor.rival import Rival, measured_rival
from compressor.sources import own_files
from compressor.writer import DeltaContents, WrittenDelta, write_delta
from deltastore.architecture import POSITIONS, architecture
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.console import identify_base
from deltastore.errors import FidelityError
from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.manifest import Manifest
from deltastore.format.sizes import FP16_BYTES, OneBitPlan, coded_names, one_bit_plan
from deltastore.hub import checkpoint_directory
from deltastore.memory import return_freed_memory

# For types alone, because it imports transformers, which takes seconds.
if TYPE_CHECKING:
    from compressor.fit.fit import Fitted

MAX_ID_CHARS = 512  # of a base, in a manifest
NUM_EXAMPLES = 4  # in a model card
SOLVERS = {"ours": "lstsq", "paper": "adamw"}  # by recipe, their names in a manifest


@dataclass(frozen=True, slots=True)
class CompressResult(WrittenDelta):
    """A written delta and what it cost, the rival and the model card apart."""

    seconds: float
    peak_memory_bytes: int  # growth of the process's peak resident memory
    rival: Rival | None = None  # where it was asked for

    @property
    def kl(self) -> float | None:
        """KL divergence to the fine-tune on held-out text, in nats per token; None without text."""
        held_out = self.manifest.fidelity.get("held_out")
        return None if held_out is None else float(held_out["kl"])

    def as_json(self) -> dict[str, Any]:
        cost = {"seconds": self.seconds, "peak_memory_bytes": self.peak_memory_bytes}
        rival = {} if self.rival is None else {"rival": self.rival.as_json()}
        return {**WrittenDelta.as_json(self), **cost, **rival}


class OpenedBase:
    """A base with all that does not depend on a fine-tune, each found when it is first needed: headers, fingerprint."""

    def __init__(self, source: str) -> None:
        """Find a base, a directory or a hub id.

        Raises:
            CheckpointError: no such directory or model.
        """
        self.source = source
        self.directory = checkpoint_directory(source)
        self._checkpoint: Checkpoint | None = None
        self._identity: Base | None = None

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint, opened once. Raises as `Checkpoint.open` does."""
        if self._checkpoint is None:
            self._checkpoint = Checkpoint.open(self.directory)
        return self._checkpoint

    def identity(self, progress: bool) -> Base:
        """Return the identity under the name that manifests show, the directory's or the hub id; hashed once.

        Raises:
            CheckpointError: a shard is missing, or transformers refuses the configuration.
        """
        if self._identity is None:
            found = identify_base(self.checkpoint(), progress)
            name = found.id if Path(self.source).is_dir() else self.source
            self._identity = replace(found, id=name[:MAX_ID_CHARS])
        return self._identity


def compress(config: CompressConfig, opened: OpenedBase | None = None) -> CompressResult:
    """Make the artifact of `config`; the same inputs give the same bytes.

    Args:
        opened: the base of `config`, if another run has opened it.

    Raises:
        CheckpointError: a checkpoint that cannot be read, a pair that no delta can carry, or files that no server uses.
        ReaderDied: the last check was killed; the artifact stays beside `out`.
        MemoryTooSmall: less memory than fitting needs.
        FidelityError: a delta below `min_agreement`, which is not written.
        StorageFull: too little free disk at `out`.
        UsageError: an `out` that cannot be written, or calibration text that cannot be read.
    """
    started = time.perf_counter()
    _check_outputs(config)
    base = OpenedBase(config.base) if opened is None else opened
    with finetune_directory(config.finetune, base.directory) as directory:
        pairs = _pairs(config, base, directory)
        # Every module that compressing needs is imported by now.
        memory = _peak_memory_bytes()
        manifest, digest, test_text = _fit_and_write(config, base, pairs)
        result = CompressResult(
            out=config.out,
            digest=digest,
            artifact_bytes=config.out.stat().st_size,
            full_bytes=FP16_BYTES * pairs.num_weights,
            num_unchanged=len(pairs.tensors) - len(manifest.tensors),
            manifest=manifest,
            seconds=time.perf_counter() - started,
            # Linux counts resident pages by processor and may read low.
            peak_memory_bytes=max(0, _peak_memory_bytes() - memory),
        )
        return _beside_rival(config, pairs, result, test_text)


def measure_rival(config: CompressConfig, opened: OpenedBase) -> CompressResult:
    """Measure the rival of an artifact that `compress` made of the same settings without it, and write the card anew.

    The text is had again, which takes as long as it took then.

    Raises:
        CheckpointError, UsageError: as `compress`.
    """
    started = time.perf_counter()
    assert config.fit_settings is not None
    with finetune_directory(config.finetune, opened.directory) as directory:
        pairs = _pairs(config, opened, directory)
        memory = _peak_memory_bytes()
        test_text = _test_text(config.fit_settings, pairs)
        with Artifact.open(config.out) as artifact:
            result = CompressResult(
                out=config.out,
                digest=artifact.digest(),
                artifact_bytes=artifact.size_bytes,
                full_bytes=FP16_BYTES * pairs.num_weights,
                num_unchanged=len(pairs.tensors) - len(artifact.manifest.tensors),
                manifest=artifact.manifest,
                seconds=time.perf_counter() - started,
                peak_memory_bytes=max(0, _peak_memory_bytes() - memory),
            )
        return _beside_rival(config, pairs, result, test_text)


def _test_text(fit_settings: FitSettings, pairs: Pairs) -> Sequence[Tensor]:
    """Return the text that a fit of the same settings measures fidelity on."""
    # Deferred, because they import transformers, which takes seconds.
    from compressor.decoder.decoder import Decoder
    from compressor.fit.calibration import calibration_text, split_text

    decoder = Decoder(finetune_with_own_head(pairs), fit_settings.torch_device(), torch.float32)
    sequences = calibration_text(fit_settings.calibration, decoder, base=pairs.base.path)
    _, _, test = split_text(sequences)
    return test


def _beside_rival(
    config: CompressConfig, pairs: Pairs, result: CompressResult, test_text: Sequence[Tensor]
) -> CompressResult:
    """Measure the rival and write the card, where they are asked for."""
    if config.rival is not None and config.fit_settings is not None:
        base_kl = float(result.manifest.fidelity["base"]["kl"])
        device = config.fit_settings.torch_device()
        with Artifact.open(config.out) as artifact:
            rival = measured_rival(pairs, artifact, test_text, base_kl, device, config.progress)
        result = replace(result, rival=rival)
    if config.report is not None:
        _write_card(config, config.report, pairs, result, test_text)
    return result


def _check_outputs(config: CompressConfig) -> None:
    text = None if config.fit_settings is None else config.fit_settings.calibration.text
    inputs = {"base": config.base, "finetune": config.finetune, "text": text}
    check_not_an_input(config.out, inputs)
    if config.report is not None:
        check_card_directory(config.report)


def plan(config: CompressConfig) -> Requirements:
    """Return bounds on the memory and disk that `compress` will take.

    Reads headers only, except that an adapter is merged.

    Raises:
        CheckpointError, UsageError: as `compress`.
    """
    check_file_name(config.out)
    base = OpenedBase(config.base)
    with finetune_directory(config.finetune, base.directory) as directory:
        pairs = _pairs(config, base, directory)
        files = own_files(pairs.base, pairs.finetune)
        return requirements_of(config, pairs, _coded_names(config, pairs), files)


def _pairs(config: CompressConfig, base: OpenedBase, finetune: Path) -> Pairs:
    """Pair the base and the checkpoint in a directory; refuse swapped ones unless any base is wanted."""
    if not config.any_base:
        check_order(config.base, config.finetune, (base.directory, checkpoint_directory(config.finetune)))
    return pair_up(base.checkpoint(), Checkpoint.open(finetune))


def _fit_and_write(
    config: CompressConfig, opened: OpenedBase, pairs: Pairs
) -> tuple[Manifest, str, Sequence[Tensor]]:
    """Return the manifest, the artifact's digest, and sequences ``[tokens]`` of text that nothing was fitted to."""
    files, coded = own_files(pairs.base, pairs.finetune), _coded_names(config, pairs)
    check_file_name(config.out)
    needed_bytes = disk_bytes(config, pairs, coded, files)
    check_free_disk(config.out.parent, needed_bytes, "compressing needs up to")
    check_memory(config, pairs, coded)
    check_towers(pairs.base, pairs.finetune)
    if not config.any_base:
        check_related(pairs)
    base = opened.identity(config.progress)
    if config.fit_settings is not None:
        # Before hours of fitting; the end of the command checks the same.
        check_files(files, pairs.base.path, _num_rows(pairs), str(config.finetune))
    with checked_at_end(config.out) as path, ArtifactWriter(path) as writer:
        if config.fit_settings is None:
            contents = _contents(config, base, pairs, files, None)
            manifest, digest = write_delta(contents, writer, progress=config.progress)
            check_written(path, str(config.out), pairs.base, base)
            return manifest, digest, ()
        inputs = _inputs(base, pairs.finetune, config, config.fit_settings)
        with open_checkpoint_store(config.out, inputs, resume=config.resume) as store:
            fitted = _fit(config, config.fit_settings, pairs, coded, store)
            check_agreement(config, fitted.fidelity.agreement)
            contents = _contents(config, base, pairs, files, fitted)
            manifest, digest = write_delta(contents, writer, progress=config.progress)
            check_written(path, str(config.out), pairs.base, base)
            store.discard()
    return manifest, digest, fitted.test_text


def _num_rows(pairs: Pairs) -> int:
    """Return the rows of the fine-tune's embedding."""
    embedding = pairs.base.embedding_name
    rows = [pair.tensor.shape[0] for pair in pairs.tensors if pair.base_tensor.name == embedding]
    return max(rows, default=MAX_ROWS)


def _contents(
    config: CompressConfig, base: Base, pairs: Pairs, files: Mapping[str, bytes], fitted: Fitted | None
) -> DeltaContents:
    deltas = {} if fitted is None else fitted.deltas
    return DeltaContents(
        base=base,
        method=config.scales,
        tied=pairs.tied,
        tensors=delta_tensors(pairs, PairCoding(_coded_names(config, pairs), config.scales, deltas)),
        files=files,
        settings=settings_of(config),
        max_positions=architecture(pairs.finetune.config).get(POSITIONS),
        num_sequences=None if fitted is None else fitted.num_sequences,
        # 0 stands where no matrix differs; else `write_delta` replaces it.
        fidelity={"weight_error": 0.0} | ({} if fitted is None else fitted.as_json()),
    )


def _write_card(
    config: CompressConfig,
    directory: Path,
    pairs: Pairs,
    written: CompressResult,
    test_text: Sequence[Tensor],
) -> None:
    """Write the model card, with continuations of test text if there is any."""
    # Deferred, because it imports transformers, which takes seconds.
    from compressor.tasks import examples

    finetune_id = Path(config.finetune).name if Path(config.finetune).is_dir() else config.finetune
    device = torch.device("cpu") if config.fit_settings is None else config.fit_settings.torch_device()
    with Artifact.open(config.out) as artifact:
        base, delta = base_with_added_rows(pairs), DeltaModel(pairs.base, artifact)
        shown = examples(base, pairs.finetune, delta, test_text[:NUM_EXAMPLES], device)
    write_card(directory, DeltaFacts.of(written, finetune_id, shown, written.rival))


def _fit(
    config: CompressConfig,
    fit_settings: FitSettings,
    pairs: Pairs,
    coded: frozenset[str],
    store: CheckpointStore,
) -> Fitted:
    """Fit the deltas of the matrices that differ to calibration text."""
    # Deferred, because it imports transformers, which takes seconds.
    from compressor.fit.fit import Fit, recipe_of

    spare_bytes = int((fit_settings.budget - 1) * _one_bit_plan(config, pairs).device_bytes)
    fitted_names = coded & changed_names(pairs)
    return_freed_memory()
    changed = {pair.name: pair for pair in pairs.tensors if pair.name in fitted_names}
    finetune = finetune_with_own_head(pairs)
    stacks = CodedStacks(
        {name: pair for name, pair in changed.items() if pair.transposed is not None}, config.scales
    )
    fit = Fit(
        pairs={name: pair for name, pair in changed.items() if pair.transposed is None},
        base=base_with_added_rows(pairs),
        finetune=finetune,
        student=Overlay(finetune, stacks.weight) if stacks.pairs else finetune,
        fit_settings=fit_settings,
        method=config.scales,
        recipe=recipe_of(fit_settings, config.scales),
        spare_bytes=spare_bytes,
        store=store,
        shows_progress=config.progress,
    )
    return fit.run()


def _inputs(
    base: Base, finetune: Checkpoint, config: CompressConfig, fit_settings: FitSettings
) -> dict[str, Any]:
    """Return what a resumed run must share with the run that it continues."""
    return {
        "base": base.fingerprint,
        # As it is stored, which may be another form of experts than the base's.
        "finetune": identify_base(Checkpoint.open(finetune.path), config.progress).fingerprint,
        "version": version("peraxis"),
        "settings": settings_of(config),
        "text": fit_settings.calibration.text,
    }


def settings_of(config: CompressConfig) -> dict[str, Any]:
    """Return the settings that change an artifact's bytes, without paths, as its manifest has them."""
    settings = {"method": config.scales, "calibration": "none", "embeddings": config.embeddings}
    if config.fit_settings is None:
        return settings
    # Deferred, because it imports transformers, which takes seconds.
    from compressor.fit.fit import recipe_of

    calibration = config.fit_settings.calibration
    recipe = recipe_of(config.fit_settings, config.scales)
    text = {
        "source": Path(calibration.text).name,
        "samples": calibration.samples,
        "length": calibration.length,
        "seed": calibration.seed,
    }
    return settings | {
        "calibration": text,
        "solver": SOLVERS[config.fit_settings.recipe],
        "distill_epochs": recipe.distillation.epochs,
        **recipe.settings,
    }


def check_agreement(config: CompressConfig, agreement: float) -> None:
    """Refuse a delta that agrees less with its fine-tune than `config` says.

    Args:
        agreement: the share of held-out tokens that come out the same.

    Raises:
        FidelityError: there are too few.
    """
    if config.min_agreement is not None and agreement < config.min_agreement:
        raise FidelityError(
            f"{config.finetune}: the delta agrees with it on {agreement:.2%} of held-out tokens, less "
            f"than `min_agreement` {config.min_agreement:.2%}: give a larger `budget`, more `samples` or text nearer "
            "its use, or `resume=True` with a lower `min_agreement`"
        )


def _one_bit_plan(config: CompressConfig, pairs: Pairs) -> OneBitPlan:
    """Return the bytes of one bit per weight for every matrix of the pair."""
    shapes = {pair.name: pair.shape for pair in pairs.tensors}
    return one_bit_plan(shapes, pairs.stacks, embeddings=config.embeddings == "compress")


def _coded_names(config: CompressConfig, pairs: Pairs) -> frozenset[str]:
    """Return the names of the matrices and stacks that are coded at one bit where they differ from the base."""
    shapes = {pair.name: pair.shape for pair in pairs.tensors}
    return coded_names(shapes, pairs.stacks, embeddings=config.embeddings == "compress")


def _peak_memory_bytes() -> int:
    """Return the most resident bytes so far.

    Reads /proc, because getrusage's figure is inherited from the parent process.
    """
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
