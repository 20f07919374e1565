"""Check at start-up that the delta-aware model computes what the plain model computes, with and without a delta.

A short text runs through the plain model in a wider dtype, with and without a delta (`reference.py`), and then through
the delta-aware model, where each decoder layer takes the reference's input. So each layer, the embedding and the output
head are compared separately. The allowed error comes from the reference in the model's own dtype: the check is as sharp
for 80 layers of bfloat16 as for two of float32.

The reference widens weights a few rows of one matrix at a time, so the memory needed does not grow with the model. It
is independent of the hooks and kernels that serve deltas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from deltastore.base import Base
from deltastore.errors import NotServable
from deltastore.format.matrix import pack_signs
from deltastore.memory import is_out_of_memory
from deltastore.servable import kind, module_kind
from server.deltas.resident import BatchContext, ResidentDelta, Slot
from server.kernels.reference import FIELDS, row_of
from server.model.attention import AttentionMetadata, Chunk, PagedAttention

# Elements of a weight to widen at a time.
BLOCK_NUMEL = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class RankOneDelta:
    """A one-bit delta whose signs are an outer product, so that applying it costs two vector operations.

    With signs ``a_i b_j`` the delta of a weight is ``(factor_out * a)_i (factor_in * b)_j``.
    """

    signed_out: Tensor  # [out] float32: factor_out * a
    signed_in: Tensor  # [in] float32: factor_in * b

    def product(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        """Return the delta's product with `x`, in the dtype of `x`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        inner = (x.to(wide) * self.signed_in.to(wide)).sum(-1, keepdim=True)
        return (inner * self.signed_out.to(wide)).to(x.dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:  # [tokens] -> [tokens, in]
        """Return rows of the dense delta."""
        return (self.signed_out[ids][:, None] * self.signed_in).to(dtype)


class ReferenceModel(TorchFunctionMode):
    """A mode in which linear layers, embeddings and norms compute in `dtype`, independent of their weights' dtype.

    The batch is one text twice: the first sequence is the base's, the second has deltas at the positions of `own`.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        deltas: Mapping[int, RankOneDelta],  # by the address of the weight
        own: slice,  # positions of the second sequence with deltas
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self._deltas = deltas
        self._own = own

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        if func in (F.layer_norm, F.rms_norm):
            args = tuple(arg.to(self._dtype) if isinstance(arg, Tensor) else arg for arg in args)
            kwargs = {
                key: arg.to(self._dtype) if isinstance(arg, Tensor) else arg for key, arg in kwargs.items()
            }
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = input.to(self._dtype)
        output = self._product(x, weight)
        if bias is not None:
            output += bias.to(self._dtype)
        if (delta := self._deltas.get(weight.data_ptr())) is not None:
            by_sequence = output.view(2, -1, output.shape[-1])
            own = x.reshape(2, -1, x.shape[-1])[1, self._own]
            by_sequence[1, self._own] += delta.product(own)
        return output

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dtype == self._dtype:
            return F.linear(x, weight)
        num_rows = max(1, BLOCK_NUMEL // weight.shape[1])
        # One buffer for all blocks: a buffer per block would fragment the memory between parts of the output.
        buffer = torch.empty(
            min(num_rows, len(weight)), weight.shape[1], dtype=self._dtype, device=weight.device
        )
        output = x.new_empty(*x.shape[:-1], len(weight))
        for start in range(0, len(weight), num_rows):
            block = weight[start : start + num_rows]
            output[..., start : start + num_rows] = F.linear(x, buffer[: len(block)].copy_(block))
        return output

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = F.embedding(input, weight, *args, **kwargs).to(self._dtype)
        if (delta := self._deltas.get(weight.data_ptr())) is not None:
            output[1, self._own] += delta.rows(input[1, self._own], self._dtype)
        return output


@contextmanager
def own_norms(norms: Mapping[nn.Module, Mapping[str, Tensor]], own: slice, num_tokens: int) -> Iterator[None]:
    """Give the second sequence's positions `own` other norm weights, by running each norm a second time.

    Args:
        norms: other values for the parameters of some modules, by name.
        own: positions of the second sequence that have them.
        num_tokens: length of each sequence. No other dimension of a norm's output may have this size.
    """

    def rerun(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        before = dict(module._parameters)
        try:
            module._parameters.update(
                {name: nn.Parameter(value, requires_grad=False) for name, value in norms[module].items()}
            )
            other: Tensor = module.forward(*args)
        finally:
            module._parameters.update(before)
        token_axis = output.shape.index(num_tokens, 1)
        output.select(0, 1).narrow(token_axis - 1, own.start, own.stop - own.start).copy_(
            other.select(0, 1).narrow(token_axis - 1, own.start, own.stop - own.start)
        )
        return output

    with ExitStack() as stack:
        for module in norms:
            stack.callback(module.register_forward_hook(rerun).remove)
        yield


# A prime that is no model's number of heads, so that token and head dimensions differ.
NUM_TOKENS = 13
# Tokens of the text with the delta; the first and the last one are the base's.
DELTA_TOKENS = slice(1, NUM_TOKENS - 1)
# A prefill chunk and two decode steps, one of the delta and one of the base. The chunk's length is a prime, too.
STEPS = (slice(0, NUM_TOKENS - 2), slice(NUM_TOKENS - 2, NUM_TOKENS - 1), slice(NUM_TOKENS - 1, NUM_TOKENS))
# Pages of the probe's cache. The text is in the last one.
NUM_PAGES = 3
# Length of sliding windows during the probe, so that its few tokens reach beyond them.
WINDOW = 5
# Relative errors may be this many times those of rounding. KL is quadratic in them.
TOLERANCE = 3.0
# Relative errors below this are always allowed. A delta's product is a sum of inputs with signs, whose terms may cancel
# where the reference's rank-one product does not: 12 layers of 768 channels in float32 reach 1.2e-5. In 16-bit dtypes,
# the machine epsilon is larger and applies instead.
MIN_ERROR = 1e-4
# Size of the probe's delta, in units of each weight's standard deviation.
DELTA_SHARE = 0.5
# Standard deviation of the change of norm weights, which are around one, or around zero in ``1 + w`` forms.
NORM_SHIFT = 0.25
# Rows of a weight that its standard deviation is estimated from, and the value for a weight of zeros.
STD_ROWS = 64
ZERO_STD = 0.02
# Errors of a model that cannot run in this way.
ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The reference runs of one model, to compare it with after hooks are attached."""

    model: PreTrainedModel
    layers: nn.ModuleList
    plain: ReferenceRun  # of the base alone
    mixed: ReferenceRun  # with the delta on DELTA_TOKENS
    delta: ProbeDelta

    @classmethod
    def of(cls, model: PreTrainedModel, base: Base) -> Probe:
        """Run the references. `model` must have no hooks yet.

        Raises:
            NotServable: the model cannot run in this way, or its outputs are not finite.
        """
        layers = _decoder_layers(model)
        wide = torch.float64 if model.dtype == torch.float32 else torch.float32
        delta = draw_delta(model, base)
        runs: list[Trace] = []
        try:
            for dtype in (wide, model.dtype):
                norms = own_norms(delta.norms, DELTA_TOKENS, NUM_TOKENS)
                given = runs[0] if runs else None
                with norms, ReferenceModel(dtype, delta.by_address, DELTA_TOKENS):
                    runs.append(_run(model, layers, _ids(model).expand(2, -1), given))
        except ERRORS as error:
            raise _failed(model, f"cannot be run in {dtype}", error) from error
        truth, rounded = runs
        plain, mixed = (
            ReferenceRun.of(truth.of_sequence(index), rounded.of_sequence(index)) for index in (0, 1)
        )
        if not (plain.is_finite and mixed.is_finite):
            raise NotServable(
                f"{kind(model)}: its outputs are not finite in {model.dtype}: a weight is NaN or infinite, or "
                "activations overflow: fetch it again, or serve it with another --dtype"
            )
        return cls(model, layers, plain, mixed, delta)

    def check_base(self) -> None:
        """Compare the base alone, without a cache.

        Raises:
            NotServable: with the measured errors.
        """
        try:
            found = _run(self.model, self.layers, _ids(self.model), given=self.plain.truth)
        except ERRORS as error:
            raise _failed(self.model, "cannot run with its layers replaced", error) from error
        self._check(found, self.plain)

    def check_mixed(self, context: BatchContext, attention: PagedAttention) -> None:
        """Compare a text with tokens of the base and of a delta, in three steps over a paged cache.

        Raises:
            NotServable: with the measured errors.
        """
        attention.allocate(NUM_PAGES)
        context.allocate(1, NUM_TOKENS, self.model.device)
        own_delta = self.delta.resident(context)
        parts = []
        for own in STEPS:
            deltas = [
                own_delta if DELTA_TOKENS.start <= token < DELTA_TOKENS.stop else None
                for token in range(own.start, own.stop)
            ]
            ones = [1] * len(deltas)
            chunk = Chunk(own.start, own.stop - own.start, [NUM_PAGES - 1])
            metadata = AttentionMetadata.of([chunk], attention.page_tokens, self.model.device)
            given, ids = self.mixed.truth.of_tokens(own), _ids(self.model)[:, own]
            try:
                with context.step(deltas, ones, ones), attention.step(metadata):
                    parts.append(_run(self.model, self.layers, ids, given, own.start))
            except ERRORS as error:
                raise _failed(self.model, "cannot run tokens of several variants", error) from error
        self._check(reduce(Trace.then, parts), self.mixed)

    def _check(self, found: Trace, reference: ReferenceRun) -> None:
        found_errors = Deviation.of(found, reference.truth)
        floor = max(MIN_ERROR, torch.finfo(self.model.dtype).eps)
        dtype = str(self.model.dtype).removeprefix("torch.")
        for part, error in found_errors.relative.items():
            rounding = reference.rounding.relative[part]
            # Token by token: massive activations of a text's first token would hide errors of the others.
            limits = TOLERANCE * rounding + floor
            worst = int((error / limits).nan_to_num(torch.inf).argmax())
            if not error[worst] <= limits[worst]:
                raise NotServable(
                    f"{kind(self.model)}: {part} computes something else when it is delta-aware: relative error "
                    f"{error[worst]:.2g}, where rounding in {dtype} makes {rounding[worst]:.2g} and "
                    f"{limits[worst]:.2g} is allowed"
                )
        limit = TOLERANCE**2 * reference.rounding.kl + floor**2
        if not found_errors.kl <= limit:
            raise NotServable(
                f"{kind(self.model)}: its predictions change when it is delta-aware: KL {found_errors.kl:.2g} nats per "
                f"token, where rounding in {dtype} makes {reference.rounding.kl:.2g} and {limit:.2g} is allowed"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The hidden states and logits of one run."""

    inputs: Sequence[Tensor]  # by decoder layer: [sequences, tokens, hidden]
    outputs: Sequence[Tensor]  # by decoder layer: [sequences, tokens, hidden]
    logits: Tensor  # [sequences, tokens, vocab]

    def of_sequence(self, index: int) -> Trace:
        """Return the trace of one sequence."""
        own = slice(index, index + 1)
        return Trace([x[own] for x in self.inputs], [x[own] for x in self.outputs], self.logits[own])

    def of_tokens(self, own: slice) -> Trace:
        """Return the trace of some positions."""
        return Trace([x[:, own] for x in self.inputs], [x[:, own] for x in self.outputs], self.logits[:, own])

    def then(self, later: Trace) -> Trace:
        """Return this trace's tokens followed by those of `later`."""
        return Trace(
            [torch.cat(pair, 1) for pair in zip(self.inputs, later.inputs, strict=True)],
            [torch.cat(pair, 1) for pair in zip(self.outputs, later.outputs, strict=True)],
            torch.cat([self.logits, later.logits], 1),
        )


@dataclass(frozen=True, slots=True)
class Deviation:
    """The errors of one run against the reference."""

    # By part, [tokens]: norm of the error over the norm of what the part computes.
    relative: Mapping[str, Tensor]
    kl: float  # KL divergence of the predictions from the reference's, in nats per token

    @classmethod
    def of(cls, found: Trace, truth: Trace) -> Deviation:
        """Compare a run of one sequence with the reference."""
        relative = {"the embedding": _ratios(found.inputs[0], truth.inputs[0], truth.inputs[0])}
        for index, output in enumerate(found.outputs):
            # The residual stream passes through: a layer computes what it adds.
            added = truth.outputs[index] - truth.inputs[index]
            relative[f"layer {index}"] = _ratios(output, truth.outputs[index], added)
        relative["the output head"] = _ratios(found.logits, truth.logits, truth.logits)
        expected, reached = truth.logits.log_softmax(-1), found.logits.to(truth.logits.dtype).log_softmax(-1)
        return cls(relative, float((expected.exp() * (expected - reached)).sum(-1).mean()))


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceRun:
    """A reference run, and the deviation that rounding to the model's dtype alone causes."""

    truth: Trace
    rounding: Deviation

    @classmethod
    def of(cls, truth: Trace, rounded: Trace) -> ReferenceRun:
        return cls(truth, Deviation.of(rounded, truth))

    @property
    def is_finite(self) -> bool:
        """True if neither run has NaN or infinite values."""
        parts = self.rounding.relative.values()
        return math.isfinite(self.rounding.kl) and all(bool(part.isfinite().all()) for part in parts)


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shorten the sliding windows of all layers to WINDOW tokens inside the block."""
    owners = [*model.modules(), model.config, model.config.get_text_config()]
    with ExitStack() as stack:
        for owner in owners:
            window = getattr(owner, "sliding_window", None)
            if isinstance(window, int) and not isinstance(window, bool) and window > WINDOW:
                stack.callback(setattr, owner, "sliding_window", window)
                setattr(owner, "sliding_window", WINDOW)  # noqa: B010 - modules and configurations
        yield


def _failed(model: PreTrainedModel, what: str, error: Exception) -> Exception:
    """Return the error to raise: running out of memory is passed on as it is."""
    return error if is_out_of_memory(error) else NotServable(f"{kind(model)}: it {what}: {error}")


def _run(
    model: PreTrainedModel,
    layers: nn.ModuleList,
    ids: Tensor,  # [sequences, tokens]
    given: Trace | None = None,
    first: int = 0,
) -> Trace:
    """Run the model from position `first` on. With `given`, each decoder layer takes its input from that trace."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        inputs.append(hidden.clone())
        if given is not None:
            hidden = given.inputs[len(inputs) - 1].to(hidden.dtype)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        outputs.append((output if isinstance(output, Tensor) else output[0]).clone())

    positions = torch.arange(first, first + ids.shape[1], device=ids.device)
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(after).remove)
        logits = model(input_ids=ids, position_ids=positions.expand(ids.shape), use_cache=False).logits
    return Trace(inputs, outputs, logits)


def _ids(model: PreTrainedModel) -> Tensor:  # [1, NUM_TOKENS]
    """Return tokens from all over the vocabulary: the first ones are often special tokens with similar embeddings."""
    step = int(model.config.get_text_config().vocab_size) // (NUM_TOKENS + 1)
    return torch.arange(1, 1 + NUM_TOKENS, device=model.device)[None] * max(1, step)


def _ratios(found: Tensor, truth: Tensor, computed: Tensor) -> Tensor:  # [1, tokens, features] -> [tokens]
    """Return the norm of each token's error over the norm of `computed`, bounded below by the output's rounding."""
    expected = truth.double()
    least = torch.finfo(found.dtype).eps * expected.norm(dim=-1)
    ratios: Tensor = (found.double() - expected).norm(dim=-1) / torch.maximum(
        computed.double().norm(dim=-1), least
    )
    return ratios[0]


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if count is None:
        raise NotServable(
            f"{kind(model)}: its layers are in several stacks, and its configuration gives no number of them: such "
            "models can be compressed and merged, not served"
        )
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise NotServable(f"{kind(model)}: its {count} decoder layers are in no list of modules")


# Signs, `scale_out`, `scale_in` and gain.
Plane = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ProbeDelta:
    """One random delta of a whole model, as layers and as the reference take it.

    Its signs are outer products, so the reference applies it with two vectors per matrix.
    """

    planes: Mapping[str, Plane]  # by tensor
    vectors: Mapping[str, Tensor]  # norms' parameters, by name
    by_address: Mapping[int, RankOneDelta]  # by the address of the weight
    norms: Mapping[nn.Module, Mapping[str, Tensor]]  # values of each norm's parameters, by name

    def resident(self, context: BatchContext) -> ResidentDelta:
        """Write the delta into the tables' first slot. Its tensors stay where they are."""
        tables = context.tables
        rows = np.zeros((len(tables.parts), FIELDS), dtype=np.int64)
        for row, part in zip(rows, tables.parts, strict=True):
            # A tied head takes the embedding's.
            plane = self.planes.get(part.name) or self.planes.get(part.embedding or "")
            if plane is not None and not part.is_beyond:
                row[:] = row_of([plane]).numpy()
        vectors = {
            number: self.vectors[vector.name]
            for number, vector in enumerate(tables.vectors)
            if vector.name in self.vectors
        }
        slot = Slot(0, torch.empty(0, dtype=torch.uint8, device=tables.rows.device))
        return tables.hold(slot, rows, vectors)


def draw_delta(model: PreTrainedModel, base: Base) -> ProbeDelta:
    """Draw a delta of every matrix and norm of a model without hooks, with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    output_head = model.get_output_embeddings()
    planes: dict[str, Plane] = {}
    by_address: dict[int, RankOneDelta] = {}
    norms: dict[nn.Module, dict[str, Tensor]] = {}
    vectors: dict[str, Tensor] = {}
    signs: dict[torch.Size, OuterSigns] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.data_ptr() not in by_address:
            weight = module.weight
            if weight.shape not in signs:
                signs[weight.shape] = OuterSigns.drawn(weight.shape, generator, weight.device)
            stored = base.head or f"{name}.weight" if module is output_head else f"{name}.weight"
            std = float(weight[:: max(1, len(weight) // STD_ROWS)].float().std()) or ZERO_STD
            planes[stored], by_address[weight.data_ptr()] = signs[weight.shape].delta_of(std, generator)
        elif module_kind(module) in ("norm", "activation"):
            norms[module] = {
                key: value + NORM_SHIFT * torch.randn(value.shape, generator=generator).to(value)
                for key, value in module.named_parameters(recurse=False)
            }
            vectors |= {f"{name}.{key}": value for key, value in norms[module].items()}
    return ProbeDelta(planes, vectors, by_address, norms)


@dataclass(frozen=True, slots=True, eq=False)
class OuterSigns:
    """Signs ``a_i b_j`` for all matrices of one shape, each with factors of its own."""

    packed: Tensor  # [out, ceil(in / 8)] uint8
    a: Tensor  # [out] float32, each -1 or 1
    b: Tensor  # [in] float32, each -1 or 1

    @classmethod
    def drawn(cls, shape: torch.Size, generator: torch.Generator, device: torch.device) -> OuterSigns:
        a, b = (torch.rand(size, generator=generator) < 0.5 for size in shape)
        rows = pack_signs(torch.stack([~b, b])).to(device)
        return cls(rows[a.long().to(device)], *((2.0 * side.float() - 1).to(device) for side in (a, b)))

    def delta_of(self, std: float, generator: torch.Generator) -> tuple[Plane, RankOneDelta]:
        """Return a delta of random factors in proportion to `std`, as layers and as the reference take it."""
        scale_out, scale_in = (
            (0.5 + torch.rand(side.shape, generator=generator)).to(side.device).half()
            for side in (self.a, self.b)
        )
        gain = torch.full((1,), DELTA_SHARE * std, device=self.a.device)
        delta = RankOneDelta(gain * scale_out.float() * self.a, scale_in.float() * self.b)
        return (self.packed, scale_out, scale_in, gain), delta
