"""From a base and its fine-tune to an artifact, and back to a stock checkpoint.

`compress`, `merge` and `evaluate` are the commands `compress`, `merge` and `eval` as functions. Importing this package
imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.config import RecipeName, RivalName
    from compressor.convert.merge import DtypeName, MergeResult
    from compressor.evaluation import Evaluation
    from compressor.pipeline import CompressResult

__all__ = ["compress", "evaluate", "merge"]


def compress(
    base: str | Path,
    finetune: str | Path,
    out: str | Path,
    *,
    text: str = "self",
    recipe: RecipeName = "ours",
    **options: Any,
) -> CompressResult:
    """Make an artifact from a base and its fine-tune; the same inputs give the same bytes.

    Args:
        base: A directory or a hub id.
        finetune: The same, of a checkpoint or a LoRA adapter.
        out: The artifact to write.
        text: Text to fit to: ``self`` is sampled from the fine-tune, ``none`` codes the weights alone, and any other is
            a file of text or records, or a data set of the hub.
        recipe: ``ours``, or ``paper``.
        options: Any other option of `peraxis compress`, as a field of `compressor.config` names it, such as ``method``,
            ``budget`` or ``samples``.

    Returns:
        The result with its ``kl`` on held-out text, ``artifact_bytes`` and ``seconds``.

    Raises:
        CheckpointError: A checkpoint that cannot be read, or a pair that no delta can carry.
        FidelityError, MemoryTooSmall, StorageFull: A delta below ``min_agreement``, or too little memory or disk.
        TypeError: No option has this name.
        UsageError: A value out of its range, or options that contradict each other.
    """
    from compressor.config import config_of
    from compressor.pipeline import compress as run

    own = {"base": str(base), "finetune": str(finetune), "out": Path(out)}
    return run(config_of(**own, text=text, recipe=recipe, **options))


def merge(
    base: str | Path,
    delta: str | Path,
    out: str | Path,
    *,
    dtype: DtypeName | None = None,
    progress: bool = False,
) -> MergeResult:
    """Add an artifact to its base and write a stock Hugging Face checkpoint.

    Args:
        base: A directory or a hub id.
        delta: The artifact.
        out: The directory to make.
        dtype: Type to round weights to; by default the base's own.
        progress: Show progress on stderr.

    Raises:
        ArtifactError, BaseMismatch: An artifact that is malformed, or made from another base.
        StorageFull: Too little free disk.
        UsageError: An `out` that exists already, or cannot be written.
    """
    from compressor.convert.merge import MergeConfig
    from compressor.convert.merge import merge as run

    return run(MergeConfig(str(base), Path(delta), Path(out), dtype, progress))


def evaluate(
    base: str | Path,
    finetune: str | Path,
    delta: str | Path,
    *,
    text: str,
    samples: int = 128,
    tasks: tuple[str, ...] = (),
    rival: RivalName | None = None,
    progress: bool = False,
) -> Evaluation:
    """Measure how near an artifact is to its fine-tune on text and in tasks, beside how near the base is.

    Args:
        base: A directory or a hub id.
        finetune: The same, or an adapter's.
        delta: The artifact.
        text: As `compress` takes it, but for ``none``; text that the delta was not fitted to.
        samples: Number of sequences of text.
        tasks: Tasks of lm-evaluation-harness, or their .yaml files.
        rival: ``lora`` measures a LoRA of as many bytes on the text, too.
        progress: Show progress on stderr.

    Raises:
        ArtifactError, BaseMismatch: An artifact that is malformed, or made from another base.
        CheckpointError: Checkpoints that are no pair, or not this artifact's.
        UsageError: Text or tasks that cannot be loaded.
    """
    from compressor.evaluation import EvalConfig
    from compressor.evaluation import evaluate as run

    return run(EvalConfig(str(base), str(finetune), Path(delta), text, samples, tasks, progress, rival))
