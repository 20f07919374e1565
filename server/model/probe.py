"""Check at start-up that the delta-aware model computes what the plain model computes, with and without a delta.

A short text runs through the plain model in a wider dtype, with and without a delta (`reference.py`), and then through
the delta-aware model, where each decoder layer is given the reference's input. So each layer, the embedding and the
output head are compared by themselves. What rounding may change is measured with the reference in the model's own
dtype: the check is as sharp in 80 layers of bfloat16 as in two of float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deltastore.base.base import Base
from deltastore.format.signs import pack_signs
from deltastore.memory import is_out_of_memory
from server.deltas.batch import BatchContext, DeltaBatch
from server.deltas.norm import is_norm
from server.deltas.resident import MatrixView, PlaneView, ResidentDelta, Slot
from server.errors import NotServable
from server.model.attention import AttentionMetadata, Chunk, PagedAttention
from server.model.hooks import kind
from server.model.reference import RankOneDelta, ReferenceModel, own_norms

# A prime that is no model's number of heads, so that tokens and heads are told apart.
NUM_TOKENS = 13
# Tokens of the text that have the delta; those around them are the base's.
OWN = slice(1, NUM_TOKENS - 1)
# One prompt's chunk and two single tokens, of the delta and of the base. The chunk's length is a prime, too.
STEPS = (slice(0, NUM_TOKENS - 2), slice(NUM_TOKENS - 2, NUM_TOKENS - 1), slice(NUM_TOKENS - 1, NUM_TOKENS))
# Of the probe's cache; the text's page is the last one.
NUM_PAGES = 3
# Sliding windows during the probe, so that its few tokens reach beyond them.
WINDOW = 5
# Errors may be this many times those of the plain model; KL is quadratic in them.
TOLERANCE = 3.0
# Relative errors below this are allowed in any case; in 16 bits it is the spacing of the dtype's numbers.
LEAST_FLOOR = 1e-5
# Of the probe's delta, in units of each weight's standard deviation.
DELTA_SHARE = 0.5
# Norm weights are around one, or around zero where one is added to them.
NORM_SHIFT = 0.25
# Rows of a weight from which its standard deviation is taken, and what is taken for a weight of zeros.
STD_ROWS = 64
ZERO_STD = 0.02
# Ways in which a model that cannot be run so fails.
ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Hidden states of one run, float32 or wider."""

    inputs: Sequence[Tensor]  # of each decoder layer: [sequences, tokens, hidden]
    outputs: Sequence[Tensor]
    logits: Tensor  # [sequences, tokens, vocabulary]

    def of_sequence(self, index: int) -> Trace:
        own = slice(index, index + 1)
        return Trace([x[own] for x in self.inputs], [x[own] for x in self.outputs], self.logits[own])

    def of_tokens(self, own: slice) -> Trace:
        return Trace([x[:, own] for x in self.inputs], [x[:, own] for x in self.outputs], self.logits[:, own])

    def then(self, later: Trace) -> Trace:
        """This trace's tokens followed by those of `later`."""
        return Trace(
            [torch.cat(pair, 1) for pair in zip(self.inputs, later.inputs, strict=True)],
            [torch.cat(pair, 1) for pair in zip(self.outputs, later.outputs, strict=True)],
            torch.cat([self.logits, later.logits], 1),
        )


@dataclass(frozen=True, slots=True)
class Errors:
    """How far a run is from the reference."""

    relative: Mapping[str, Tensor]  # [tokens], by part: norm of the error over that of what the part computes
    kl: float  # of the logits, in nats per token

    @classmethod
    def of(cls, found: Trace, truth: Trace) -> Errors:
        relative = {"the embedding": _ratios(found.inputs[0], truth.inputs[0], truth.inputs[0])}
        for index, output in enumerate(found.outputs):
            # The residual stream passes through; what the layer adds to it is what it computes.
            added = truth.outputs[index] - truth.inputs[index]
            relative[f"layer {index}"] = _ratios(output, truth.outputs[index], added)
        relative["the output head"] = _ratios(found.logits, truth.logits, truth.logits)
        expected, reached = truth.logits.log_softmax(-1), found.logits.to(truth.logits.dtype).log_softmax(-1)
        return cls(relative, float((expected.exp() * (expected - reached)).sum(-1).mean()))


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """A reference, and how far rounding to the model's dtype alone goes from it."""

    truth: Trace
    rounding: Errors

    @classmethod
    def of(cls, truth: Trace, rounded: Trace) -> Expected:
        return cls(truth, Errors.of(rounded, truth))

    @property
    def is_finite(self) -> bool:
        parts = self.rounding.relative.values()
        return math.isfinite(self.rounding.kl) and all(bool(part.isfinite().all()) for part in parts)


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The references of one model, with which it is compared when it is delta-aware."""

    model: PreTrainedModel
    layers: nn.ModuleList
    plain: Expected  # of the base alone
    mixed: Expected  # with the delta on the rows of OWN
    delta: ResidentDelta

    @classmethod
    def of(cls, model: PreTrainedModel, base: Base) -> Probe:
        """Run the reference; `model` must be plain still.

        Raises:
            NotServable: the model cannot be run so, with the reason.
        """
        layers = _decoder_layers(model)
        wide = torch.float64 if model.dtype == torch.float32 else torch.float32
        delta, by_address, norms = _draw(model, base)
        runs: list[Trace] = []
        try:
            for dtype in (wide, model.dtype):
                with own_norms(norms, OWN, NUM_TOKENS), ReferenceModel(dtype, by_address, OWN):
                    runs.append(
                        _run(model, layers, _ids(model).expand(2, -1), given=runs[0] if runs else None)
                    )
        except ERRORS as error:
            raise _failed(model, f"cannot be run in {dtype}", error) from error
        truth, rounded = runs
        plain, mixed = (Expected.of(truth.of_sequence(index), rounded.of_sequence(index)) for index in (0, 1))
        if not (plain.is_finite and mixed.is_finite):
            raise NotServable(
                f"{kind(model)}: its outputs are not finite in {model.dtype}: a weight is NaN or infinite, or "
                "activations overflow: fetch it again, or serve it with another --dtype"
            )
        return cls(model, layers, plain, mixed, delta)

    def check_base(self) -> None:
        """Compare the base alone, without a cache; NotServable has the figures."""
        self._check(_run(self.model, self.layers, _ids(self.model), given=self.plain.truth), self.plain)

    def check_mixed(self, context: BatchContext, attention: PagedAttention) -> None:
        """Compare a text whose tokens are the base's and a delta's, in three steps through a page of the cache."""
        attention.allocate(NUM_PAGES)
        parts = []
        for own in STEPS:
            deltas = [
                self.delta if OWN.start <= token < OWN.stop else None for token in range(own.start, own.stop)
            ]
            batch = DeltaBatch.of(deltas, *[[1] * len(deltas)] * 2)
            chunk = Chunk(own.start, own.stop - own.start, [NUM_PAGES - 1])
            layout = AttentionMetadata.of([chunk], attention.page_tokens, self.model.device)
            given, ids = self.mixed.truth.of_tokens(own), _ids(self.model)[:, own]
            try:
                with context.step(batch), attention.step(layout):
                    parts.append(_run(self.model, self.layers, ids, given, own.start))
            except ERRORS as error:
                raise _failed(self.model, "cannot run tokens of several variants", error) from error
        self._check(reduce(Trace.then, parts), self.mixed)

    def _check(self, found: Trace, expected: Expected) -> None:
        errors, floor = Errors.of(found, expected.truth), max(LEAST_FLOOR, torch.finfo(self.model.dtype).eps)
        dtype = str(self.model.dtype).removeprefix("torch.")
        for part, error in errors.relative.items():
            rounding = expected.rounding.relative[part]
            # Token by token: a text's first token may have activations that would hide what happens to the others.
            limits = TOLERANCE * rounding + floor
            worst = int((error / limits).nan_to_num(torch.inf).argmax())
            if not error[worst] <= limits[worst]:
                raise NotServable(
                    f"{kind(self.model)}: {part} computes something else when it is delta-aware: relative error "
                    f"{error[worst]:.2g}, where rounding in {dtype} makes {rounding[worst]:.2g} and "
                    f"{limits[worst]:.2g} is allowed"
                )
        limit = TOLERANCE**2 * expected.rounding.kl + floor**2
        if not errors.kl <= limit:
            raise NotServable(
                f"{kind(self.model)}: its predictions change when it is delta-aware: KL {errors.kl:.2g} nats per "
                f"token, where rounding in {dtype} makes {expected.rounding.kl:.2g} and {limit:.2g} is allowed"
            )


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shorten the sliding windows of all layers to WINDOW tokens for as long as the block runs."""
    owners = [*model.modules(), model.config, model.config.get_text_config()]
    with ExitStack() as stack:
        for owner in owners:
            window = getattr(owner, "sliding_window", None)
            if isinstance(window, int) and not isinstance(window, bool) and window > WINDOW:
                stack.callback(setattr, owner, "sliding_window", window)
                setattr(owner, "sliding_window", WINDOW)  # noqa: B010 - modules and configurations alike
        yield


def _failed(model: PreTrainedModel, what: str, error: Exception) -> Exception:
    """The error to raise: too little memory stays what it is."""
    return error if is_out_of_memory(error) else NotServable(f"{kind(model)}: it {what}: {error}")


def _run(
    model: PreTrainedModel,
    layers: nn.ModuleList,
    ids: Tensor,  # [sequences, tokens]
    given: Trace | None = None,
    first: int = 0,
) -> Trace:
    """Run the model over positions `first` and on, with the layers' inputs of `given` where there is one."""
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
    """Tokens from all over the vocabulary: its first ones are often special, and alike."""
    step = int(model.config.get_text_config().vocab_size) // (NUM_TOKENS + 1)
    return torch.arange(1, 1 + NUM_TOKENS, device=model.device)[None] * max(1, step)


def _ratios(found: Tensor, truth: Tensor, computed: Tensor) -> Tensor:  # [1, tokens, features] -> [tokens]
    """Norm of the error over that of what was computed, by token; a part that computes nothing errs by its output."""
    expected = truth.double()
    least = torch.finfo(found.dtype).eps * expected.norm(dim=-1)
    ratios: Tensor = (found.double() - expected).norm(dim=-1) / torch.maximum(
        computed.double().norm(dim=-1), least
    )
    return ratios[0]


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise NotServable(f"{kind(model)}: its {count} decoder layers are in no list of modules")


def _draw(
    model: PreTrainedModel, base: Base
) -> tuple[ResidentDelta, dict[int, RankOneDelta], dict[nn.Module, dict[str, Tensor]]]:
    """Draw a delta of every matrix and norm: as layers take it, and as the reference does."""
    generator = torch.Generator().manual_seed(0)
    output_head = model.get_output_embeddings()
    matrices: dict[str, MatrixView] = {}
    by_address: dict[int, RankOneDelta] = {}
    norms: dict[nn.Module, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    signs: dict[torch.Size, _OuterSigns] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.data_ptr() not in by_address:
            weight = module.weight
            if weight.shape not in signs:
                signs[weight.shape] = _OuterSigns.drawn(weight.shape, generator, weight.device)
            stored = base.head or f"{name}.weight" if module is output_head else f"{name}.weight"
            matrices[stored], by_address[weight.data_ptr()] = signs[weight.shape].delta_of(weight, generator)
        elif is_norm(module):
            norms[module] = {
                key: value + NORM_SHIFT * torch.randn(value.shape, generator=generator).to(value)
                for key, value in module.named_parameters(recurse=False)
            }
            whole |= {f"{name}.{key}": value for key, value in norms[module].items()}
    slot = Slot(0, torch.empty(0, dtype=torch.uint8, device=model.device))
    delta = ResidentDelta("", base.head is None, base.head or "", matrices, whole, slot, 0)
    return delta, by_address, norms


@dataclass(frozen=True, slots=True, eq=False)
class _OuterSigns:
    """Signs ``a_i b_j`` for all matrices of one shape; their factors differ."""

    packed: Tensor  # [out, ceil(in / 8)] uint8
    a: Tensor  # [out] float32, each -1 or 1
    b: Tensor  # [in] float32, each -1 or 1

    @classmethod
    def drawn(cls, shape: torch.Size, generator: torch.Generator, device: torch.device) -> _OuterSigns:
        a, b = (torch.rand(size, generator=generator) < 0.5 for size in shape)
        rows = pack_signs(torch.stack([~b, b])).to(device)
        return cls(rows[a.long().to(device)], *((2.0 * side.float() - 1).to(device) for side in (a, b)))

    def delta_of(self, weight: Tensor, generator: torch.Generator) -> tuple[MatrixView, RankOneDelta]:
        """A delta with factors of its own, in proportion to the weight."""
        std = float(weight[:: max(1, len(weight) // STD_ROWS)].float().std()) or ZERO_STD
        spread_out, spread_in = (
            (0.5 + torch.rand(side.shape, generator=generator)).to(side) for side in (self.a, self.b)
        )
        factor_out = DELTA_SHARE * std * spread_out
        plane = PlaneView(self.packed, factor_out, spread_in)
        return MatrixView((plane,), None, None, None), RankOneDelta(factor_out * self.a, spread_in * self.b)
