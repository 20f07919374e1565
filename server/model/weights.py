"""Read a base through transformers into memory of its own: each tensor once, hashed on the way.

Files are not mapped: replacing or truncating a shard under a running server has no effect, and the base's memory counts
as used. One copy of the weights exists at any time, plus the tensors that are being cast.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.console import byte_progress
from deltastore.errors import CheckpointError, failures_as
from deltastore.fingerprint import cached_fingerprints, fingerprints, shard_state
from deltastore.servable import model_class, read_config, refused_config, servable_model
from server.deltas.layers import check_tensors
from server.errors import Draining
from server.log import LogLines

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Reading:
    """One pass over a checkpoint."""

    checkpoint: Checkpoint
    digests: dict[str, str] | None  # SHA-256 by tensor name; None to hash nothing
    stopping: threading.Event
    count: Callable[[int], object]  # called with the bytes of each tensor
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, name: str) -> Tensor:
        """Read one tensor and hash its bytes. Raises Draining if the server is told to stop."""
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
    """A tensor that is read when it is indexed, like the slices of safetensors files that transformers takes."""

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
        device: the device of the weights.
        dtype: dtype of the weights.
        stopping: an event that ends loading before the next tensor when it is set.

    Raises:
        CheckpointError: a tensor is missing or cannot be read, or transformers does not know the configuration.
        NotServable: the model is not a causal language model, or has weights that no delta can reach.
        Draining: `stopping` was set.
    """
    # Before the weights take memory.
    check_tensors(servable_model(checkpoint.path), checkpoint)
    state = shard_state(checkpoint)
    known = cached_fingerprints(state)
    digests: dict[str, str] | None = None if known else {}
    total = sum(stored.num_bytes for stored in checkpoint.tensors.values())
    with byte_progress(total, f"reading {checkpoint.path.name}", enabled=True, file=LogLines(log)) as bar:
        model = _load(_Reading(checkpoint, digests, stopping, bar.update), device, dtype)
    if shard_state(checkpoint) != state:
        raise CheckpointError(f"{checkpoint.path}: a shard changed while it was read: start the server again")
    return model, Base.of(checkpoint, fingerprints=known or fingerprints(checkpoint, digests=digests))


def _load(reading: _Reading, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    disable_progress_bar()
    config = read_config(reading.checkpoint.path)
    # With accelerate each tensor goes to the device as it is read; without it the host holds all of them first.
    placement = {"device_map": {"": device}} if device.type == "cuda" and find_spec("accelerate") else {}
    tensors = {name: _StoredSlice(reading, name) for name in reading.checkpoint.tensors}
    with failures_as(partial(refused_config, reading.checkpoint.path)):
        model, info = model_class(config).from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True, **placement
        )
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{reading.checkpoint.path}: {missing[0]!r}, which its config.json asks for, is in none of its shards: "
            "fetch the checkpoint again, or the config.json that belongs to it"
        )
    # PreTrainedModel's overrides of these methods are not typed.
    nn.Module.to(model, device)
    nn.Module.train(model, False).requires_grad_(False)
    loaded: PreTrainedModel = model
    return loaded
