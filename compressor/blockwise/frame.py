"""Run what surrounds the blocks (decoder layers) of a transformers model, and build the model without weights."""

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

Call = tuple[tuple[Any, ...], dict[str, Any]]  # a block's arguments without hidden states


class Frame:
    """A model whose blocks pass hidden states through and record their other arguments."""

    def __init__(self, model: Any, path: str) -> None:
        self.model = model
        # The module that calls the blocks.
        self._body = model.get_submodule(path.rpartition(".")[0])
        self._calls: list[Call] = []
        self._entry: Tensor | None = None
        # Returned by the last block in place of its input.
        self._exit: Tensor | None = None
        blocks = blocks_of(model, path)
        for block in blocks:
            # On the object, because the model's code reads attributes of its blocks.
            block.forward = self._recording_forward(is_last=block is blocks[-1])

    def enter(self, **inputs: Tensor) -> tuple[Tensor, list[Call]]:
        """Return the first block's hidden states and the other arguments of each block."""
        self._calls, self._entry = [], None
        self._body(**inputs, use_cache=False)
        entry, calls, self._entry, self._calls = self._entry, self._calls, None, []
        assert entry is not None
        return entry, calls

    def finish(self, hidden: Tensor) -> Tensor:
        """Return the last hidden states from the last block's output."""
        self._exit = hidden
        try:
            last: Tensor = self._body(inputs_embeds=hidden, use_cache=False).last_hidden_state
        finally:
            self._exit, self._entry, self._calls = None, None, []
        return last

    def logits(self, head: nn.Module, last_hidden: Tensor) -> Tensor:
        """Return the model's logits with `head` for its output head."""

        def replace(module: nn.Module, args: Any, output: Any) -> None:
            output.last_hidden_state = last_hidden

        hook = self._body.register_forward_hook(replace)
        empty = self.model.get_output_embeddings()
        self.model.set_output_embeddings(head)
        # One token is enough, because its output is replaced; there may be more rows than positions.
        stand_in = torch.zeros_like(last_hidden[:1, :1])
        try:
            logits: Tensor = self.model(inputs_embeds=stand_in, use_cache=False).logits
        finally:
            self.model.set_output_embeddings(empty)
            hook.remove()
            self._entry, self._calls = None, []
        return logits

    def _recording_forward(self, is_last: bool) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            hidden: Tensor = args[0] if args else kwargs.pop("hidden_states")
            if self._entry is None:
                self._entry = hidden
            self._calls.append((args[1:], kwargs))
            return self._exit if is_last and self._exit is not None else hidden

        return forward


def skeleton_of(weights: Weights, dtype: torch.dtype) -> Any:
    """Return the model with parameters on the meta device and buffers as its own code computes them.

    Raises:
        CheckpointError: transformers builds no model from the configuration.
    """
    # A copy, because transformers changes its argument.
    settings = json.loads(json.dumps(weights.config))
    hook = nn.modules.module.register_module_parameter_registration_hook(_to_meta)
    try:
        config = AutoConfig.for_model(**settings)
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype)
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{weights.path}: transformers builds no model from it: {reason}") from error
    finally:
        hook.remove()
    return model.eval().requires_grad_(False)


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
    return None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def blocks_path(model: Any, path: Path) -> str:
    """Return the path of the list of decoder layers in a model.

    Raises:
        CheckpointError: there is no such list.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return str(name)
    raise CheckpointError(
        f"{path}: model type {model.config.model_type!r} has no list of decoder layers: use --calibration none"
    )


def blocks_of(model: Any, path: str) -> nn.ModuleList:
    blocks: nn.ModuleList = model.get_submodule(path)
    return blocks


def path_of(model: Any, module: nn.Module) -> str:
    return next(str(path) for path, found in model.named_modules() if found is module)
