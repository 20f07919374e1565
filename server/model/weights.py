"""Read a base through transformers into memory of its own: each tensor once, and hashed on the way.

Nothing is mapped: a shard that is replaced or truncated under a running server changes nothing, and memory that the
base takes is counted as taken. One copy of the weights exists at any time, plus the tensors that are being cast.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel
from transformers.utils import logging

from deltastore.base import Base
from deltastore.checkpoint import TORCH_DTYPE, Checkpoint
from deltastore.errors import CheckpointError, shown
from deltastore.fingerprint import fingerprint, remembered, shard_state
from deltastore.memory import is_out_of_memory
from deltastore.progress import byte_progress
from server.errors import Draining, NotServable


@dataclass(slots=True, eq=False)
class _Reading:
    """One pass over a checkpoint."""

    checkpoint: Checkpoint
    digests: dict[str, str] | None  # SHA-256 by name; None where nothing is to be hashed
    stopping: threading.Event
    count: Callable[[int], object]  # told the bytes of each tensor
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, name: str) -> Tensor:
        if self.stopping.is_set():
            raise Draining("the server was told to stop while its base was loading")
        tensor = self.checkpoint.read(name)
        if self.digests is not None:
            stored = tensor.view(-1).view(torch.uint8).numpy()
            self.digests[name] = hashlib.sha256(stored.data).hexdigest()
        with self._lock:
            self.count(tensor.nbytes)
        return tensor


@dataclass(frozen=True, slots=True)
class _StoredSlice:
    """A tensor that is read when it is indexed, which is how transformers takes slices of safetensors files."""

    reading: _Reading
    name: str

    def __getitem__(self, _: Any) -> Tensor:
        return self.reading.read(self.name)


def read_base(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, stopping: threading.Event
) -> tuple[PreTrainedModel, Base]:
    """Load a base in evaluation mode.

    Args:
        checkpoint: the base.
        device: where the weights shall be.
        dtype: of the weights.
        stopping: when set, loading ends before the next tensor.

    Raises:
        CheckpointError: a tensor is missing or cannot be read, or transformers does not know the configuration.
        NotServable: no causal language model.
        Draining: `stopping` was set.
    """
    config = _config(checkpoint.path)
    state = shard_state(checkpoint)
    known = remembered(state)
    digests: dict[str, str] | None = None if known else {}
    total = sum(stored.num_bytes for stored in checkpoint.tensors.values())
    with byte_progress(total, f"reading {checkpoint.path.name}", enabled=True) as bar:
        model = _load(config, _Reading(checkpoint, digests, stopping, bar.update), device, dtype)
    if shard_state(checkpoint) != state:
        raise CheckpointError(f"{checkpoint.path}: a shard changed while it was read: start the server again")
    return model, Base.of(checkpoint, fingerprint=known or fingerprint(checkpoint, digests=digests))


def _config(base_dir: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(base_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{base_dir}: transformers cannot use its config.json: {reason}") from error


def _load(config: Any, reading: _Reading, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotServable(f"model type {config.model_type!r} is no causal language model of transformers")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # With accelerate each tensor goes to the device as it is read; without it the host holds all of them first.
    places = {"device_map": {"": device}} if device.type == "cuda" and find_spec("accelerate") else {}
    path, tensors = reading.checkpoint.path, reading.checkpoint.tensors
    try:
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict={name: _StoredSlice(reading, name) for name in tensors},
            dtype=dtype,
            output_loading_info=True,
            **places,
        )
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path}: its tensors are not those that its config.json describes: {reason}"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{path}: parameter {shown(missing[0])} (and {len(missing) - 1} more) is in none of its shards: "
            "fetch the checkpoint again"
        )
    # The method of transformers has lost its signature.
    nn.Module.to(model, device)
    nn.Module.train(model, False).requires_grad_(False)
    loaded: PreTrainedModel = model
    return loaded


def own_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of a checkpoint's weights: the one that config.json names, or that of most weights."""
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    dtype = getattr(torch, str(named).removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    sizes: dict[torch.dtype, int] = {}
    for stored in checkpoint.tensors.values():
        kind = TORCH_DTYPE[stored.dtype]
        if kind.is_floating_point:
            sizes[kind] = sizes.get(kind, 0) + stored.num_bytes
    if not sizes:
        raise CheckpointError(f"{checkpoint.path}: none of its tensors holds floats")
    return max(sizes, key=lambda kind: sizes[kind])
