"""A Hugging Face checkpoint directory, sharded or not, as named tensors that are read on demand.

Tensors are read with `pread` into memory that the caller owns, whole or by rows. Files are never mapped: a file that
shrinks while it is read raises an error, not SIGBUS. Opening a checkpoint decides, as transformers does when it loads
one, whether the output head is the input embedding. A checkpoint of a wrapper, which also reads images or sound, is
opened as that of its text model. Must not know model classes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltastore.architecture import constant_object, ends_of
from deltastore.errors import ArtifactError, CheckpointError, shown
from deltastore.format.header import open_file, parse_json, read_header, read_into
from deltastore.wrappers import TextForm, text_form

TORCH_DTYPE: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
DTYPE_NAME: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPE.items()}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
EMBEDDING_SUFFIXES = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")
HEAD_SUFFIXES = ("lm_head.weight", "embed_out.weight")
# Tables that old checkpoints hold and that transformers computes and does not load.
COMPUTED_SUFFIXES = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    ".attention.bias",
    ".attention.masked_bias",
    ".attn.bias",
    ".attn.masked_bias",
)
# Added to the names of parameters by torch's DataParallel, by peft, and by torch.compile, FSDP and activation
# checkpointing. The last three wrap any module.
LEADING_WRAPPERS = ("module.", "base_model.model.")
INNER_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one tensor of a checkpoint."""

    name: str
    dtype: str  # safetensors' name, such as "BF16"
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the beginning of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The parts of a wrapper's checkpoint that are not its text model's."""

    config: Mapping[str, Any]  # of `config.json`
    towers: Mapping[str, StoredTensor]  # by the wrapper's parameter; each has its stored name
    _stored: Mapping[str, str]  # by the name in the text model
    _form: TextForm

    def stored_name(self, name: str) -> str:
        """Return the name in the wrapper's files of a tensor of the text model."""
        return self._stored.get(name) or self._form.parameter(name)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its configuration and the location of every tensor, which are the text model's."""

    path: Path
    config: Mapping[str, Any]
    # In the order of the checkpoint's shards. A tensor that embedding and head share is there once, as the embedding.
    tensors: Mapping[str, StoredTensor]
    tied: bool  # the output head is the input embedding
    wrapper: Wrapper | None = None

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read `config.json` and the safetensors headers of a directory that `save_pretrained` wrote.

        Where the model ties its head and both are stored, they are compared up to their first difference.

        Raises:
            CheckpointError: The directory is missing, holds no safetensors, or one of its files cannot be read; or
                the embedding or the head is missing.
        """
        if not path.is_dir():
            defect = "not a directory" if path.exists() else "no such directory"
            raise CheckpointError(f"{path}: {defect}; give the directory of a Hugging Face checkpoint")
        if not (path / "config.json").exists():
            raise CheckpointError(
                f"{path / 'config.json'} does not exist, so {path} is not the directory of a Hugging Face checkpoint: "
                f"{_way_out(path, 'give another one, or fetch the checkpoint again')}"
            )
        try:
            config = _read_object(path / "config.json")
            tensors = _unwrapped(_collect(path), path)
        except ArtifactError as error:
            raise CheckpointError(
                f"{error}: the checkpoint is damaged or incomplete, fetch it again"
            ) from error
        if not tensors:
            raise CheckpointError(
                f"{path}: its safetensors files hold no tensors: fetch the checkpoint again"
            )
        try:
            form = text_form(config)
        except CheckpointError as error:
            raise CheckpointError(f"{path}/{error}") from error
        if form is None:
            return _with_ends(path, config, tensors)
        own, wrapper = _unwrapped_text(path, config, tensors, form)
        return replace(_with_ends(path, form.config, own), wrapper=wrapper)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read a tensor, or a contiguous run of its rows, in its stored dtype into newly allocated memory.

        Args:
            name: The tensor's name.
            rows: A slice of step 1 over the first dimension.

        Raises:
            CheckpointError: Its shard is missing or has become shorter.
            ValueError: `rows` has another step than 1.
        """
        return self.read_stored(self.tensors[name], rows)

    def read_stored(self, stored: StoredTensor, rows: slice = slice(None)) -> Tensor:
        """Read a tensor by its location, which may be in a tower, as `read` does."""
        if rows == slice(None):
            shape, start = stored.shape, 0
        else:
            first, last, step = rows.indices(stored.shape[0])
            if step != 1:
                raise ValueError(f"rows {rows}: only slices of step 1 are read")
            row_bytes = stored.num_bytes // max(1, stored.shape[0])
            shape, start = (max(0, last - first), *stored.shape[1:]), first * row_bytes
        tensor = torch.empty(shape, dtype=TORCH_DTYPE[stored.dtype])
        if tensor.numel():
            _fill(tensor, stored, start)
        return tensor

    @property
    def stored_config(self) -> Mapping[str, Any]:
        """The document of `config.json`, which for a wrapper is not that of its text model."""
        return self.config if self.wrapper is None else self.wrapper.config

    def read_flat(self, name: str, rows: slice) -> Tensor:
        """Read rows of a tensor that is taken for a matrix: rows of one expert of a stack follow those of another.

        Args:
            name: The tensor's name; it has two dimensions or more.
            rows: A slice of step 1, with both ends, over all dimensions but the last.

        Raises:
            CheckpointError: Its shard is missing or has become shorter.
        """
        stored = self.tensors[name]
        tensor = torch.empty(rows.stop - rows.start, stored.shape[-1], dtype=TORCH_DTYPE[stored.dtype])
        if tensor.numel():
            _fill(tensor, stored, rows.start * stored.shape[-1] * tensor.itemsize)
        return tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's shape by name."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    @property
    def embedding_name(self) -> str | None:
        """The name of the input embedding's tensor, recognised by the suffixes that transformers' models use."""
        return _first(self.tensors, EMBEDDING_SUFFIXES)

    @property
    def head_name(self) -> str | None:
        """The name of the output head's tensor; None if it is the embedding's."""
        return _first(self.tensors, HEAD_SUFFIXES)


def _first(names: Iterable[str], suffixes: tuple[str, ...]) -> str | None:
    return next((name for name in names if name.endswith(suffixes)), None)


def _unwrapped_text(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], form: TextForm
) -> tuple[dict[str, StoredTensor], Wrapper]:
    """Divide a wrapper's tensors into those of its text model, by the names that they have there, and its towers'.

    Raises:
        CheckpointError: two tensors are one parameter, or there are only towers.
    """
    own: dict[str, StoredTensor] = {}
    towers: dict[str, StoredTensor] = {}
    stored_names = {}
    for stored, (name, is_tower) in form.names(tensors).items():
        part = towers if is_tower else own
        if name in part:
            raise CheckpointError(
                f"{path}: {shown(stored)} is tensor {shown(name)} of the model, which is there under another name, "
                "too: save the model again"
            )
        part[name] = tensors[stored] if is_tower else replace(tensors[stored], name=name)
        if not is_tower:
            stored_names[name] = stored
    if not own:
        raise CheckpointError(
            f"{path}: its tensors are those of towers for images or sound, and its text model is in none of its "
            "shards: fetch the checkpoint again"
        )
    return own, Wrapper(config, towers, stored_names, form)


def _with_ends(path: Path, config: Mapping[str, Any], tensors: dict[str, StoredTensor]) -> Checkpoint:
    """Decide whether embedding and head are one tensor, and keep one that is stored twice once.

    Raises:
        CheckpointError: one of them is missing, and the model does not take the other for it.
    """
    embedding, head = _first(tensors, EMBEDDING_SUFFIXES), _first(tensors, HEAD_SUFFIXES)
    try:
        ends = ends_of(config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}/{error}") from error
    if embedding is not None and head is not None:
        ties = config.get("tie_word_embeddings", True) if ends is None else ends.tied
        checkpoint = Checkpoint(path, config, tensors, tied=False)
        if not ties or not _are_equal(checkpoint, embedding, head):
            return checkpoint
        rest = {name: stored for name, stored in tensors.items() if name != head}
        return Checkpoint(path, config, rest, tied=True)
    # Some models name them otherwise.
    has_embedding = embedding is not None or (ends is not None and ends.embedding in tensors)
    has_head = head is not None or (ends is not None and ends.head in tensors)
    if ends is None or has_embedding == has_head:
        return Checkpoint(path, config, tensors, tied=head is None)
    if not ends.tied:
        missing = ends.head if has_embedding else ends.embedding
        raise CheckpointError(
            f"{path}: its config.json does not tie the output head to the embedding, and {shown(missing)} is in none "
            "of its shards: fetch the checkpoint again, or the config.json that belongs to it"
        )
    if has_head:
        renamed = {head or ends.head: ends.embedding_among(tensors)}
        found = [replace(stored, name=renamed.get(name, name)) for name, stored in tensors.items()]
        tensors = {stored.name: stored for stored in found}
    return Checkpoint(path, config, tensors, tied=True)


def _are_equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Compare the bytes of two tensors block by block up to their first difference."""
    first, second = checkpoint.tensors[one], checkpoint.tensors[other]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    rows = range(0, first.shape[0], max(1, BLOCK_BYTES * first.shape[0] // max(1, first.num_bytes)))
    return all(
        torch.equal(
            checkpoint.read(one, block).view(torch.uint8), checkpoint.read(other, block).view(torch.uint8)
        )
        for block in (slice(start, start + rows.step) for start in rows)
    )


def _fill(tensor: Tensor, stored: StoredTensor, start: int) -> None:
    """Read into `tensor`'s memory, beginning at byte `start` of the stored tensor."""
    target = tensor.view(-1).view(torch.uint8).numpy().data
    where = f"{stored.file}: tensor {shown(stored.name)}"
    try:
        fd = open_file(stored.file, where)
        try:
            read_into(fd, target, stored.offset + start, where)
        finally:
            os.close(fd)
    except ArtifactError as error:
        raise CheckpointError(f"{error}: fetch the shard again") from error


def is_computed(name: str) -> bool:
    """True if a tensor is a table that transformers computes itself."""
    return name.endswith(COMPUTED_SUFFIXES)


def plain_name(name: str) -> str:
    """Return a parameter's name without the names of modules that were wrapped around the model or its parts."""
    name = INNER_WRAPPERS.sub("", name)
    for wrapper in LEADING_WRAPPERS:
        if name.startswith(wrapper):
            return plain_name(name.removeprefix(wrapper))
    return name


def _unwrapped(tensors: Mapping[str, StoredTensor], path: Path) -> dict[str, StoredTensor]:
    """Return the tensors by their plain names."""
    plain: dict[str, StoredTensor] = {}
    for stored in tensors.values():
        name = plain_name(stored.name)
        if name in plain:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is there more than once, with and without a prefix such as "
                f"'{LEADING_WRAPPERS[0]}': save the model again"
            )
        plain[name] = replace(stored, name=name)
    return plain


def _collect(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of every shard. A shard's name is checked before it is opened."""
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    # The single file wins over an index, as in transformers. A link to a missing file is an error of its own.
    if os.path.lexists(single):
        return _stored(single)
    if not index.exists():
        raise CheckpointError(
            f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there: "
            f"{_way_out(path, 'save the model as safetensors with save_pretrained')}"
        )
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: it has no weight_map from tensors to shards: fetch it again")
    tensors = _shard_tensors(index, weight_map)
    if missing := weight_map.keys() - tensors.keys():
        raise CheckpointError(f"{index}: tensor {shown(min(missing))} is in none of its shards: {OTHER_SAVE}")
    if unnamed := tensors.keys() - weight_map.keys():
        name = min(unnamed)
        raise CheckpointError(
            f"{index}: its weight_map leaves out tensor {shown(name)} of {tensors[name].file.name}: {OTHER_SAVE}"
        )
    return tensors


OTHER_SAVE = (
    "the index or a shard is left from another save: fetch the checkpoint again or save the model again, "
    "into an empty directory"
)


def _shard_tensors(index: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Read the header of every shard that an index names; no tensor may be in two shards."""
    tensors: dict[str, StoredTensor] = {}
    files = dict.fromkeys(weight_map.values())
    for file in files:
        if not file.endswith(".safetensors") or Path(file).name != file:
            raise CheckpointError(
                f"{index}: shard {shown(file)} is not a safetensors file of this directory: fetch the index again"
            )
    absent = [file for file in files if not os.path.lexists(index.with_name(file))]
    others = sorted({path.name for path in index.parent.glob("model*.safetensors")} - files.keys())
    if absent and others:
        raise CheckpointError(
            f"{index}: it names {shown(absent[0])}, which is not there, and not {shown(others[0])}, which is: "
            f"{OTHER_SAVE}"
        )
    for file in files:
        shard = index.with_name(file)
        found = _stored(shard)
        if twice := tensors.keys() & found.keys():
            raise CheckpointError(
                f"{shard}: tensor {shown(min(twice))} is in another shard too: save the model again"
            )
        tensors |= found
    return tensors


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from error
    document = parse_json(raw, str(path), constant_object)
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: it is not a JSON object: fetch the file again")
    return document


def _stored(file: Path) -> dict[str, StoredTensor]:
    if os.path.islink(file) and not os.path.exists(file):
        raise CheckpointError(
            f"{file}: a link to a file that is gone, as after a hub's cache was cleaned: fetch the checkpoint again"
        )
    fd = open_file(file, str(file))
    try:
        if os.pread(fd, len(LFS_POINTER), 0) == LFS_POINTER:
            raise CheckpointError(
                f"{file}: Git's pointer to the file and not the file: run `git lfs pull` in {file.parent}"
            )
        header = read_header(fd, str(file))
    except OSError as error:
        raise ArtifactError(f"{file}: {error.strerror}") from error
    finally:
        os.close(fd)
    for entry in header.tensors.values():
        if entry.dtype not in TORCH_DTYPE:
            raise CheckpointError(
                f"{file}: tensor {shown(entry.name)} is {entry.dtype}, which is not read: "
                "save the model in bfloat16, float16 or float32"
            )
    return {
        entry.name: StoredTensor(
            entry.name, entry.dtype, entry.shape, file, header.data_start + entry.start, entry.num_bytes
        )
        for entry in header.tensors.values()
    }


# Kinds of files that are no checkpoint to read, by patterns of names, and the way out of each; the first that matches
# a name counts.
FOREIGN: tuple[tuple[str, str, str], ...] = (
    (
        r"adapter_(config\.json|model\.(safetensors|bin))",
        "an adapter of peft",
        "it is a fine-tune: give `peraxis compress` the model that it was trained on as the base, and this as the "
        "fine-tune",
    ),
    (
        r"global_step\d+|zero_to_fp32\.py|zero_pp_rank_.*|mp_rank_.*|.*_optim_states\.pt|latest",
        "shards of DeepSpeed",
        "run its zero_to_fp32.py, and save the result with save_pretrained",
    ),
    (
        r"\.metadata|.*\.distcp|pytorch_model_fsdp.*|distributed_checkpoint",
        "a distributed checkpoint of torch (FSDP)",
        "merge it with `accelerate merge-weights`",
    ),
    (
        r"consolidated.*|params\.json",
        "weights in the form of the model's authors (consolidated)",
        "fetch the form of transformers, or convert it with transformers' script for this model",
    ),
    (
        r"(?!optimizer|scheduler|rng_state|scaler|training_args).*\.(bin|pt|pth|ckpt|pkl)",
        "weights as a pickle, which could run code and is not loaded",
        "load it once with transformers and save it with save_pretrained",
    ),
    (
        r".*\.gguf",
        "weights in llama.cpp's form (GGUF)",
        "fetch the checkpoint that it was converted from",
    ),
    (
        r".*\.(h5|msgpack|onnx|npz|nemo|tflite|mlmodel)|tf_model.*|flax_model.*",
        "weights of another framework",
        "fetch the form of transformers as safetensors",
    ),
    (
        r"model-\d+-of-\d+\.safetensors",
        "shards without their index",
        f"fetch {INDEX_FILE}",
    ),
    (
        r".*\.safetensors\.index(\..*)?\.json|.*\.safetensors",
        "safetensors files of other names",
        f"rename a whole model to {SINGLE_FILE}, or save it with save_pretrained",
    ),
    (r"checkpoint-\d+", "checkpoints of a training run", "give one of these directories"),
    (r".*\.incomplete|\.cache|.*\.lock|.*\.aria2|.*\.part", "an unfinished download", "fetch it again"),
)
MAX_LISTED = 3


def _way_out(path: Path, otherwise: str) -> str:
    """Return what a directory without a usable checkpoint holds, and the way out of it."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return f"it cannot be listed ({error.strerror}): {otherwise}"
    if not names:
        return f"it is empty: {otherwise}"
    kinds = list(_foreign_kinds(path, names))
    if not kinds:
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        return f"it holds {', '.join(map(shown, names[:MAX_LISTED]))}{more}: {otherwise}"
    return "it holds " + "; ".join(kinds[:MAX_LISTED])


def _foreign_kinds(path: Path, names: list[str]) -> Iterator[str]:
    """Yield each kind of `FOREIGN` that a directory holds, with one of its names, and directories of checkpoints."""
    first: dict[str, tuple[str, str]] = {}
    for name in names:
        for pattern, what, way_out in FOREIGN:
            if re.fullmatch(pattern, name):
                first.setdefault(what, (name, way_out))
                break
    for _, what, _ in FOREIGN:
        if what in first:
            name, way_out = first[what]
            yield f"{what} ({shown(name)}{_trained_on(path) if name == 'adapter_config.json' else ''}): {way_out}"
    for name in names:
        if (path / name / "config.json").is_file() and not re.fullmatch(r"checkpoint-\d+", name):
            yield f"a checkpoint in {shown(name)}: give that directory"
            return


def _trained_on(adapter: Path) -> str:
    """Return the model that an adapter's configuration says it was trained on, for messages."""
    try:
        named = _read_object(adapter / "adapter_config.json").get("base_model_name_or_path")
    except (ArtifactError, CheckpointError):
        return ""
    return f", trained on {shown(named)}" if isinstance(named, str) and named else ""
