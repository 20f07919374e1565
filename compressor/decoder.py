"""One Hugging Face decoder run block by block: weights are read when a block is loaded and go when the caller drops it.

Knows modules, names and hidden states; nothing of deltas. The model's own code runs, cut open at its list of decoder
layers: the frame, everything outside the blocks, says what enters the first block, what each block is called with
beside hidden states, and what follows the last one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from compressor.weights import WeightMap, Weights
from deltastore.errors import CheckpointError

PROBE_TOKENS = 3

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer is called with beside hidden states


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """A linear layer of a block."""

    name: str  # of its weight, as the checkpoint calls it
    path: str  # in the block, for `get_submodule`


class Decoder:
    """A causal language model of which a caller holds as many blocks as it likes; the frame alone is always there.

    Everything is computed on `device` in `dtype`; hidden states in lists stay where the caller keeps them. Gradients
    flow through `run`, `finish` and `logits` where the caller lets them; weights do not ask for any.
    """

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        """Build the frame, without embedding and head.

        Raises:
            CheckpointError: the library builds no model with a list of decoder layers from it, or tensors do not fit.
        """
        self.weights, self.device, self.dtype = weights, device, dtype
        self._skeleton = _skeleton(weights, dtype)
        self._blocks = _layers_path(self._skeleton, weights.path)
        self._embedding = _path_of(self._skeleton, self._skeleton.get_input_embeddings())
        self._head = _path_of(self._skeleton, self._skeleton.get_output_embeddings())
        self._map = WeightMap.of(self._skeleton, weights)
        self._frame = _Frame(self._outside_blocks(without=[self._embedding, self._head]), self._blocks)
        # Of one shape alone, because masks can be large.
        self._calls_of: tuple[tuple[int, int], list[Call]] | None = None

    @property
    def config(self) -> Any:
        """The library's configuration of this model, not to be changed or given to another model."""
        return self._skeleton.config

    @property
    def num_blocks(self) -> int:
        return len(_layers(self._skeleton, self._blocks))

    @property
    def num_embeddings(self) -> int:
        """Rows of the input embedding: ids below it are valid."""
        return int(self._skeleton.get_input_embeddings().weight.shape[0])

    @property
    def embedding_name(self) -> str | None:
        """The input embedding's tensor as the checkpoint calls it."""
        return self._map.stored_name(f"{self._embedding}.weight")

    @property
    def head_name(self) -> str | None:
        """The head's tensor as the checkpoint calls it; the embedding's where they are tied."""
        return self._map.stored_name(f"{self._head}.weight")

    @torch.no_grad()
    def embed(self, batches: Sequence[Tensor], keep: torch.dtype | None = None) -> list[Tensor]:
        """What enters the first block, for batches of ids ``[sequences, tokens]``. Holds the embedding meanwhile.

        Args:
            keep: the dtype of what is returned, and so of what `advance` makes of it; None is the model's.

        Returns:
            ``[sequences, tokens, hidden]`` for each batch, on the CPU.

        Raises:
            CheckpointError: a model whose blocks read more of the ids than hidden states.
        """
        hiddens = []
        with self._filled(self._frame.model.get_input_embeddings(), self._embedding):
            for number, ids in enumerate(batches):
                entry, calls = self._frame.enter(input_ids=ids.to(self.device))
                if number == 0 and not _same(calls, self._calls(entry)):
                    raise self._refusal("read more than hidden states")
                hiddens.append(entry.to("cpu", keep or self.dtype))
        return hiddens

    def load_block(self, index: int) -> nn.Module:
        """A block in memory of its own, which goes when the caller lets go of it.

        Raises:
            CheckpointError: a tensor is missing or has another shape than the configuration says.
        """
        block = copy.deepcopy(_layers(self._skeleton, self._blocks)[index])
        self._map.fill(block, f"{self._blocks}.{index}", self._like())
        return block

    def block_bytes(self, index: int) -> int:
        """What the parameters of a block take in memory."""
        block = _layers(self._skeleton, self._blocks)[index]
        return sum(parameter.numel() * self.dtype.itemsize for parameter in block.parameters())

    def run(self, block: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """What leaves block `index` for one batch ``[sequences, tokens, hidden]``."""
        hidden = hidden.to(self.device, self.dtype)
        args, kwargs = self._calls(hidden)[index]
        output = block(hidden, *args, **kwargs)
        if not isinstance(output, Tensor):
            raise self._refusal("give more than hidden states")
        return output

    @torch.no_grad()
    def advance(self, block: nn.Module, index: int, hiddens: list[Tensor]) -> None:
        """Run every batch through a block, in place; each stays where it was, in its own dtype."""
        for number, hidden in enumerate(hiddens):
            hiddens[number] = self.run(block, index, hidden).to(hidden.device, hidden.dtype)

    def finish(self, hidden: Tensor) -> Tensor:
        """From what leaves the last block to the last hidden states, which the head reads."""
        return self._frame.finish(hidden.to(self.device, self.dtype))

    @torch.no_grad()
    def finish_all(self, hiddens: list[Tensor]) -> None:
        """`finish` of every batch, in place, as `advance` does."""
        for number, hidden in enumerate(hiddens):
            hiddens[number] = self.finish(hidden).to(hidden.device, hidden.dtype)

    def load_head(self) -> nn.Linear:
        """The output head, in memory of its own like a block. It reads the last hidden states."""
        head = copy.deepcopy(self._skeleton.get_output_embeddings())
        assert isinstance(head, nn.Linear)
        self._map.fill(head, self._head, self._like())
        return head

    def logits(self, head: nn.Module, last_hidden: Tensor) -> Tensor:
        """Logits ``[sequences, tokens, vocabulary]``, with what the model does to them after its head."""
        return self._frame.logits(head, last_hidden.to(self.device, self.dtype))

    @torch.no_grad()
    def linears(self, block: nn.Module, index: int) -> list[list[BlockLinear]]:
        """The block's linear layers in groups that read the same input, in the order in which the forward reaches them.

        Left out is what has no moments of its own: weights that the checkpoint stores otherwise (experts that the
        library fuses), and layers that a forward does not call exactly once with every token.
        """
        paths: dict[nn.Module, str] = {
            module: path for path, module in block.named_modules() if isinstance(module, nn.Linear)
        }
        shape = (1, PROBE_TOKENS, self.config.get_text_config().hidden_size)
        seen = _Seen()
        hooks = [module.register_forward_pre_hook(seen) for module in paths]
        try:
            self.run(block, index, torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        finally:
            for hook in hooks:
                hook.remove()
        groups: dict[tuple[Any, Any], list[BlockLinear]] = {}
        for module, inputs in seen.inputs.items():
            name = self._map.stored_name(f"{self._blocks}.{index}.{paths[module]}.weight")
            if len(inputs) == 1 and inputs[0].shape[:-1].numel() == PROBE_TOKENS and name is not None:
                place = inputs[0].untyped_storage().data_ptr(), inputs[0].storage_offset()
                groups.setdefault(place, []).append(BlockLinear(name, paths[module]))
        return list(groups.values())

    @torch.no_grad()
    def input_of(self, block: nn.Module, index: int, path: str, hidden: Tensor) -> Tensor:
        """What one of the block's linear layers reads for one batch, ``[tokens, in]``; the forward stops there."""
        hook = block.get_submodule(path).register_forward_pre_hook(_stop)
        try:
            self.run(block, index, hidden)
        except _Reached as reached:
            return reached.inputs.flatten(0, -2)
        finally:
            hook.remove()
        raise AssertionError(f"block {index} never calls {path}")

    def streamed(self, num_resident: int) -> Any:
        """The whole model as the library has it, KV cache and all, whose blocks are read when they are called.

        Args:
            num_resident: how many of them, from the first on, then stay in memory.
        """
        model = self._outside_blocks()
        resident: dict[int, nn.Module] = {}
        for index, layer in enumerate(_layers(model, self._blocks)):
            layer.forward = self._streamer(index, resident, keep=index < num_resident)
        return model

    def _streamer(self, index: int, resident: dict[int, nn.Module], keep: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            block = resident.get(index) or self.load_block(index)
            if keep:
                resident[index] = block
            return block(*args, **kwargs)

        return forward

    def _outside_blocks(self, without: Sequence[str] = ()) -> Any:
        """A copy of the skeleton with everything outside the blocks loaded."""
        model = copy.deepcopy(self._skeleton)
        self._map.fill(model, "", self._like(), without=[self._blocks, *without])
        return model

    def _calls(self, hidden: Tensor) -> list[Call]:
        """What each block is called with beside hidden states of this shape: positions and masks."""
        shape = (hidden.shape[0], hidden.shape[1])
        if self._calls_of is None or self._calls_of[0] != shape:
            with torch.no_grad():
                self._calls_of = shape, self._frame.enter(inputs_embeds=torch.zeros_like(hidden))[1]
        return self._calls_of[1]

    @contextmanager
    def _filled(self, module: nn.Module, path: str) -> Iterator[None]:
        """A module of the frame with its weights, which go when the block ends."""
        empty = dict(module.named_parameters(recurse=False))
        self._map.fill(module, path, self._like())
        try:
            yield
        finally:
            for name, parameter in empty.items():
                module.register_parameter(name, parameter)

    def _like(self) -> Tensor:
        return torch.empty(0, device=self.device, dtype=self.dtype)

    def _refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.weights.path}: the layers of model type {self.config.model_type!r} {reason}, "
            "so it cannot be run block by block: use --calibration none"
        )


class _Frame:
    """A model whose layers pass hidden states on and note what else they were given."""

    def __init__(self, model: Any, blocks: str) -> None:
        self.model = model
        self._body = model.get_submodule(blocks.rpartition(".")[0])  # the module that calls the layers
        self._calls: list[Call] = []
        self._entry: Tensor | None = None
        self._exit: Tensor | None = None  # what the last layer gives instead
        layers = _layers(model, blocks)
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
        try:
            logits: Tensor = self.model(inputs_embeds=last_hidden, use_cache=False).logits
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


@dataclass(slots=True, eq=False)
class _Seen:
    """A hook that keeps the inputs of modules, in the order of the first call of each."""

    inputs: dict[nn.Module, list[Tensor]] = field(default_factory=dict)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.inputs.setdefault(module, []).append(args[0])


class _Reached(Exception):
    """Ends a block's forward at the layer whose input was asked for."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs


def _stop(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise _Reached(args[0])


def _skeleton(weights: Weights, dtype: torch.dtype) -> Any:
    """The model with its parameters on the meta device and its buffers as its own code computes them."""
    settings = json.loads(json.dumps(weights.config))  # a copy, because the library changes what it is given
    hook = nn.modules.module.register_module_parameter_registration_hook(_to_meta)
    try:
        config = AutoConfig.for_model(**settings)
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{weights.path}: the library builds no model from it: {reason}") from error
    finally:
        hook.remove()
    return model.eval().requires_grad_(False)


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
    return None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def _layers_path(model: Any, path: Path) -> str:
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return str(name)
    raise CheckpointError(
        f"{path}: model type {model.config.model_type!r} has no list of decoder layers: use --calibration none"
    )


def _layers(model: Any, path: str) -> nn.ModuleList:
    layers: nn.ModuleList = model.get_submodule(path)
    return layers


def _path_of(model: Any, module: nn.Module) -> str:
    return next(str(path) for path, found in model.named_modules() if found is module)


def _same(one: Any, other: Any) -> bool:
    """Whether nested arguments are equal, tensors by value."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one is other or bool(one == other)
