"""Run a Hugging Face decoder block by block; a block's weights are in memory from `load_block` until they are dropped.

The model's own code runs. The frame, which is everything outside the blocks, gives the first block's input, the other
arguments of each block, and what follows the last block.

A block is one decoder layer. The model is built without weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from compressor.decoder.weights import WeightMap, Weights
from deltastore.architecture import make_buildable, parse_config
from deltastore.errors import CheckpointError, failures_as, shown
from deltastore.wrappers import WRAPPERS

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
    hook = nn.modules.module.register_module_parameter_registration_hook(_to_meta)
    try:
        with failures_as(
            lambda reason: CheckpointError(f"{weights.path}: transformers builds no model from it: {reason}")
        ):
            config = parse_config(weights.config)
            make_buildable(config, None)
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype)
    finally:
        hook.remove()
    return model.eval().requires_grad_(False)


def whole_model(directory: Path, dtype: torch.dtype | Literal["auto"]) -> Any:
    """Load a checkpoint's model whole through transformers, which makes up each parameter that it does not find.

    A wrapper is loaded with its towers, because adapters and evaluations use transformers' own names.

    Raises:
        CheckpointError: transformers cannot load it, or finds none of its tensors for a parameter.
    """
    with failures_as(lambda reason: CheckpointError(f"{directory}: transformers cannot load it: {reason}")):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        loader: Any = AutoModelForImageTextToText if config.model_type in WRAPPERS else AutoModelForCausalLM
        loaded: Any = loader.from_pretrained(
            directory, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
        model, info = loaded
    if lacking := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{directory}: transformers finds no tensor for {shown(lacking[0])} and {len(lacking) - 1} others: "
            "save the model again with save_pretrained, without a prefix before the names of its tensors"
        )
    return model


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
        f"{path}: model type {model.config.model_type!r} has no list of decoder layers: give `text='none'`"
    )


def blocks_of(model: Any, path: str) -> nn.ModuleList:
    blocks: nn.ModuleList = model.get_submodule(path)
    return blocks


def path_of(model: Any, module: nn.Module) -> str:
    return next(str(path) for path, found in model.named_modules() if found is module)


PROBE_TOKENS = 3


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """A linear layer of a block."""

    name: str  # of its weight in the checkpoint
    path: str  # of the module in the block


class Decoder:
    """A causal language model of which only the frame stays in memory; the caller loads and drops blocks.

    Everything is computed on `device` in `dtype`; hidden states in lists stay on the caller's device. Gradients flow
    through `run`, `finish` and `logits`; weights require none.
    """

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        """Build the frame, without embedding and head.

        Raises:
            CheckpointError: transformers builds no model with a list of decoder layers from it, or tensors do not fit.
        """
        self.weights, self.device, self.dtype = weights, device, dtype
        self._skeleton = skeleton_of(weights, dtype)
        self._blocks = blocks_path(self._skeleton, weights.path)
        with self._failures():
            self._embedding = path_of(self._skeleton, self._skeleton.get_input_embeddings())
            self._head = path_of(self._skeleton, self._skeleton.get_output_embeddings())
            self._map = WeightMap.of(self._skeleton, weights)
            self._frame = Frame(self._outside_blocks(without=[self._embedding, self._head]), self._blocks)
        # Cached for one shape, because masks can be large.
        self._calls_of: tuple[tuple[int, int], list[Call]] | None = None

    @property
    def config(self) -> Any:
        """The transformers configuration of this model; do not change it or give it to another model."""
        return self._skeleton.config

    @property
    def num_blocks(self) -> int:
        return len(blocks_of(self._skeleton, self._blocks))

    @property
    def num_embeddings(self) -> int:
        """Rows of the input embedding: ids below it are valid."""
        return int(self._skeleton.get_input_embeddings().weight.shape[0])

    @property
    def embedding_name(self) -> str | None:
        """The input embedding's name in the checkpoint."""
        return self._map.stored_name(f"{self._embedding}.weight")

    @property
    def head_name(self) -> str | None:
        """The head's name in the checkpoint; the embedding's if they are tied."""
        return self._map.stored_name(f"{self._head}.weight")

    @torch.no_grad()
    def embed(self, batches: Sequence[Tensor], keep: torch.dtype | None = None) -> list[Tensor]:
        """Return the first block's input for batches of ids ``[sequences, tokens]``; loads the embedding meanwhile.

        Args:
            keep: the dtype of the result, which `advance` keeps; None is the model's.

        Returns:
            ``[sequences, tokens, hidden]`` for each batch, on the CPU.

        Raises:
            CheckpointError: a model whose blocks read the ids beside hidden states.
        """
        hiddens = []
        with self._filled(self._frame.model.get_input_embeddings(), self._embedding):
            for number, ids in enumerate(batches):
                with self._failures():
                    entry, calls = self._frame.enter(input_ids=ids.to(self.device))
                if number == 0 and not _same(calls, self._calls(entry)):
                    raise self._refusal("read more than hidden states")
                hiddens.append(entry.to("cpu", keep or self.dtype))
        return hiddens

    def enter(self, rows: Tensor, row_index: Tensor) -> Tensor:
        """Return the first block's input from some rows ``[used, hidden]`` of the embedding; differentiable.

        Args:
            row_index: ``[sequences, tokens]`` int64: the row of each token.
        """
        embedding = copy.deepcopy(self._skeleton.get_input_embeddings())
        # An id, while this embedding is indexed by row.
        embedding.padding_idx = None
        embedded = torch.func.functional_call(embedding, {"weight": rows}, (row_index,))
        return self._frame.enter(inputs_embeds=embedded)[0]

    def load_block(self, index: int) -> nn.Module:
        """Load a block; the decoder keeps no reference to it.

        Raises:
            CheckpointError: a tensor is missing or has another shape than the configuration says.
        """
        block = copy.deepcopy(blocks_of(self._skeleton, self._blocks)[index])
        self._map.fill(block, f"{self._blocks}.{index}", self._like())
        return block

    def block_bytes(self, index: int) -> int:
        """Return the bytes of a block's parameters in memory."""
        block = blocks_of(self._skeleton, self._blocks)[index]
        return sum(parameter.numel() * self.dtype.itemsize for parameter in block.parameters())

    def run(self, block: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """Return the output of block `index` for one batch ``[sequences, tokens, hidden]``."""
        hidden = hidden.to(self.device, self.dtype)
        with self._failures():
            args, kwargs = self._calls(hidden)[index]
            output = block(hidden, *args, **kwargs)
        if not isinstance(output, Tensor):
            raise self._refusal("give more than hidden states")
        return output

    @torch.no_grad()
    def advance(self, block: nn.Module, index: int, hiddens: list[Tensor]) -> None:
        """Run every batch through a block, in place; each keeps its device and dtype."""
        for number, hidden in enumerate(hiddens):
            hiddens[number] = self.run(block, index, hidden).to(hidden.device, hidden.dtype)

    def finish(self, hidden: Tensor) -> Tensor:
        """Return the last hidden states, which the head reads, from the last block's output."""
        with self._failures():
            return self._frame.finish(hidden.to(self.device, self.dtype))

    @torch.no_grad()
    def finish_all(self, hiddens: list[Tensor]) -> None:
        """`finish` of every batch, in place, as `advance` does."""
        for number, hidden in enumerate(hiddens):
            hiddens[number] = self.finish(hidden).to(hidden.device, hidden.dtype)

    def load_head(self) -> nn.Linear:
        """Load the output head; the decoder keeps no reference to it."""
        head = copy.deepcopy(self._skeleton.get_output_embeddings())
        assert isinstance(head, nn.Linear)
        self._map.fill(head, self._head, self._like())
        return head

    def logits(self, head: nn.Module, last_hidden: Tensor) -> Tensor:
        """Return logits ``[sequences, tokens, vocabulary]``, with what the model does to them after its head."""
        with self._failures():
            return self._frame.logits(head, last_hidden.to(self.device, self.dtype))

    @torch.no_grad()
    def linears(self, block: nn.Module, index: int) -> list[list[BlockLinear]]:
        """Return the block's linear layers in groups that read the same input, in the order of the forward.

        Leaves out layers without moments of their own: those that the checkpoint stores in another form (experts that
        transformers fuses), and those that a forward does not call exactly once with every token.
        """
        paths: dict[nn.Module, str] = {
            module: path for path, module in block.named_modules() if isinstance(module, nn.Linear)
        }
        shape = (1, PROBE_TOKENS, self.config.get_text_config().hidden_size)
        seen = _InputRecorder()
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
                address = inputs[0].untyped_storage().data_ptr(), inputs[0].storage_offset()
                groups.setdefault(address, []).append(BlockLinear(name, paths[module]))
        return list(groups.values())

    @torch.no_grad()
    def input_of(self, block: nn.Module, index: int, path: str, hidden: Tensor) -> Tensor:
        """Return the input ``[tokens, in]`` of one linear layer of the block for one batch; the forward stops there."""
        hook = block.get_submodule(path).register_forward_pre_hook(_stop)
        try:
            self.run(block, index, hidden)
        except _Reached as reached:
            return reached.inputs.flatten(0, -2)
        finally:
            hook.remove()
        raise RuntimeError(f"block {index} never calls {path}")

    @torch.no_grad()
    def advance_and_record(
        self, block: nn.Module, index: int, paths: Sequence[str], hiddens: list[Tensor]
    ) -> dict[str, list[Tensor]]:
        """`advance`, and return the inputs ``[tokens, in]`` of the linear layers at `paths`, per batch, on the CPU."""
        seen: dict[str, list[Tensor]] = {path: [] for path in paths}
        hooks = [
            block.get_submodule(path).register_forward_pre_hook(
                lambda _, args, kept=kept: kept.append(args[0].flatten(0, -2).cpu())
            )
            for path, kept in seen.items()
        ]
        try:
            self.advance(block, index, hiddens)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def streaming_model(self, num_resident: int) -> Any:
        """Return the whole transformers model, which reads each block when it is called.

        Args:
            num_resident: how many blocks, from the first on, stay in memory afterwards.
        """
        model = self._outside_blocks()
        resident: dict[int, nn.Module] = {}
        for index, block in enumerate(blocks_of(model, self._blocks)):
            block.forward = self._streamer(index, resident, keep=index < num_resident)
        own = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._failures():
                return own(*args, **kwargs)

        model.forward = forward
        return model

    def _streamer(self, index: int, resident: dict[int, nn.Module], keep: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            block = resident.get(index) or self.load_block(index)
            if keep:
                resident[index] = block
            return block(*args, **kwargs)

        return forward

    def _outside_blocks(self, without: Sequence[str] = ()) -> Any:
        """Return a copy of the skeleton with everything outside the blocks loaded."""
        model = copy.deepcopy(self._skeleton)
        self._map.fill(model, "", self._like(), without=[self._blocks, *without])
        return model

    def _calls(self, hidden: Tensor) -> list[Call]:
        """Return each block's arguments beside hidden states of this shape: positions and masks."""
        shape = (hidden.shape[0], hidden.shape[1])
        if self._calls_of is None or self._calls_of[0] != shape:
            with torch.no_grad():
                self._calls_of = shape, self._frame.enter(inputs_embeds=torch.zeros_like(hidden))[1]
        return self._calls_of[1]

    @contextmanager
    def _filled(self, module: nn.Module, path: str) -> Iterator[None]:
        """Load a module of the frame and drop its weights when the context ends."""
        empty = dict(module.named_parameters(recurse=False))
        self._map.fill(module, path, self._like())
        try:
            yield
        finally:
            for name, parameter in empty.items():
                module.register_parameter(name, parameter)

    def _like(self) -> Tensor:
        return torch.empty(0, device=self.device, dtype=self.dtype)

    def _failures(self) -> AbstractContextManager[None]:
        """Return the context in which the model's own code runs."""
        return failures_as(
            lambda reason: CheckpointError(f"{self.weights.path}: transformers cannot run it: {reason}")
        )

    def _refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.weights.path}: the layers of model type {self.config.model_type!r} {reason}, "
            "so it cannot be run block by block: give `text='none'`"
        )


@dataclass(slots=True, eq=False)
class _InputRecorder:
    """A hook that records the inputs of modules, in the order of the first call of each."""

    inputs: dict[nn.Module, list[Tensor]] = field(default_factory=dict)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.inputs.setdefault(module, []).append(args[0])


class _Reached(BaseException):
    """Ends a block's forward at the layer whose input is wanted. No Exception, because it is no failure."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs


def _stop(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise _Reached(args[0])


def _same(one: Any, other: Any) -> bool:
    """True if nested arguments are equal, tensors by value."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one is other or bool(one == other)
