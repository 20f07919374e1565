"""Decide from a configuration, without weights, whether a model can run with deltas at every layer, and in which dtype.

The server asks before it reads a base, and the demo before it downloads one.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel
from transformers.activations import XIELUActivation

from deltastore.checkpoint import TORCH_DTYPE, Checkpoint
from deltastore.errors import CheckpointError, NotServable, failures_as
from deltastore.wrappers import text_config

# How a delta acts on a module's own parameters. Those of norms and activations are vectors of one token's features.
ModuleKind = Literal["linear", "embedding", "norm", "activation"]
SERVED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def servable_model(directory: Path) -> PreTrainedModel:
    """Return the model that a directory's `config.json` describes, its parameters on the meta device.

    Raises:
        CheckpointError: transformers does not know the configuration.
        NotServable: the model is quantised, is not a causal language model, or has weights that no delta can reach.
    """
    config = read_config(directory)
    with failures_as(partial(refused_config, directory)), torch.device("meta"):
        # Copied, because a model keeps and changes the configuration that it is given.
        model: PreTrainedModel = model_class(config)(copy.deepcopy(config))
    check_modules(model, model.named_modules())
    return model


def read_config(directory: Path) -> Any:
    """Return the transformers configuration of a causal language model that is not quantised.

    That of a wrapper, which also reads images or sound, is its text model's.

    Raises:
        CheckpointError, NotServable: as `servable_model`.
    """
    with failures_as(partial(refused_config, directory)):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise NotServable(f"{directory}: it is quantised: serve the base in bfloat16, float16 or float32")
    config = text_config(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotServable(f"model type {config.model_type!r} is no causal language model of transformers")
    if config.model_type.endswith("_assistant"):
        raise NotServable(
            f"model type {config.model_type!r}: it drafts tokens from the hidden states of another model (speculative "
            "decoding), and computes none alone: serve that model"
        )
    with failures_as(
        lambda _: NotServable(
            f"model type {config.model_type!r}: it is made of several text models, and transformers makes no causal "
            "language model of them"
        )
    ):
        text = config.get_text_config()
    if text is not config:
        raise NotServable(
            f"model type {config.model_type!r}: it wraps a text model ({text.model_type}) beside towers for images or "
            "audio, which is not served: save the text model alone with save_pretrained and serve that"
        )
    return config


def model_class(config: Any) -> Any:
    """Return the class of the model that a configuration describes."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


def refused_config(directory: Path, reason: str) -> CheckpointError:
    """Return the error for a configuration that transformers refused."""
    return CheckpointError(f"{directory}: transformers cannot use its config.json ({reason}): fetch it again")


def own_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype to serve a checkpoint in: the one that config.json names, else that of most of its bytes.

    Dtypes that cannot be served, such as float64, become float32.

    Raises:
        CheckpointError: none of its tensors holds floats.
    """
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    for dtype in SERVED_DTYPES:
        if str(dtype) == f"torch.{str(named).removeprefix('torch.')}":
            return dtype
    sizes = Counter[torch.dtype]()
    for stored in checkpoint.tensors.values():
        kind = TORCH_DTYPE[stored.dtype]
        if kind.is_floating_point:
            sizes[kind if kind in SERVED_DTYPES else torch.float32] += stored.num_bytes
    if not sizes:
        raise CheckpointError(f"{checkpoint.path}: none of its tensors holds floats")
    return sizes.most_common(1)[0][0]


def kind(model: PreTrainedModel) -> str:
    """Return the name of a model in messages."""
    return f"model type {model.config.model_type!r}"


def module_kind(module: nn.Module) -> ModuleKind | None:
    """Return how a delta acts on a module's own parameters; None if no way is known, or it has none.

    A module that is not known is refused: a delta of its parameters would be stored and read by no layer.
    """
    own, forward = dict(module.named_parameters(recurse=False)), type(module).forward
    if isinstance(module, nn.Linear):
        return "linear" if forward is nn.Linear.forward else None
    if isinstance(module, nn.Embedding):
        # It returns its rows, at most scaled. Learned position embeddings compute more.
        is_lookup = forward is nn.Embedding.forward or hasattr(module, "embed_scale")
        return "embedding" if is_lookup else None
    if isinstance(module, nn.LayerNorm):
        return "norm" if forward is nn.LayerNorm.forward else None
    if not own or any(value.dim() != 1 for value in own.values()):
        return None
    if type(module).__name__.endswith("Norm") and own.keys() <= {"weight", "bias"}:
        return "norm"
    return "activation" if isinstance(module, XIELUActivation) else None


def no_head(model: PreTrainedModel) -> NotServable:
    """Return the error for a model whose output is not computed from a token embedding by one linear layer."""
    return NotServable(f"{kind(model)}: it has no linear output head over a token embedding")


def check_modules(model: PreTrainedModel, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Check that a delta can act on a model's head, its embedding and these of its modules.

    Raises:
        NotServable: the message names modules.
    """
    head: Any = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(model.get_input_embeddings(), nn.Embedding):
        raise no_head(model)
    unknown = [
        (name, type(module).__name__)
        for name, module in modules
        if any(True for _ in module.parameters(recurse=False)) and module_kind(module) is None
    ]
    if unknown:
        # The first one of each class, because a model repeats its layers.
        first = {class_name: name for name, class_name in reversed(unknown)}
        listed = [f"{name} ({class_name})" for class_name, name in reversed(first.items())]
        raise NotServable(
            f"{kind(model)}: {len(unknown)} modules with weights are neither linear, embedding, norm nor a known "
            f"activation: {', '.join(listed[:3])}; such models can be compressed and merged, not served"
        )
