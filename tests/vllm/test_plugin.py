"""The plugin without vLLM: stand-ins have what it uses of vLLM's code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import peraxis_vllm
import pytest
import torch
from peraxis_vllm.manager import DeltaManager, linear_cuts
from peraxis_vllm.points import POINTS, NormPoint, Point, add_point, wrap
from torch import Tensor, nn
from transformers import AutoConfig

from deltastore.checkpoint import Checkpoint
from deltastore.errors import ArtifactError, NotServable
from deltastore.format.matrix import MatrixDelta, SignPlane, pack_signs
from server.deltas.resident import DeltaTables, Part, ResidentDelta, Rows, Slot
from server.deltas.sharding import WHOLE, Cut
from tests.helpers.tiny_models import make_pair
from tests.server.helpers.placed import new_slot, placed
from tests.vllm.helpers.environment import SIZES

CPU = torch.device("cpu")


class Runner:
    """Stands for vLLM's model runner."""

    def load_lora_model(self, model: object, vllm_config: object, device: object) -> str:
        return "stock"

    def _get_prompt_logprobs_dict(self, hidden_states: object, num_scheduled_tokens: object) -> None: ...


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


class Vocabulary(nn.Embedding):
    """Stands for vLLM's embedding, and its output head."""

    def __init__(self, num_tokens: int, features: int) -> None:
        super().__init__(num_tokens, features)
        self.quant_method = Method()
        self.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=num_tokens)


class Head(Vocabulary):
    """Stands for vLLM's output head."""


class Logits(nn.Module):
    """Stands for vLLM's processor of logits."""

    def forward(self, lm_head: Any, hidden_states: Tensor) -> Tensor:
        logits: Tensor = lm_head.quant_method.apply(lm_head, hidden_states)
        return logits


class Loader:
    """Stands for vLLM's loader of checkpoints."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        checkpoint = Checkpoint.open(model_config.model)
        return ((name, checkpoint.read(name)) for name in checkpoint.tensors)


LOADERS: dict[str, Any] = {}


def register_model_loader(name: str) -> Callable[[Any], Any]:
    return lambda loader: LOADERS.setdefault(name, loader)


class Processors:
    """Stands for vLLM's processors of inputs, outputs and logits, and for its logger of figures."""

    def process_inputs(self, request_id: str, lora_request: object, resumable: bool) -> None: ...

    @staticmethod
    def assign_request_id(request: object) -> None: ...

    def add_request(self, request: object, prompt: str | None) -> None: ...

    def new_req_logits_processor(self, params: object) -> None: ...

    def record(self, scheduler_stats: object, iteration_stats: object) -> None: ...

    def register_failure_callback(self, callback: object) -> None: ...


STAND_INS: dict[str, dict[str, object]] = {
    "vllm": {"__version__": "0.32.0+cpu"},
    "vllm.v1.worker.lora_model_runner_mixin": {"LoRAModelRunnerMixin": Runner},
    "vllm.lora.layers": {"LoRAMapping": Mapping},
    "vllm.lora.request": {"LoRARequest": LoraRequest},
    "vllm.model_executor.layers.linear": {"LinearBase": nn.Linear},
    "vllm.model_executor.layers.vocab_parallel_embedding": {
        "VocabParallelEmbedding": Vocabulary,
        "ParallelLMHead": Head,
    },
    "vllm.model_executor.layers.logits_processor": {"LogitsProcessor": Logits},
    "vllm.model_executor.model_loader": {"register_model_loader": register_model_loader},
    "vllm.model_executor.model_loader.default_loader": {"DefaultModelLoader": Loader},
    "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": Runner},
    "vllm.model_executor.layers.layernorm": {"RMSNorm": Norm, "GemmaRMSNorm": Norm},
    "vllm.v1.engine.input_processor": {"InputProcessor": Processors},
    "vllm.v1.engine.output_processor": {"OutputProcessor": Processors},
    "vllm.v1.sample.logits_processor": {"AdapterLogitsProcessor": Processors},
    "vllm.v1.metrics.loggers": {"PrometheusStatLogger": Processors},
    "vllm.v1.executor.abstract": {"Executor": Processors},
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
        self.rows_dim = 0
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


class Derived(RMSNorm):
    """Stands for the norm that vLLM puts into models of transformers."""


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(RMSNorm, (3, 10)), (RMSNorm, (3, 2, 10)), (Derived, (1, 3, 10)), (Derived, (1, 3, 2, 10))],
)
def test_a_norm_takes_the_weight_of_each_row(
    manager: Any, kind: type[RMSNorm], shape: tuple[int, ...]
) -> None:
    norm = kind(10)
    manager.rows_dim = int(kind is Derived)
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
            torch.testing.assert_close(got.view(3, -1, 10)[row], scaled.view(3, -1, 10)[row] * weight)
    assert point.is_called


@dataclass
class LoadConfig:
    load_format: str


@dataclass
class ModelConfig:
    """The part of vLLM's configuration that tells of the model."""

    model: Path
    num_tokens: int
    dtype: torch.dtype = torch.float32

    def get_vocab_size(self) -> int:
        return self.num_tokens

    @property
    def hf_config(self) -> Any:
        return AutoConfig.from_pretrained(self.model)


class Model(nn.Module):
    """An embedding and a head with rows for `num_added` more tokens than the checkpoint has."""

    def __init__(self, checkpoint: Checkpoint, num_added: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens, self.lm_head = (
            kind(NUM_TOKENS + num_added, WIDTH).requires_grad_(False) for kind in (Vocabulary, Head)
        )
        for module, name in (
            (self.model.embed_tokens, "model.embed_tokens.weight"),
            (self.lm_head, "lm_head.weight"),
        ):
            module.weight.zero_()[:NUM_TOKENS] = checkpoint.read(name)
        self.logits_processor = Logits()

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits


NUM_TOKENS, WIDTH, NUM_ADDED = 259, 128, 4


def model_of(manager: DeltaManager) -> Any:
    return manager.model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    pair = make_pair("qwen3", tmp_path_factory.mktemp("pair"), seed=1, **SIZES)
    return Checkpoint.open(pair.base)


@pytest.fixture
def with_room(modules: dict[str, ModuleType], base: Checkpoint) -> Iterator[DeltaManager]:
    """The manager of a model with room for tokens that variants add, called once as at start."""
    config = SimpleNamespace(
        model_config=ModelConfig(base.path, NUM_TOKENS + NUM_ADDED),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16, max_num_seqs=4),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    manager = DeltaManager(Model(base, NUM_ADDED), config, CPU, {"num_slots": 2, "slot_headroom": 1.15})
    for point in manager.points:
        point.is_called = True
    yield manager
    POINTS.clear()


def added_rows(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return {
        name: torch.randn(count, WIDTH, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }


def put(manager: DeltaManager, slot: int, num_added: int) -> dict[str, Tensor]:
    """Put a delta with more tokens into a slot. Return the embedding and the head that it makes."""
    deltas = {
        name: plane(NUM_TOKENS, WIDTH, slot) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    added = added_rows(num_added)
    slot_memory = new_slot(slot)
    KEPT.append(slot_memory)
    placed(manager.tables, slot_memory, deltas, added=added)
    return {
        name: torch.cat([manager.checkpoint.read(name) + delta.dense(), added[name]])
        for name, delta in deltas.items()
    }


KEPT: list[Slot] = []


def test_rows_have_the_tokens_of_their_own_variants_alone(with_room: DeltaManager) -> None:
    manager, model = with_room, model_of(with_room)
    own = [put(manager, slot, num_added) for slot, num_added in enumerate((2, NUM_ADDED))]
    slots = np.array([1, -1, 0, 1])
    manager.tokens.set(slots)
    manager.logits.set(slots)
    ids = torch.tensor([NUM_TOKENS + 3, 7, NUM_TOKENS + 1, 8])
    embedded = model.model.embed_tokens.quant_method.embedding(model.model.embed_tokens, ids)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    logits = model.compute_logits(x)
    for row, slot in enumerate(slots):
        names = ("model.embed_tokens.weight", "lm_head.weight")
        embedding, head = (manager.checkpoint.read(name) if slot < 0 else own[slot][name] for name in names)
        torch.testing.assert_close(embedded[row], embedding[ids[row]], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits[row, : len(head)], head @ x[row], rtol=1e-4, atol=1e-4)
        assert (logits[row, len(head) :] == -torch.inf).all()
    # Rows that are not assigned to sequences get the base's tokens alone.
    assert (model.compute_logits(x[:3])[:, NUM_TOKENS:] == -torch.inf).all()
    assert manager.take_fault() is not None


def test_a_delta_with_more_tokens_than_there_is_room_for_is_refused(with_room: DeltaManager) -> None:
    put(with_room, 0, NUM_ADDED)
    with pytest.raises(
        ArtifactError, match=f"for {NUM_TOKENS + 5} tokens, and this vLLM for {NUM_TOKENS + 4}"
    ):
        put(with_room, 0, NUM_ADDED + 1)


def test_every_prompt_is_scored_with_its_own_delta(with_room: DeltaManager) -> None:
    manager, model = with_room, model_of(with_room)
    own = [put(manager, slot, 1)["lm_head.weight"] for slot in range(2)]
    heads = {"base": model.lm_head.weight[:NUM_TOKENS], "first": own[0], "second": own[1]}
    loras = {"base": None, "first": LoraRequest("a", 1, ""), "second": LoraRequest("b", 2, "")}
    x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1))
    seen: list[str] = []

    class Scoring:
        """A runner that scores three rows of each request; the last chunk of all but one."""

        def __init__(self) -> None:
            self.num_prompt_logprobs = dict.fromkeys(loras, 1)
            self.requests = {name: SimpleNamespace(lora_request=lora) for name, lora in loras.items()}

        def _get_prompt_logprobs_dict(self, hidden_states: Tensor) -> dict[str, Tensor]:
            found = {}
            for name in list(self.num_prompt_logprobs):
                seen.append(name)
                first = 3 * list(loras).index(name)
                found[name] = model.compute_logits(hidden_states[first : first + 3])
                if name != "second":
                    del self.num_prompt_logprobs[name]
            return found

    runner = Scoring()
    # Of the step, whose rows of logits are others.
    manager.tokens.set(np.array([0, 0, 1, 1, -1, 1]))
    manager.logits.set(np.array([1]))
    manager.score_prompts(runner)
    found = runner._get_prompt_logprobs_dict(x)
    assert seen == list(loras) == list(found)
    for number, (name, head) in enumerate(heads.items()):
        want = x[3 * number : 3 * number + 3] @ head.T
        torch.testing.assert_close(found[name][:, : len(head)], want, rtol=1e-4, atol=1e-4)
        assert (found[name][:, len(head) :] == -torch.inf).all()
    assert runner.num_prompt_logprobs == {"second": 1}


@pytest.mark.usefixtures("registered")
def test_a_base_is_loaded_into_a_larger_vocabulary(base: Checkpoint) -> None:
    loader = LOADERS[peraxis_vllm.LOAD_FORMAT](LoadConfig(peraxis_vllm.LOAD_FORMAT))
    assert loader.load_config.load_format == "auto"
    read = dict(loader.get_all_weights(ModelConfig(base.path, NUM_TOKENS + NUM_ADDED), None))
    assert read.keys() == base.tensors.keys()
    for name, tensor in read.items():
        rows = base.read(name)
        is_padded = name in ("model.embed_tokens.weight", "lm_head.weight")
        assert len(tensor) == len(rows) + (NUM_ADDED if is_padded else 0)
        assert torch.equal(tensor[: len(rows)], rows)
        assert not tensor[len(rows) :].any()


LINEAR: dict[str, Any] = {"tp_size": 4, "tp_rank": 3, "input_size": 24, "output_size": 32}


@pytest.mark.parametrize(
    ("module", "num_parts", "cuts", "sizes"),
    [
        ({**LINEAR, "tp_size": 1, "tp_rank": 0}, 1, [WHOLE], [32]),
        # As a replicated layer.
        (LINEAR, 1, [WHOLE], [32]),
        ({**LINEAR, "output_partition_sizes": [8]}, 1, [Cut(((24, 32),))], [8]),
        ({**LINEAR, "input_size_per_partition": 6}, 1, [Cut(columns=(18, 24))], [32]),
        # Gate and up, of two tensors and of one.
        ({**LINEAR, "output_partition_sizes": [4, 4]}, 2, [Cut(((12, 16),)), Cut(((12, 16),))], [4, 4]),
        ({**LINEAR, "output_partition_sizes": [4, 4]}, 1, [Cut(((12, 16), (28, 32)))], [8]),
        # Queries, and two heads of keys and values for four ranks.
        (
            {**LINEAR, "output_size": 48, "output_partition_sizes": [4, 4, 4], "num_kv_head_replicas": 2},
            3,
            [Cut(((12, 16),)), Cut(((4, 8),)), Cut(((4, 8),))],
            [4, 4, 4],
        ),
        (
            {**LINEAR, "output_size": 48, "output_partition_sizes": [4, 4, 4], "num_kv_head_replicas": 2},
            1,
            [Cut(((12, 16), (20, 24), (28, 32)))],
            [12],
        ),
    ],
)
def test_a_rank_has_the_share_of_a_layer_that_vllm_gives_it(
    module: dict[str, Any], num_parts: int, cuts: list[Cut], sizes: list[int]
) -> None:
    assert linear_cuts("layer", SimpleNamespace(**module), num_parts) == (cuts, sizes)


def test_a_layer_that_is_divided_in_another_way_is_refused() -> None:
    module = SimpleNamespace(**{**LINEAR, "input_size_per_partition": 6, "output_partition_sizes": [8]})
    with pytest.raises(NotServable, match=r"divide layer in a way .* --tensor-parallel-size 1"):
        linear_cuts("layer", module, 1)
