"""The functions of `import peraxis`: make, open, measure, merge and attach a delta. Importing this imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.errors import UsageError

if TYPE_CHECKING:
    from compressor.config import RecipeName, RivalName
    from compressor.convert.merge import DtypeName
    from compressor.evaluation import Evaluation
    from peraxis.artifact import Artifact
    from peraxis.attached import Attached

# The argument of `compressor` that has another name here.
TEXT = re.compile(r"`text(?=[`=])")


def compress(
    base: str | Path,
    finetune: str | Path,
    out: str | Path,
    *,
    calibration: str = "self",
    budget: float = 1.0,
    recipe: RecipeName = "ours",
    progress: bool = False,
    **options: Any,
) -> Artifact:
    """Make an artifact from a base and its fine-tune; the same inputs give the same bytes.

    >>> delta = compress(base, finetune, directory / "my.safetensors", calibration="none")
    >>> len(delta.manifest.tensors)
    21

    Args:
        base: A directory or a hub id.
        finetune: The same, of a checkpoint or a LoRA adapter.
        out: The artifact to write.
        calibration: Text to fit to: ``self`` is sampled from the fine-tune, ``none`` codes the weights alone, and any
            other is a file of text or records, or a data set of the hub.
        budget: Size as a multiple of one bit per weight, from 1 to 16.
        recipe: ``ours``, or ``paper``.
        progress: Show progress on stderr or in the notebook.
        options: Any other option of `peraxis compress`, with ``_`` for ``-``, such as ``method`` or ``samples``.

    Returns:
        The artifact, opened; its `manifest.fidelity` says how near it is to the fine-tune.

    Raises:
        CheckpointError: A checkpoint that cannot be read, or a pair that no delta can carry.
        FidelityError, MemoryTooSmall, StorageFull: A delta below ``min_agreement``, or too little memory or disk.
        TypeError: No option has this name.
        UsageError: A value out of its range, or options that contradict each other.
    """
    import compressor

    with _own_names():
        made = compressor.compress(
            base,
            finetune,
            out,
            text=calibration,
            recipe=recipe,
            budget=budget,
            progress=progress,
            **options,
        )
    return open(made.out)


def open(path: str | Path) -> Artifact:
    """Open an artifact, to see what it holds; a notebook shows it as a table. Use as a context manager, or `close` it.

    >>> with open(my_delta) as delta:
    ...     delta.manifest.method, sorted(delta.manifest.tensors)[0]
    ('both', 'lm_head.weight')

    Raises:
        ArtifactError: The file is missing, or no artifact of this format.
    """
    # Deferred, because it imports torch, which takes seconds.
    from peraxis.artifact import Artifact

    return Artifact.open(Path(path))


def merge(
    base: str | Path,
    delta: Artifact | str | Path,
    out: str | Path,
    *,
    dtype: DtypeName | None = None,
    progress: bool = False,
) -> Path:
    """Add an artifact to its base and write a stock Hugging Face checkpoint; return its directory.

    >>> sorted(path.name for path in merge(base, my_delta, directory / "merged").glob("config.json"))
    ['config.json']

    Args:
        base: A directory or a hub id.
        delta: The artifact, or its file.
        out: The directory to make.
        dtype: Type to round weights to: ``bfloat16``, ``float16`` or ``float32``; by default the base's own.
        progress: Show progress on stderr or in the notebook.

    Raises:
        ArtifactError, BaseMismatch: An artifact that is malformed, or made from another base.
        StorageFull: Too little free disk.
        UsageError: An `out` that exists already, or cannot be written.
    """
    import compressor

    return compressor.merge(base, _file_of(delta), out, dtype=dtype, progress=progress).out


def evaluate(
    base: str | Path,
    finetune: str | Path,
    delta: Artifact | str | Path,
    text: str,
    *,
    samples: int = 128,
    tasks: tuple[str, ...] = (),
    rival: RivalName | None = None,
    progress: bool = False,
) -> Evaluation:
    """Measure how near an artifact is to its fine-tune on text and in tasks, beside how near the base is.

    >>> measured = evaluate(base, finetune, my_delta, "self", samples=2)
    >>> measured.delta.kl < measured.base.kl
    True

    Args:
        base: A directory or a hub id.
        finetune: The same, or an adapter's.
        delta: The artifact, or its file.
        text: ``self``, a file of text or records, or a data set of the hub; text that the delta was not fitted to.
        samples: Number of sequences of text.
        tasks: Tasks of lm-evaluation-harness, or their .yaml files.
        rival: ``lora`` measures a LoRA of as many bytes on the text, too: the result's `rival`.
        progress: Show progress on stderr or in the notebook.

    Raises:
        ArtifactError, BaseMismatch: An artifact that is malformed, or made from another base.
        CheckpointError: Checkpoints that are no pair, or not this artifact's.
        UsageError: Text or tasks that cannot be loaded.
    """
    import compressor

    return compressor.evaluate(
        base,
        finetune,
        _file_of(delta),
        text=text,
        samples=samples,
        tasks=tasks,
        rival=rival,
        progress=progress,
    )


def attach(
    model: Any,
    artifact: Artifact | str | Path | Mapping[str, Artifact | str | Path],
    base: str | Path | None = None,
) -> Attached:
    """Make a model of transformers answer as variants, without a copy of its weights, until they are detached.

    >>> with attach(model, my_delta) as attached:
    ...     tokens = model.generate(**prompts, max_new_tokens=4)
    ...     with attached.using(["delta", None]):
    ...         mixed = model.generate(**prompts, max_new_tokens=4)
    >>> tokens.shape == mixed.shape
    True

    Args:
        model: A causal language model of transformers in bfloat16, float16 or float32, on the CPU or one CUDA device.
        artifact: The artifact of the variant, which all rows get; or several by names, of which `Attached.using`
            chooses. One alone is named as its file, without the suffix.
        base: The directory or hub id that `model` was loaded from. Without it, all of the model's tensors are hashed,
            in the dtype of its files; with it, some rows of each are compared.

    Returns:
        The attached variants. Leaving their block, or `detach`, leaves the model as it was.

    Raises:
        ArtifactError, BaseMismatch: An artifact that is malformed, changes what no layer reads from a delta, or was
            made from another base.
        CheckpointError: A `base` that cannot be read.
        MemoryTooSmall: Too little memory on the device.
        NotServable: A model that is quantised, compiled, on several devices, or with weights that no delta can reach.
        UsageError: A `model` that has variants already, or that is generating.
    """
    # Deferred, because it imports torch and transformers, which take seconds.
    from peraxis import attached

    if not isinstance(artifact, Mapping):
        file = _file_of(artifact)
        artifact = {file.stem: file}
    if not artifact:
        raise UsageError("`artifact` is empty: give an artifact, or several by name")
    return attached.attach(model, {name: _file_of(file) for name, file in artifact.items()}, base)


@contextmanager
def _own_names() -> Iterator[None]:
    """Let errors of the block name this package's arguments where `compressor` has others."""
    try:
        yield
    except UsageError as error:
        error.args = (TEXT.sub("`calibration", str(error)),)
        raise


def _file_of(delta: Artifact | str | Path) -> Path:
    return Path(delta) if isinstance(delta, str | Path) else delta.path
