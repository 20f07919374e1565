"""The forms in which people have one wrapper: names of several versions of transformers, and its text model alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltastore.checkpoint import Checkpoint
from tests.helpers.tiny_models import load_whole

SINGLE = "model.safetensors"


def as_saved(source: Path, out: Path) -> Path:
    """Copy the form that `save_pretrained` writes."""
    shutil.copytree(source, out)
    return out


def with_parameters_names(source: Path, out: Path) -> Path:
    """Copy a checkpoint with the names of the model's parameters, as trainers save state dicts."""
    shutil.copytree(source, out)
    model = load_whole(source)
    tied = set(model.all_tied_weights_keys)
    save({name: value for name, value in model.state_dict().items() if name not in tied}, out)
    return out


def with_a_prefix(source: Path, out: Path) -> Path:
    """Copy a checkpoint with the names that torch's DataParallel gives them."""
    with_parameters_names(source, out)
    save({f"module.{name}": value for name, value in load_file(out / SINGLE).items()}, out)
    return out


def text_alone(source: Path, out: Path) -> Path:
    """Write the text model of a wrapper as transformers would save it."""
    checkpoint = Checkpoint.open(source)
    assert checkpoint.wrapper is not None
    shutil.copytree(source, out)
    part = json.loads((source / "config.json").read_text())["text_config"]
    tie = {"tie_word_embeddings": checkpoint.tied}
    (out / "config.json").write_text(json.dumps({**part, **tie}))
    save({name: checkpoint.read(name) for name in checkpoint.tensors}, out)
    return out


def text_names(source: Path, out: Path) -> Path:
    """Write the text model of a wrapper beside the wrapper's configuration."""
    text_alone(source, out)
    shutil.copyfile(source / "config.json", out / "config.json")
    return out


FORMS = {form.__name__: form for form in (as_saved, with_parameters_names, with_a_prefix, text_alone)}


def save(tensors: Mapping[str, Tensor], out: Path) -> None:
    """Write tensors as the only file of a checkpoint."""
    save_file(
        {name: value.contiguous().clone() for name, value in tensors.items()}, out / SINGLE, {"format": "pt"}
    )


def change_stored(directory: Path, part: str, amount: float = 1.0) -> str:
    """Add to the first tensor with `part` in its name, and return the name."""
    tensors = load_file(directory / SINGLE)
    name = min(name for name in tensors if part in name and tensors[name].is_floating_point())
    tensors[name] = tensors[name] + torch.tensor(amount, dtype=tensors[name].dtype)
    save(tensors, directory)
    return name
