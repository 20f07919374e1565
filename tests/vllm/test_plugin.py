"""The plugin without vLLM: stand-ins have what it uses of vLLM's code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import peraxis_vllm
import pytest
import torch
from peraxis_vllm.points import POINTS, NormPoint, Point, add_point, wrap
from torch import Tensor, nn

from deltastore.errors import NotServable
from deltastore.format.matrix import MatrixDelta, SignPlane, pack_signs
from server.deltas.resident import DeltaTables, Part, ResidentDelta, Rows
from tests.server.helpers.placed import new_slot, placed

CPU = torch.device("cpu")


class Runner:
    """Stands for vLLM's model runner."""

    def load_lora_model(self, model: object, vllm_config: object, device: object) -> str:
        return "stock"


class Platform:
    """Stands for vLLM's platform of CPUs, which turns compilation off beside LoRA."""

    compiles = True

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        cls.compiles = vllm_config.lora_config is None


@dataclass
class Mapping:
    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    type: object


@dataclass
class LoraRequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


class Norm(nn.Module):
    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x


class Processors:
    """Stands for vLLM's processors of inputs, outputs and logits, and for its logger of figures."""

    def process_inputs(self, request_id: str, lora_request: object, resumable: bool) -> None: ...

    @staticmethod
    def assign_request_id(request: object) -> None: ...

    def add_request(self, request: object, prompt: str | None) -> None: ...

    def new_req_logits_processor(self, params: object) -> None: ...

    def record(self, scheduler_stats: object, iteration_stats: object) -> None: ...


STAND_INS: dict[str, dict[str, object]] = {
    "vllm": {"__version__": "0.32.0+cpu"},
    "vllm.v1.worker.lora_model_runner_mixin": {"LoRAModelRunnerMixin": Runner},
    "vllm.lora.layers": {"LoRAMapping": Mapping},
    "vllm.lora.request": {"LoRARequest": LoraRequest},
    "vllm.model_executor.layers.linear": {"LinearBase": nn.Linear},
    "vllm.model_executor.layers.vocab_parallel_embedding": {"VocabParallelEmbedding": nn.Embedding},
    "vllm.model_executor.layers.layernorm": {"RMSNorm": Norm, "GemmaRMSNorm": Norm},
    "vllm.v1.engine.input_processor": {"InputProcessor": Processors},
    "vllm.v1.engine.output_processor": {"OutputProcessor": Processors},
    "vllm.v1.sample.logits_processor": {"AdapterLogitsProcessor": Processors},
    "vllm.v1.metrics.loggers": {"PrometheusStatLogger": Processors},
    "vllm.platforms.cpu": {"CpuPlatform": Platform},
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Put the stand-ins where imports find them."""
    made = {}
    for name, members in STAND_INS.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(members)
        monkeypatch.setitem(sys.modules, name, made[name])
    return made


def test_the_versions_that_were_read_are_taken(modules: dict[str, ModuleType]) -> None:
    for version in ("0.28.0", "0.32.0+cpu", "0.33.1"):
        vars(modules["vllm"])["__version__"] = version
        peraxis_vllm.check_vllm()


@pytest.mark.parametrize("version", ["0.27.9", "0.34.0", "1.0.0"])
def test_other_versions_are_refused_in_one_line(modules: dict[str, ModuleType], version: str) -> None:
    vars(modules["vllm"])["__version__"] = version
    with pytest.raises(NotServable, match=rf"^vLLM {version}: .*0\.28.*0\.34.*--backend native$"):
        peraxis_vllm.check_vllm()


@pytest.mark.parametrize(
    ("module", "change"),
    [
        ("vllm.lora.layers", {"LoRAMapping": LoraRequest}),
        ("vllm.model_executor.layers.layernorm", {"RMSNorm": nn.Module}),
        ("vllm.model_executor.layers.linear", {}),
    ],
)
def test_what_has_moved_is_named(
    modules: dict[str, ModuleType], module: str, change: dict[str, object]
) -> None:
    for name in STAND_INS[module]:
        del vars(modules[module])[name]
    vars(modules[module]).update(change)
    with pytest.raises(NotServable, match=rf"vLLM 0\.32\.0 has no {module}"):
        peraxis_vllm.check_vllm()


@pytest.fixture
def registered(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "load_lora_model", Runner.load_lora_model)
    monkeypatch.setattr(Platform, "check_and_update_config", Platform.__dict__["check_and_update_config"])
    peraxis_vllm.register()
    peraxis_vllm.register()


@pytest.mark.usefixtures("registered")
def test_without_its_section_of_the_configuration_vllm_is_as_it_was() -> None:
    config = SimpleNamespace(additional_config={}, lora_config=object())
    runner: Any = Runner()
    assert runner.load_lora_model(nn.Module(), config, CPU) == "stock"
    Platform.check_and_update_config(config)
    assert not Platform.compiles


@pytest.mark.usefixtures("registered")
def test_compilation_stays_on_beside_deltas() -> None:
    lora = object()
    config = SimpleNamespace(additional_config={"peraxis": {"num_slots": 1}}, lora_config=lora)
    Platform.check_and_update_config(config)
    assert Platform.compiles
    assert config.lora_config is lora


class Method:
    """Stands for a quantisation method."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, layer.weight)


class Manager:
    """The manager of a model with two slots, without a model."""

    def __init__(self) -> None:
        self.tables = DeltaTables()
        self.tokens, self.logits = (Rows(16, 2, CPU) for _ in range(2))
        self.missed: list[str] = []
        self.residents: list[ResidentDelta] = []

    def place(self, index: int, delta: dict[str, MatrixDelta]) -> None:
        """Put a delta into a slot, whose memory is kept."""
        self.residents.append(placed(self.tables, new_slot(index), delta))

    def stored(self, name: str) -> str:
        return name

    def rows(self, name: str, num_rows: int, is_head: bool) -> Rows | None:
        if num_rows == self.tokens.num_rows:
            return self.tokens
        self.missed.append(name)
        return None


@pytest.fixture
def manager() -> Iterator[Any]:
    yield Manager()
    POINTS.clear()


def plane(out_features: int, in_features: int, seed: int) -> MatrixDelta:
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(out_features, in_features, generator=generator)
    scales = delta.abs().mean(1), delta.abs().mean(0)
    return MatrixDelta((SignPlane.from_scales(pack_signs(delta), in_features, *scales),))


def test_a_fused_layer_adds_the_deltas_of_its_parts_to_rows_in_any_order(manager: Any) -> None:
    layer: Any = nn.Linear(13, 9, bias=False).requires_grad_(False)
    layer.quant_method = Method()
    first, _ = (manager.tables.add_part(Part(name, size)) for name, size in (("q", 5), ("k", 4)))
    wrap(layer, add_point(Point(manager, "qk", first, [5, 9])))
    assert isinstance(layer.quant_method, Method)
    manager.tables.allocate(2, CPU)
    deltas = [{"q": plane(5, 13, 1), "k": plane(4, 13, 2)}, {"k": plane(4, 13, 3)}]
    for index, delta in enumerate(deltas):
        manager.place(index, delta)
    slots = np.array([1, -1, 0, 1, 0])
    manager.tokens.set(slots)
    x = torch.randn(5, 13, generator=torch.Generator().manual_seed(4))
    got = layer.quant_method.apply(layer, x)
    weights = [layer.weight.clone() for _ in slots]
    for weight, slot in zip(weights, slots, strict=True):
        for name, rows in (("q", slice(0, 5)), ("k", slice(5, 9))):
            if slot >= 0 and name in deltas[slot]:
                weight[rows] += deltas[slot][name].dense()
    want = torch.stack([weight @ row for weight, row in zip(weights, x, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_rows_that_fit_no_rows_of_the_step_stay_the_bases_and_are_reported(manager: Any) -> None:
    layer: Any = nn.Linear(13, 9, bias=False).requires_grad_(False)
    layer.quant_method = Method()
    wrap(layer, add_point(Point(manager, "tower", manager.tables.add_part(Part("t", 9)), [9])))
    manager.tables.allocate(2, CPU)
    manager.place(0, {"t": plane(9, 13, 1)})
    manager.tokens.set(np.zeros(4, dtype=np.int64))
    x = torch.randn(7, 13)
    assert torch.equal(layer.quant_method.apply(layer, x), x @ layer.weight.T)
    assert manager.missed == ["tower"]


def test_an_embedding_looks_up_each_rows_own_delta(manager: Any) -> None:
    layer: Any = nn.Embedding(11, 6).requires_grad_(False)
    layer.quant_method = Method()
    part = manager.tables.add_part(Part("e", 11))
    wrap(layer, embedding=add_point(Point(manager, "e", part, [11], is_embedding=True)))
    manager.tables.allocate(2, CPU)
    delta = plane(11, 6, 1)
    manager.place(1, {"e": delta})
    manager.tokens.set(np.array([1, -1, 1]))
    ids = torch.tensor([3, 3, 10])
    want = torch.stack(
        [*(layer.weight + delta.dense())[[3]], layer.weight[3], *(layer.weight + delta.dense())[[10]]]
    )
    torch.testing.assert_close(layer.quant_method.embedding(layer, ids), want)


class RMSNorm(nn.Module):
    """Stands for vLLM's, whose native form multiplies with the weight unless it is told not to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5, requires_grad=False)
        self.variance_epsilon = 1e-6
        self.pass_weight = self.pass_weight_add = True
        self._forward_method: Callable[..., Any] = self.forward_native

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return self._forward_method(x, residual)

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        scaled = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        scaled = scaled * self.weight if self.pass_weight else scaled
        return scaled if residual is None else (scaled, total)


@pytest.mark.parametrize("shape", [(3, 10), (3, 2, 10)])
def test_a_norm_takes_the_weight_of_each_row(manager: Any, shape: tuple[int, ...]) -> None:
    norm = RMSNorm(10)
    point = NormPoint(manager, norm, "n")
    manager.tables.allocate(2, CPU)
    point.attach(manager)
    own = torch.rand(10) + 0.5
    placed(manager.tables, new_slot(1), {}, {"n.weight": own})
    manager.tokens.set(np.array([-1, 1, 0]))
    x, residual = torch.randn(shape), torch.randn(shape)
    plain, (added, _) = norm(x), norm(x, residual)
    for got, given in ((plain, x), (added, x + residual)):
        scaled = given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + 1e-6)
        for row, weight in enumerate((norm.weight, own, norm.weight)):
            torch.testing.assert_close(got[row], scaled[row] * weight)
    assert point.is_called
