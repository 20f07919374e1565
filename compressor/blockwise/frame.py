"""A model of the library cut open at its list of decoder layers: the skeleton without weights, and what is around it.

Knows the library's modules; nothing of checkpoints' tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from compressor.blockwise.weights import Weights
from deltastore.errors import CheckpointError

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer is called with beside hidden states


class Frame:
    """A model whose layers pass hidden states on and note what else they were given."""

    def __init__(self, model: Any, blocks: str) -> None:
        self.model = model
        self._body = model.get_submodule(blocks.rpartition(".")[0])  # the module that calls the layers
        self._calls: list[Call] = []
        self._entry: Tensor | None = None
        self._exit: Tensor | None = None  # what the last layer gives instead
        layers = layers_of(model, blocks)
        for layer in layers:
            # On the object, because the model's code reads attributes of its layers.
            layer.forward = self._looker_on(is_last=layer is layers[-1])

    def enter(self, **inputs: Tensor) -> tuple[Tensor, list[Call]]:
        """What the first layer is given, and what each is called with beside it."""
        self._calls, self._entry = [], None
        self._body(**inputs, use_cache=False)
        entry, calls, self._entry, self._calls = self._entry, self._calls, None, []
        assert entry is not None
        return entry, calls

    def finish(self, hidden: Tensor) -> Tensor:
        self._exit = hidden
        try:
            last: Tensor = self._body(inputs_embeds=hidden, use_cache=False).last_hidden_state
        finally:
            self._exit, self._entry, self._calls = None, None, []
        return last

    def logits(self, head: nn.Module, last_hidden: Tensor) -> Tensor:
        def replace(module: nn.Module, args: Any, output: Any) -> None:
            output.last_hidden_state = last_hidden

        hook = self._body.register_forward_hook(replace)
        empty = self.model.get_output_embeddings()
        self.model.set_output_embeddings(head)
        # One token's body, because its output is replaced, and rows may be more than a model has positions.
        stand_in = torch.zeros_like(last_hidden[:1, :1])
        try:
            logits: Tensor = self.model(inputs_embeds=stand_in, use_cache=False).logits
        finally:
            self.model.set_output_embeddings(empty)
            hook.remove()
            self._entry, self._calls = None, []
        return logits

    def _looker_on(self, is_last: bool) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            hidden: Tensor = args[0] if args else kwargs.pop("hidden_states")
            if self._entry is None:
                self._entry = hidden
            self._calls.append((args[1:], kwargs))
            return self._exit if is_last and self._exit is not None else hidden

        return forward


def skeleton_of(weights: Weights, dtype: torch.dtype) -> Any:
    """The model with its parameters on the meta device and its buffers as its own code computes them."""
    settings = json.loads(json.dumps(weights.config))  # a copy, because the library changes what it is given
    hook = nn.modules.module.register_module_parameter_registration_hook(_to_meta)
    try:
        config = AutoConfig.for_model(**settings)
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype)
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{weights.path}: the library builds no model from it: {reason}") from error
    finally:
        hook.remove()
    return model.eval().requires_grad_(False)


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
    return None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def layers_path(model: Any, path: Path) -> str:
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return str(name)
    raise CheckpointError(
        f"{path}: model type {model.config.model_type!r} has no list of decoder layers: use --calibration none"
    )


def layers_of(model: Any, path: str) -> nn.ModuleList:
    layers: nn.ModuleList = model.get_submodule(path)
    return layers


def path_of(model: Any, module: nn.Module) -> str:
    return next(str(path) for path, found in model.named_modules() if found is module)
