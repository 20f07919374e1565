"""Variants in a model of transformers: hooks of the server's layers, chosen for each row of a batch.

The model's parameters stay where they are and are never written, so that `Attached.detach` leaves the model as it was.
Importing this imports torch and transformers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deltastore.base import Base
from deltastore.checkpoint import DTYPE_NAME, HEAD_SUFFIXES, Checkpoint, StoredTensor, is_computed
from deltastore.console import size_text
from deltastore.errors import BaseMismatch, MemoryTooSmall, NotServable, PeraxisError, UsageError, shown
from deltastore.fingerprint import MAX_THREADS, of_digests
from deltastore.format.artifact import Artifact
from deltastore.format.header import read_into
from deltastore.format.validate import check_artifact, check_base, check_no_stacks
from deltastore.memory import is_out_of_memory
from deltastore.servable import check_modules, kind, no_head
from deltastore.wrappers import text_form
from server.deltas.layers import hook_modules
from server.deltas.resident import BatchContext, ResidentDelta, Slot

# Rows of each matrix that are compared with the base's files.
NUM_SAMPLES = 4
# Tokens of a step for which there is memory at first.
FIRST_ROWS = 1024
# The embeddings of models with variants.
_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def attach(model: Any, files: Mapping[str, Path], base: str | Path | None) -> Attached:
    """Attach the artifacts of files, by the names of their variants. See `peraxis.attach`."""
    text = TextModel.of(model)
    # Outside of inference mode, in which tensors are made that nothing else may change.
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as opened:
        artifacts = {name: opened.enter_context(Artifact.open(path)) for name, path in files.items()}
        for artifact in artifacts.values():
            check_no_stacks(artifact.manifest, artifact.where)
            check_artifact(artifact)
        expected = next(iter(artifacts.values())).manifest.base_fingerprint
        own = text.base(expected) if base is None else _checked_base(text, base)
        for artifact in artifacts.values():
            _check_fingerprint(artifact, own, base)
            check_base(artifact, own)
        if own.embedding is None:
            raise no_head(text.model)
        return Attached(text, own, artifacts)


@dataclass(frozen=True, slots=True, eq=False)
class TextModel:
    """The text model in a model of transformers, by the names that its checkpoint has alone."""

    model: PreTrainedModel
    embedding: nn.Embedding
    config: Mapping[str, Any]  # as in `config.json`
    modules: Sequence[tuple[str, nn.Module]]
    tensors: Mapping[str, Tensor]  # by name; a tied head is there, too
    device: torch.device

    @classmethod
    def of(cls, model: Any) -> TextModel:
        """Check that variants can be attached to a model, but for its values.

        Raises:
            NotServable: It is quantised, compiled or adapted, lies on several devices, or has weights that no delta
                can reach.
            UsageError: It is no model of transformers, has variants already, or computes now.
        """
        if not isinstance(model, PreTrainedModel):
            raise UsageError(
                f"`model` is a {type(model).__name__}: give a causal language model of transformers, without a wrapper "
                "of peft, torch.compile or DataParallel around it"
            )
        _check_plain(model)
        embedding, head = model.get_input_embeddings(), cast(Any, model.get_output_embeddings())
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
            raise no_head(model)
        if embedding in _attached:
            raise UsageError(
                "`model` has variants attached: detach them first, or give `artifact` all of them by name"
            )
        if is_running(model):
            raise UsageError("`model` is computing or generating: attach when that has ended")
        document = json.loads(json.dumps(model.config.to_dict(), default=str))
        form = text_form(document)
        named, stored = list(model.named_modules()), model.state_dict()
        if form is not None:
            document = form.config
            named = [(own.rstrip("."), each) for name, each in named if (own := form.in_text(f"{name}."))]
            stored = {own: each for name, each in stored.items() if (own := form.in_text(name))}
        check_modules(model, named)
        tensors = {name: value for name, value in stored.items() if not is_computed(name)}
        return cls(model, embedding, document, named, tensors, _device_of(tensors))

    def base(self, fingerprint: str) -> Base:
        """Return the base that the model's own tensors are.

        Args:
            fingerprint: The one that is expected. Some checkpoints name the output head otherwise than the model does;
                of such bases the one that has it is returned, if there is one.

        Raises:
            NotServable: A tensor is of a dtype that no base has.
        """
        head: Any = self.model.get_output_embeddings()
        own = self._stored(is_tied=head.weight.data_ptr() == self.embedding.weight.data_ptr())
        with ThreadPoolExecutor(MAX_THREADS) as pool:
            digests = dict(zip(own, pool.map(_digest, own.values()), strict=True))
        names = [name for name in own if own[name].data_ptr() == head.weight.data_ptr()]
        first = self._base_named(own, digests, {})
        if first.head is None or first.is_named(fingerprint):
            return first
        others = (self._base_named(own, digests, dict.fromkeys(names, name)) for name in HEAD_SUFFIXES)
        return next((other for other in others if other.is_named(fingerprint)), first)

    def _stored(self, is_tied: bool) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint of the model has; one that embedding and head share is there once."""
        address = self.embedding.weight.data_ptr()
        (name,) = [f"{name}.weight" for name, module in self.modules if module is self.embedding]
        for key, value in self.tensors.items():
            if value.dtype not in DTYPE_NAME:
                raise NotServable(
                    f"`model`: its {shown(key)} is {value.dtype}: load it in bfloat16, float16 or float32"
                )
        return {
            key: value
            for key, value in self.tensors.items()
            if key == name or not is_tied or value.data_ptr() != address
        }

    def _base_named(
        self, own: Mapping[str, Tensor], digests: Mapping[str, str], names: Mapping[str, str]
    ) -> Base:
        """Return the base of tensors, some of which have other names in the checkpoint."""
        facts = [
            StoredTensor(
                names.get(key, key), DTYPE_NAME[value.dtype], tuple(value.shape), Path(), 0, value.nbytes
            )
            for key, value in own.items()
        ]
        where = Path(self.model.name_or_path or str(self.model.config.model_type))
        checkpoint = Checkpoint(where, self.config, {fact.name: fact for fact in facts}, tied=False)
        named = {names.get(key, key): digest for key, digest in digests.items()}
        return Base.of(checkpoint, fingerprints=of_digests(checkpoint, named))


def _check_plain(model: PreTrainedModel) -> None:
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None):
        raise NotServable(f"`model` ({kind(model)}) is quantised: load it in bfloat16, float16 or float32")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise NotServable("`model` has adapters of peft: call its delete_adapter, or load it again")
    if any(getattr(module, "_compiled_call_impl", None) for module in model.modules()):
        raise NotServable("`model` is compiled: load it again, and do not call its compile")


def _device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    devices = sorted({value.device for value in tensors.values()}, key=str)
    if len(devices) > 1 or devices[0].type not in ("cpu", "cuda"):
        raise NotServable(
            f"`model` is on {', '.join(map(str, devices))}: load all of it on the CPU or on one CUDA device, as with "
            "device_map={'': 0}"
        )
    return devices[0]


def _digest(value: Tensor) -> str:
    stored = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(stored.numpy().data).hexdigest()


def _check_fingerprint(artifact: Artifact, own: Base, base: str | Path | None) -> None:
    """Raise BaseMismatch if an artifact is another base's, with what to do about a model in another dtype."""
    manifest = artifact.manifest
    if own.is_named(manifest.base_fingerprint):
        return
    way = "give the artifact of this base, or its base"
    if base is None:
        way = (
            "load that base in the dtype of its files, or, if `model` is that base in another dtype, give the "
            "directory as `base`"
        )
    raise BaseMismatch(
        f"{artifact.where}: made from base {shown(manifest.base_id)} ({manifest.base_fingerprint[:12]}), and "
        f"{'`model`' if base is None else '`base`'} is {shown(own.id)} ({own.fingerprint[:12]}): {way}"
    )


def _checked_base(text: TextModel, base: str | Path) -> Base:
    """Return the base of a directory after a comparison of the model with rows of its tensors.

    Raises:
        BaseMismatch: A tensor is not the model's.
        CheckpointError: The directory cannot be read.
    """
    # Deferred: it takes time, and most calls need no base.
    from deltastore.hub import checkpoint_directory

    checkpoint = Checkpoint.open(checkpoint_directory(str(base)))
    own = Base.of(checkpoint)
    drawn = np.random.default_rng(0)
    for name, stored in checkpoint.tensors.items():
        if is_computed(name):
            continue
        value = text.tensors.get(name)
        # Some checkpoints name the head otherwise than the model does.
        if value is None and name == own.head:
            value = cast(Any, text.model.get_output_embeddings()).weight
        if value is None or tuple(value.shape) != stored.shape:
            raise BaseMismatch(
                f"`base` {base}: its {shown(name)} {list(stored.shape)} is not in `model`: give the directory that "
                "`model` was loaded from"
            )
        for rows in _samples(stored, drawn):
            read = checkpoint.read(name, rows).to(value.dtype)
            if not torch.equal(value[rows].cpu() if stored.shape else value.cpu(), read):
                raise BaseMismatch(
                    f"`base` {base}: its {shown(name)} has other values than `model`: give the directory that `model` "
                    "was loaded from, or load it again"
                )
    return own


def _samples(stored: StoredTensor, drawn: np.random.Generator) -> list[slice]:
    """Return the first and the last row of a matrix and some others; all of a vector."""
    if len(stored.shape) < 2:
        return [slice(None)]
    chosen = {0, stored.shape[0] - 1, *drawn.integers(stored.shape[0], size=NUM_SAMPLES - 2).tolist()}
    return [slice(row, row + 1) for row in sorted(chosen)]


def is_running(model: PreTrainedModel) -> bool:
    """Return whether any thread is in a forward pass or in `generate` of a model, this one included."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for top in sys._current_frames().values():
        frame: Any = top
        while frame is not None:
            if frame.f_code.co_name in ("generate", "forward"):
                own = frame.f_locals.get("self")
                if any(own is part for part in parts):
                    return True
            frame = frame.f_back
    return False


@dataclass(slots=True, eq=False)
class _Batch:
    """The rows of the running step. Empty where all of them are the base's."""

    slots: np.ndarray  # [rows] int64, -1 for the base
    num_tokens: int  # of each row
    groups: Sequence[tuple[int, Tensor]]  # slots and their rows

    @classmethod
    def of(cls, slots: np.ndarray, num_tokens: int, device: torch.device) -> _Batch:
        groups = [(int(slot), torch.from_numpy((slots == slot).nonzero()[0])) for slot in np.unique(slots)]
        return cls(slots, num_tokens, [(slot, rows.to(device)) for slot, rows in groups])


class _Thread(threading.local):
    """The state of one thread."""

    is_inside = False  # in a forward pass
    chosen: Sequence[ResidentDelta | None] | None = None  # of the call of `generate` that runs


class Attached:
    """Variants that are attached to a model. Leaving its block detaches them."""

    def __init__(self, text: TextModel, base: Base, artifacts: Mapping[str, Artifact]) -> None:
        """Hook the model's layers and load the artifacts, or leave the model as it is."""
        self.model = text.model
        self._embedding = text.embedding
        self._placed = (text.device, text.embedding.weight.dtype)
        self._batch: _Batch | None = None
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._num_reserved = FIRST_ROWS
        self._variants: dict[str, ResidentDelta] = {}
        with ExitStack() as undo:
            self._context = self._hook(text, base, undo)
            self._load(artifacts, text.device)
            _attached.add(text.embedding)
            undo.callback(_attached.discard, text.embedding)
            self._enter_calls(undo)
            self._undo = undo.pop_all()
        own = [*self._variants.values()]
        # Of several, none is meant before one is chosen.
        self._chosen: Sequence[ResidentDelta | None] | None = own if len(own) == 1 else None
        self.is_attached = True

    def __repr__(self) -> str:
        return f"<Attached {', '.join(map(shown, self._variants)) or 'nothing'}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("a model with variants is neither copied nor pickled: detach them first")

    @property
    def variants(self) -> tuple[str, ...]:
        """The names by which `using` takes the attached variants."""
        return tuple(self._variants)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def using(self, variants: str | Sequence[str | None] | None) -> AbstractContextManager[None]:
        """Choose the variant of each row inside a block.

        Args:
            variants: One for all rows, or one for each row of the batch that is given to the model or to `generate`;
                None is the base.

        Raises:
            UsageError: No variant of this name is attached.
        """
        rows = [variants] if variants is None or isinstance(variants, str) else list(variants)
        if not rows:
            raise UsageError("`using` got no rows: name a variant, or one for each row")
        if not self.is_attached:
            raise UsageError("`using`: the variants are detached: attach them again")
        for name in rows:
            if name is not None and name not in self._variants:
                raise UsageError(
                    f"`using`: no variant {shown(name)} is attached: choose among {', '.join(self._variants)}, or None "
                    "for the base"
                )
        return self._choosing([None if name is None else self._variants[name] for name in rows])

    def detach(self) -> None:
        """Remove all hooks and free the variants' memory; the model is what it was. May be called twice.

        Raises:
            UsageError: The model is computing or generating.
        """
        if not self.is_attached:
            return
        if is_running(self.model):
            raise UsageError("the model is computing or generating: detach when that has ended")
        self.is_attached = False
        self._undo.close()
        self._variants.clear()
        self._chosen, self._context = None, BatchContext()

    @contextmanager
    def _choosing(self, chosen: Sequence[ResidentDelta | None]) -> Iterator[None]:
        before, self._chosen = self._chosen, chosen
        try:
            yield
        finally:
            self._chosen = before

    def _hook(self, text: TextModel, base: Base, undo: ExitStack) -> BatchContext:
        """Hook all layers of the text model."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        for _, module in text.modules:
            if isinstance(module, nn.Embedding):
                # Before the hooks of deltas.
                undo.callback(module.register_forward_pre_hook(self._spread).remove)
        undo.callback(head.register_forward_pre_hook(self._count_logits).remove)

        def norm(module: nn.Module, name: str, context: BatchContext) -> None:
            run = _RowNorm(self, module, name, context)
            undo.enter_context(_replaced(module, "forward", run))

        hooked = BatchContext()
        undo.callback(_remove, hooked)
        hook_modules(hooked, base, text.modules, head, norm)
        return hooked

    def _load(self, artifacts: Mapping[str, Artifact], device: torch.device) -> None:
        """Read each artifact into memory of its own on the device.

        Raises:
            ArtifactError: It changes a tensor that no layer reads from a delta.
            MemoryTooSmall: The device has no memory for it.
        """
        tables = self._context.tables
        tables.allocate(len(artifacts), device)
        self._context.reserve(FIRST_ROWS)
        for number, (name, artifact) in enumerate(artifacts.items()):
            try:
                layout = tables.layout(artifact.header, artifact.manifest, name)
            except PeraxisError as error:
                raise error.about(artifact.where) from error
            num_bytes = artifact.manifest.device_bytes
            try:
                memory = torch.empty(num_bytes, dtype=torch.uint8)
                read_into(artifact.fd, memory.numpy().data, artifact.header.data_start, artifact.where)
                self._variants[name] = tables.adopt(layout, Slot(number, memory.to(device)))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise MemoryTooSmall(
                    f"{artifact.where}: {size_text(num_bytes)} are not free on {device}: attach fewer artifacts"
                ) from error

    def _enter_calls(self, undo: ExitStack) -> None:
        """Begin a step wherever the model, or its body, is called."""
        for module in self.model.modules():
            if isinstance(module, PreTrainedModel) and any(
                part is self._embedding for part in module.modules()
            ):
                undo.enter_context(_replaced(module, "forward", self._forward(module.forward)))
        generate = getattr(self.model, "generate", None)
        if generate is not None:
            undo.enter_context(_replaced(self.model, "generate", self._generate(generate)))

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._thread.is_inside:
                return forward(*args, **kwargs)
            # Layers know one step at a time.
            with self._lock, self._step(args, kwargs):
                return forward(*args, **kwargs)

        # torch.compile cannot trace hooks that read addresses out of tables.
        return cast(Callable[..., Any], torch.compiler.disable(run))

    def _generate(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(generate)
        def run(*args: Any, **kwargs: Any) -> Any:
            chosen = self._chosen_rows()
            given = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
            if isinstance(given, Tensor) and len(chosen) > 1:
                _check_rows(len(chosen), len(given))
            # A block that ends, or another thread's, does not change what is generated.
            before, self._thread.chosen = self._thread.chosen, chosen
            try:
                return generate(*args, **kwargs)
            finally:
                self._thread.chosen = before

        return run

    def _chosen_rows(self) -> Sequence[ResidentDelta | None]:
        if self._chosen is None:
            raise UsageError(
                f"several variants are attached ({', '.join(self._variants)}): choose with `using`, as in `with "
                f"attached.using({next(iter(self._variants))!r}):`"
            )
        return self._chosen

    @contextmanager
    def _step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Apply the chosen variants to the rows of one forward pass."""
        self._check_call()
        is_generating = self._thread.chosen is not None
        chosen = self._thread.chosen or self._chosen_rows()
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._thread.is_inside = True
        try:
            if all(delta is None for delta in chosen):
                yield
                return
            if not isinstance(ids, Tensor) or ids.dim() != 2:
                raise UsageError(
                    "a variant's rows are embedded from token ids: give the model `input_ids` [rows, tokens], and no "
                    "`inputs_embeds`"
                )
            if kwargs.get("labels") is not None and any(delta and delta.num_added for delta in chosen):
                raise UsageError(
                    "`labels`: a variant has tokens that the base lacks: compute the loss of its logits"
                )
            num_rows, num_tokens = ids.shape
            copies = num_rows // len(chosen)
            if not (is_generating and copies and num_rows % len(chosen) == 0) and len(chosen) > 1:
                _check_rows(len(chosen), num_rows)
            deltas = [delta for delta in chosen for _ in range(copies)]
            kept = kwargs.get("logits_to_keep", 0)
            # Some models compute their last layers for the tokens alone whose logits are asked for.
            num_logits = min(kept, num_tokens) if isinstance(kept, int) and kept > 0 else num_tokens
            with self._applied(deltas, num_tokens, num_logits):
                yield
        finally:
            self._thread.is_inside = False

    def _check_call(self) -> None:
        if self.model.training:
            raise UsageError(
                "variants are attached, which are not trained: call `model.eval()`, or detach them"
            )
        if torch.is_grad_enabled() and any(value.requires_grad for value in self.model.parameters()):
            raise UsageError(
                "variants are attached, and hooks have no gradients: call the model in `torch.no_grad()` or "
                "`torch.inference_mode()`"
            )
        weight = self._embedding.weight
        if (weight.device, weight.dtype) != self._placed:
            device, dtype = self._placed
            raise UsageError(
                f"variants were attached to the model on {device} in {dtype}, and it is on {weight.device} in "
                f"{weight.dtype} now: detach them, and attach again"
            )

    @contextmanager
    def _applied(
        self, deltas: Sequence[ResidentDelta | None], num_tokens: int, num_logits: int
    ) -> Iterator[None]:
        num_rows = len(deltas)
        if num_rows * num_tokens > self._num_reserved:
            self._num_reserved = max(2 * self._num_reserved, num_rows * num_tokens)
            with torch.inference_mode(False):
                self._context.reserve(self._num_reserved)
        slots = np.array([-1 if delta is None else delta.slot.index for delta in deltas])
        if self._batch is None or not np.array_equal(slots, self._batch.slots):
            self._batch = _Batch.of(slots, num_tokens, self._placed[0])
        self._batch.num_tokens = num_tokens
        with self._context.step(deltas, [num_tokens] * num_rows, [num_logits] * num_rows):
            yield

    def _spread(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Give every row ids of its own where a model looks the positions of all rows up once."""
        if self._context.current is None or self._batch is None or len(args[0]) != 1:
            return None
        return (args[0].expand(len(self._batch.slots), -1), *args[1:])

    def _count_logits(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Tell the step how many rows of logits the model computes of each row."""
        if (step := self._context.current) is not None and self._batch is not None:
            slots = self._batch.slots
            step.logits.set(slots.repeat(args[0].shape[:-1].numel() // len(slots)))

    def run_norm(self, norm: _RowNorm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a norm with the vectors of each row's variant, once for each variant."""
        step, batch = self._context.current, self._batch
        changed = {} if step is None else {
            name: number for name, number in norm.vectors.items() if number in step.vectors
        }  # fmt: skip
        if not changed or batch is None:
            return norm.forward(*args, **kwargs)
        x: Tensor = args[0]
        num_rows = len(batch.slots)
        if len(x) == num_rows * batch.num_tokens != num_rows:
            # Some models flatten rows and tokens.
            shape = (num_rows, batch.num_tokens)
            return self.run_norm(norm, (x.unflatten(0, shape), *args[1:]), kwargs).flatten(0, 1)
        if len(x) != num_rows:
            x = x.expand(num_rows, *x.shape[1:])
        tables = self._context.tables.vectors
        output: Tensor | None = None
        for slot, rows in batch.groups:
            own = {name: tables[number].table[1 + slot] for name, number in changed.items()}
            with _with_parameters(norm.module, own):
                if len(batch.groups) == 1:
                    return norm.forward(x, *args[1:], **kwargs)
                part = norm.forward(x[rows], *args[1:], **kwargs)
            if output is None:
                output = part.new_empty(num_rows, *part.shape[1:])
            output[rows] = part
        return output


class _RowNorm:
    """The forward method of a norm or activation with the vectors of each row's variant.

    Its parameters stay in the module, unlike those of the server's `NormDelta`. Any kind of norm takes vectors, so it
    runs once for each variant of a batch.
    """

    def __init__(self, attached: Attached, module: nn.Module, name: str, context: BatchContext) -> None:
        self.module = module
        self.forward = module.forward
        self.vectors = {
            parameter: context.tables.add_vector(f"{name}.{parameter}", value)
            for parameter, value in module.named_parameters(recurse=False)
        }
        self._attached = attached

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._attached.run_norm(self, args, kwargs)


@contextmanager
def _with_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module compute with other tensors in place of its parameters."""
    own = {name: module._parameters[name] for name in values}
    module._parameters.update(cast(Any, values))
    try:
        yield
    finally:
        module._parameters.update(own)


@contextmanager
def _replaced(module: nn.Module, name: str, method: Any) -> Iterator[None]:
    """Replace a method of one module inside the block."""
    own = vars(module)
    before, is_own = own.get(name), name in own
    own[name] = method
    try:
        yield
    finally:
        if is_own:
            own[name] = before
        else:
            del own[name]


def _remove(context: BatchContext) -> None:
    for hook in context.hooks:
        hook.remove()


def _check_rows(num_chosen: int, num_rows: int) -> None:
    if num_chosen != num_rows:
        raise UsageError(
            f"`using` names {num_chosen} rows and the batch has {num_rows}: name each row, or one variant for all"
        )
