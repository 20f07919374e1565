"""Use a PEFT adapter as a fine-tune: peft merges it over its base into a temporary directory."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from compressor.outputs import check_free_disk
from deltastore.base import Base
from deltastore.checkpoint import EMBEDDING_SUFFIXES, HEAD_SUFFIXES, INDEX_FILE, SINGLE_FILE, Checkpoint
from deltastore.errors import CheckpointError, PeraxisError, StorageFull, UsageError, failures_as, shown
from deltastore.format.files import GENERATION_FILE, tokenizer_paths
from deltastore.format.header import parse_json
from deltastore.hub import checkpoint_directory

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Each of these files alone is a tokenizer.
TOKENIZERS = frozenset({"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"})
MERGED_BYTES = 4  # per weight: float32
# Parts of names of copies that peft saves beside the plain tensor; its loader does not expect all of them.
WRAPPERS = (".modules_to_save", ".original_module", ".token_adapter", ".base_layer")
PROBE_TOKENS = 16
MERGE_TOLERANCE = 1e-3  # of the logits' norm; float32 rounding stays a hundred times below


@contextmanager
def finetune_directory(source: str, base: Path) -> Iterator[Path]:
    """Yield the directory of a fine-tune; an adapter is merged over `base` in float32 and removed afterwards.

    Args:
        source: a checkpoint or an adapter that peft saved: a directory or a hub id.
        base: the directory of the base. It is held in memory in float32 while an adapter is merged.

    Raises:
        CheckpointError: nothing at `source`, or an adapter that is incomplete, made for another base or of a kind
            that cannot be merged.
        StorageFull: the temporary directory is too small for the merged model.
        UsageError: `source` is an adapter and peft is not installed.
    """
    directory = checkpoint_directory(source)
    if not is_adapter(directory):
        yield directory
        return
    _check_files(directory, base)
    _warn_of_another_base(directory, base)
    with tempfile.TemporaryDirectory(prefix="peraxis-") as merged:
        _merge(directory, base, Path(merged))
        # transformers makes one from the configuration, which is not the adapter's.
        (Path(merged) / GENERATION_FILE).unlink(missing_ok=True)
        for name, path in _files(directory, base).items():
            (Path(merged) / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, Path(merged) / name)
        yield Path(merged)


def is_adapter(directory: Path) -> bool:
    """True if a directory holds an adapter and no model."""
    has_model = any((directory / file).is_file() for file in (SINGLE_FILE, INDEX_FILE))
    return (directory / CONFIG_FILE).is_file() and not has_model


def _check_files(adapter: Path, base: Path) -> None:
    if not (adapter / WEIGHTS_FILE).is_file():
        raise CheckpointError(
            f"{adapter}: no {WEIGHTS_FILE} in it; adapter_model.bin is a pickle and is not loaded: "
            "convert it, by loading it once with peft and saving it again"
        )
    opened = Checkpoint.open(base)
    towers = () if opened.wrapper is None else opened.wrapper.towers.values()
    needed = MERGED_BYTES * sum(math.prod(tensor.shape) for tensor in (*opened.tensors.values(), *towers))
    directory, way_out = Path(tempfile.gettempdir()), "set TMPDIR to a directory on a larger disk"
    check_free_disk(directory, needed, "the merged adapter takes", way_out)


def _warn_of_another_base(adapter: Path, base: Path) -> None:
    """Warn of a base that fits and is not the adapter's: by name, or by fingerprint where its directory is there.

    A base of other shapes is refused by peft.
    """
    named = _named(adapter / CONFIG_FILE, "base_model_name_or_path")
    if named is None:
        return
    if Path(named).is_dir():
        is_another = _is_another(Path(named), base)
    else:
        known = _named(base / "config.json", "_name_or_path")
        is_another = known is not None and not Path(known).exists() and known != named
    if is_another:
        print(
            f"warning: {adapter}: it was trained on {shown(named)}, and {base} is another model: the merged "
            "fine-tune may be useless",
            file=sys.stderr,
        )


def _is_another(named: Path, base: Path) -> bool:
    if named.resolve() == base.resolve():
        return False
    try:
        return Base.of(Checkpoint.open(named)).fingerprint != Base.of(Checkpoint.open(base)).fingerprint
    except PeraxisError:
        return False


def _named(path: Path, key: str) -> str | None:
    try:
        document = parse_json(path.read_bytes(), str(path))
    except (OSError, PeraxisError):
        # The reader that needs this file reports the error.
        return None
    name = document.get(key) if isinstance(document, dict) else None
    return name if isinstance(name, str) and name else None


def _merge(adapter: Path, base: Path, out: Path) -> None:
    from safetensors import SafetensorError

    peft = _peft()
    with _quiet():
        with failures_as(
            lambda reason: CheckpointError(
                f"{adapter}: peft cannot merge it over {base} ({reason}): "
                "give the base that it was trained on, or a merged checkpoint"
            )
        ):
            model = _merged(peft, adapter, base)
        try:
            model.save_pretrained(out)
        except (OSError, SafetensorError) as error:
            raise StorageFull(
                f"{out}: the merged adapter cannot be written ({error}): "
                "free some space there or set TMPDIR to a directory on a larger disk"
            ) from error


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise UsageError(
            "the fine-tune is an adapter, and merging it needs peft: pip install 'peraxis[lora]'"
        ) from error
    return peft


def _merged(peft: ModuleType, adapter: Path, base: Path) -> Any:
    """Return the base with the adapter in its weights, once its logits equal those of the unmerged adapter."""
    import torch

    from compressor.decoder.decoder import whole_model

    config = peft.PeftConfig.from_pretrained(str(adapter))
    if config.is_prompt_learning:
        raise _not_mergeable(adapter, config)
    model = whole_model(base, torch.float32)
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        # Whatever its configuration says: resizing and saving would follow that.
        _say_untied(model)
    _grow(model, adapter)
    adapted = peft.PeftModel.from_pretrained(model, str(adapter), torch_device="cpu")
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise _not_mergeable(adapter, config)
    _check_keys(adapted.load_adapter(str(adapter), adapted.active_adapter, torch_device="cpu"), adapter)
    _untie(peft, model)
    expected = _logits(adapted)
    merged = adapted.merge_and_unload(safe_merge=True)
    lost = (_logits(merged) - expected).norm() / expected.norm()
    if not lost <= MERGE_TOLERANCE:
        raise CheckpointError(
            f"{adapter}: merged, it answers otherwise than beside its base (logits differ by {lost:.2g} "
            "of their norm): merge it yourself and give the merged checkpoint"
        )
    return merged


def _grow(model: Any, adapter: Path) -> None:
    """Resize the base's embedding to the adapter's, because peft loads into existing rows."""
    from safetensors import safe_open

    with safe_open(adapter / WEIGHTS_FILE, framework="pt") as opened:
        rows = {
            whole: opened.get_slice(name).get_shape()[0]
            for name in opened.keys()  # noqa: SIM118 - safe_open is no mapping
            if (whole := _unwrapped(name)).endswith((*EMBEDDING_SUFFIXES, *HEAD_SUFFIXES))
        }
    largest = max(rows.values(), default=0)
    if largest <= model.get_input_embeddings().weight.shape[0]:
        return
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if not is_tied and len(rows) < 2:
        raise CheckpointError(
            f"{adapter}: {shown(next(iter(rows)))} has {largest} rows, more than the base, and the other of "
            "embedding and output head is not there: save the adapter with save_embedding_layers=True"
        )
    model.resize_token_embeddings(largest, mean_resizing=False)


def _check_keys(loaded: Any, adapter: Path) -> None:
    """Refuse tensors of the file that the model lacks, and parameters that the file lacks."""
    unknown = [key for key in loaded.unexpected_keys if _unwrapped(key) == key]
    for keys, lack in ((unknown, "the base has no parameter for"), (loaded.missing_keys, "it lacks")):
        if keys:
            raise CheckpointError(
                f"{adapter}: {lack} tensor {shown(keys[0])} and {len(keys) - 1} others: "
                "give the base that it was trained on"
            )


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _untie(peft: ModuleType, model: Any) -> None:
    """Give a tied head its own weights if the adapter changes the head or the embedding.

    The adapter changes one use of the shared weights; merged into them, it would change both.
    """
    tuner_layer = peft.tuners.tuners_utils.BaseTunerLayer
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if not any(isinstance(end, tuner_layer) for end in ends):
        return
    embedding, head = (end.get_base_layer() if isinstance(end, tuner_layer) else end for end in ends)
    if head.weight is embedding.weight:
        head.weight = type(head.weight)(head.weight.detach().clone(), requires_grad=False)
        _say_untied(model)


def _say_untied(model: Any) -> None:
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _logits(model: Any) -> Any:  # [tokens, vocabulary] float32
    import torch

    rows = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(PROBE_TOKENS)[None] * 97 % rows
    with torch.inference_mode():
        return model.eval()(input_ids=tokens).logits[0]


def _not_mergeable(adapter: Path, config: Any) -> PeraxisError:
    return CheckpointError(
        f"{adapter}: an adapter of kind {shown(str(config.peft_type.value))} changes no weights and cannot be merged: "
        "give a LoRA adapter or a merged checkpoint"
    )


def _files(adapter: Path, base: Path) -> Mapping[str, Path]:
    """Return the adapter's tokenizer and generation config by file name, else the base's."""
    own = tokenizer_paths(adapter)
    # Never a mixture of two tokenizers; a chat template alone goes with the base's tokenizer.
    files = own if own.keys() & TOKENIZERS else {**tokenizer_paths(base), **own}
    generation = [each / GENERATION_FILE for each in (adapter, base) if (each / GENERATION_FILE).is_file()]
    return {**files, **{path.name: path for path in generation[:1]}}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the bars and warnings of peft and transformers; `_check_keys` refuses what they warn of."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
