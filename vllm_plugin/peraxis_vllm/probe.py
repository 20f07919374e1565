"""At start: every layer adds what a merged weight would, and a step of the model calls the layers at all.

Some models read weights past their layers (fused kernels of query and key norms, absorbed projections). A delta of such
a tensor would be ignored without a word, so artifacts that change it are refused (`DeltaManager.check`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deltastore.errors import NotServable
from peraxis_vllm.manager import DeltaManager
from peraxis_vllm.points import NormPoint, Point, WithDeltas, eps_of, kind_of_norm
from server.deltas.resident import ResidentDelta, Slot
from server.kernels.reference import FIELDS, row_of
from server.model.probe import NORM_SHIFT, OuterSigns, RankOneDelta

log = logging.getLogger("vllm.peraxis")
# The slot of each row of the probe: the base's and those of a delta, in turns.
SLOTS = np.array([-1, 0, 0, -1, 0, -1, 0], dtype=np.int64)
OWN = torch.from_numpy(SLOTS == 0)
# Of the error of rounding in the model's dtype.
TOLERANCE = 4.0
NUM_TOKENS = 16
STD = 0.02


@torch.inference_mode()
def check(runner: Any) -> None:
    """Compare every layer with merged weights, and note which ones a step calls.

    Raises:
        NotServable: a layer computes something else. The message names it.
    """
    manager: DeltaManager = runner.lora_manager
    delta = _ProbeDelta(manager)
    for rows in (manager.tokens, manager.logits):
        rows.set(SLOTS)
    for point in manager.points:
        delta.check(point, manager.model.get_submodule(point.name))
        if manager.num_ranks > 1:
            delta.check_share(point, manager.model.get_submodule(point.name))
    for norm in manager.norms:
        delta.check_norm(norm)
    delta.remove()
    watched: list[Point | NormPoint] = [*manager.points, *manager.norms]
    for one in watched:
        one.is_called = False
    with _eager(manager.model):
        hidden, *_ = runner._dummy_run(NUM_TOKENS, is_profile=True)
        runner.model.compute_logits(hidden[:1])
    manager.take_fault()
    if missed := [one.name for one in watched if not one.is_called]:
        log.warning("a step reads these past the layers where deltas act, which must not change: %s", missed)


class _ProbeDelta:
    """A random delta of every layer in the first slot, whose signs are outer products."""

    def __init__(self, manager: DeltaManager) -> None:
        self.manager = manager
        generator = torch.Generator().manual_seed(0)
        rows = np.zeros((len(manager.tables.parts), FIELDS), dtype=np.int64)
        self.planes: dict[int, RankOneDelta] = {}
        signs: dict[torch.Size, OuterSigns] = {}
        self._kept: list[Any] = []
        for point in manager.points:
            in_features = _in_features(manager.model.get_submodule(point.name))
            for number in self._parts(point):
                shape = torch.Size((manager.tables.parts[number].num_rows, in_features))
                if shape not in signs:
                    signs[shape] = OuterSigns.drawn(shape, generator, manager.device)
                plane, self.planes[number] = signs[shape].delta_of(STD, generator)
                rows[number] = row_of([plane]).numpy()
                self._kept.append(plane)
        bases = [vector.table[0] for vector in manager.tables.vectors]
        self.vectors = {
            number: base + NORM_SHIFT * torch.randn(len(base), generator=generator).to(base)
            for number, base in enumerate(bases)
        }
        self.generator = generator
        self.delta: ResidentDelta = manager.tables.hold(self._slot, rows, self.vectors)

    @property
    def _slot(self) -> Slot:
        return Slot(0, torch.empty(0, dtype=torch.uint8, device=self.manager.device))

    def remove(self) -> None:
        tables = self.manager.tables
        tables.hold(self._slot, np.zeros((len(tables.parts), FIELDS), dtype=np.int64), {})

    def check(self, point: Point, module: Any) -> None:
        """Compare a layer's output with the base's plus the dense delta's."""
        method, is_embedding = module.quant_method, point.is_embedding
        stock: Any = super(WithDeltas, method)
        if is_embedding and not point.ends[0]:
            # A rank may have none of the base's tokens.
            return
        if is_embedding:
            x = torch.randint(0, point.ends[0], (len(SLOTS),), generator=self.generator).to(
                self.manager.device
            )
            base, got = stock.embedding(module, x), method.embedding(module, x)
            added = self.planes[point.first].rows(x[OWN], torch.float32)
        else:
            x = torch.randn(len(SLOTS), _in_features(module), generator=self.generator)
            x = x.to(self.manager.device, self.manager.dtype)
            bias = getattr(module, "bias", None)
            base, got = stock.apply(module, x, bias), method.apply(module, x, bias)
            added = torch.cat(
                [
                    self.planes[number].product(x[OWN].float()) + self._bias(number)
                    for number in self._parts(point)
                ],
                1,
            )
        want = base.float().clone()
        want[OWN, : added.shape[1]] += added
        self._compare(point.name, got.float(), want, base.dtype)

    def check_share(self, point: Point, module: Any) -> None:
        """Compare the first and the last row that this rank has of each tensor with the checkpoint's."""
        stock: Any = super(WithDeltas, module.quant_method)
        x = torch.randn(1, _in_features(module), generator=self.generator)
        x = x.to(self.manager.device, self.manager.dtype)
        outputs = None if point.is_embedding else stock.apply(module, x, None)[0]
        begin = 0
        for number, end in zip(range(point.first, point.first + len(point.ends)), point.ends, strict=True):
            for own, row in self._rows_of(number, begin, end):
                if outputs is None:
                    got, want = stock.embedding(module, torch.tensor([own], device=x.device))[0], row
                else:
                    got, want = outputs[own], row.float() @ x[0].float()
                scale = row.float().norm() * (1 if outputs is None else x.float().norm())
                error = (got.float() - want.float()).norm() / scale.clamp(min=1e-6)
                self._refuse_if(point.name, float(error), x.dtype)
            begin = end

    def _rows_of(self, number: int, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Yield some of the outputs of a part, from `begin` up to `end`, and the checkpoint's rows that give them."""
        manager = self.manager
        part, cut = manager.tables.parts[number], manager.cuts[number]
        stored = manager.checkpoint.tensors.get(part.name)
        if stored is None or part.is_beyond or begin == end:
            return
        first, *_, last = cut.row_ranges(stored.shape[0]) * 2
        for own, row in ((begin, first[0]), (end - 1, last[1] - 1)):
            whole = manager.checkpoint.read(part.name, slice(row, row + 1))[0]
            yield own, whole[slice(*cut.columns or (None,))].to(manager.device, manager.dtype)

    def check_norm(self, norm: NormPoint) -> None:
        """Compare a norm with torch's in float64, row by row."""
        module, tables = norm.module, self.manager.tables
        width = tables.vectors[norm.vectors["weight"]].table.shape[1]
        x = torch.randn(len(SLOTS), width, generator=self.generator).to(
            self.manager.device, self.manager.dtype
        )
        batch = x[None] if self.manager.rows_dim else x
        found = (module._forward_method if hasattr(module, "_forward_method") else module.forward)(batch)
        got, wide = (found[0] if isinstance(found, tuple) else found).view_as(x), x.double()
        values = {key: tables.vectors[number].table[:2].double() for key, number in norm.vectors.items()}
        weight = values["weight"][OWN.long()]
        kind = kind_of_norm(module) or ""
        if kind.endswith("LayerNorm"):
            want = nn.functional.layer_norm(wide, (width,), None, None, eps_of(module)) * weight
            if "bias" in values:
                want = want + values["bias"][OWN.long()]
        else:
            scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps_of(module))
            want = scaled * (1 + weight if kind == "GemmaRMSNorm" else weight)
        self._compare(norm.name, got.float(), want.float(), x.dtype)

    def _parts(self, point: Point) -> list[int]:
        """Return the numbers of a point's parts but that of tokens which the base lacks."""
        parts = self.manager.tables.parts
        numbers = range(point.first, point.first + len(point.ends))
        return [number for number in numbers if not parts[number].is_beyond]

    def _bias(self, number: int) -> Tensor | float:
        part = self.manager.tables.parts[number]
        if part.bias is None:
            return 0.0
        return self.vectors[part.bias] - self.manager.tables.vectors[part.bias].table[0]

    def _compare(self, name: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
        error = ((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-6)).max()
        self._refuse_if(name, float(error), dtype)

    def _refuse_if(self, name: str, error: float, dtype: torch.dtype) -> None:
        limit = TOLERANCE * max(torch.finfo(dtype).eps, 1e-5)
        if not error <= limit:
            raise NotServable(
                f"{name} computes something else with a delta: relative error {error:.2g}, and {limit:.2g} is allowed: "
                "serve this base with --backend native"
            )


def _in_features(module: Any) -> int:
    if hasattr(module, "embedding_dim"):
        return int(module.embedding_dim)
    return int(getattr(module, "input_size_per_partition", module.input_size))


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Run a model as it is written: a compiled one would not call the modules."""
    compiled = [module for module in model.modules() if hasattr(module, "do_not_compile")]
    before = [module.do_not_compile for module in compiled]
    try:
        for module in compiled:
            module.do_not_compile = True  # type: ignore[assignment]
        yield
    finally:
        for module, value in zip(compiled, before, strict=True):
            module.do_not_compile = value
