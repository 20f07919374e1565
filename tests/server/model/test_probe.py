"""The start-up probe accepts rounding errors at any depth and refuses a model that computes something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deltastore.checkpoint import Checkpoint
from deltastore.errors import NotServable
from server.deltas import layers as hooks
from server.deltas.layers import EmbeddingDelta, HeadDelta, LinearDelta, NormDelta
from server.deltas.resident import BatchContext
from server.errors import Draining
from server.kernels.reference import AttentionParams
from server.model import attention
from server.model.attention import PagedAttention
from server.model.loader import ServedModel, load_model
from server.model.probe import NUM_TOKENS
from tests.helpers.tiny_models import VOCAB_SIZE, make_pair

REFUSED = "relative error .* where rounding in .* makes .* is allowed"
DTYPES = (torch.float32, torch.bfloat16)


def load(directory: Path, dtype: torch.dtype, architecture: str = "llama", **config: Any) -> ServedModel:
    base = directory / architecture / "base"
    if not base.exists():
        make_pair(architecture, base.parent, changes=(), dtype=dtype, **config)
    return load_model(Checkpoint.open(base), torch.device("cpu"), dtype, threading.Event())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_64_layers_are_served(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    load(tmp_path, dtype, architecture, num_hidden_layers=64, initializer_range=0.05)


def test_a_wide_model_in_16_bits_is_served(tmp_path: Path) -> None:
    load(tmp_path, torch.bfloat16, hidden_size=2048, intermediate_size=4096, num_attention_heads=32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_many_heads_as_tokens_but_one_are_served(tmp_path: Path, dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 12}
    load(tmp_path, dtype, "gemma3_text", **sizes)


def write_over(base: Path, changes: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint in one file."""
    tensors = load_file(base / "model.safetensors")
    changes(tensors)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def massive(tensors: dict[str, Tensor]) -> None:
    """Give one channel of all tokens an activation far larger than all others."""
    tensors["model.embed_tokens.weight"][:, 3] += 3000


def silent(tensors: dict[str, Tensor]) -> None:
    """Make one layer add nothing, like the layers that block expansion inserts."""
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.1.{name}.weight"].zero_()


@pytest.mark.parametrize("changes", [massive, silent])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unusual_weights_are_served(
    tmp_path: Path, dtype: torch.dtype, changes: Callable[[dict[str, Tensor]], object]
) -> None:
    make_pair("llama", tmp_path / "llama", changes=(), dtype=dtype)
    write_over(tmp_path / "llama" / "base", changes)
    load(tmp_path, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_massive_activation_of_one_token_hides_no_wrong_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def massive_token(tensors: dict[str, Tensor]) -> None:
        first = VOCAB_SIZE // (NUM_TOKENS + 1)
        tensors["model.embed_tokens.weight"][first, 3] += 3000

    make_pair("llama", tmp_path / "llama", changes=(), dtype=dtype, num_hidden_layers=8)
    write_over(tmp_path / "llama" / "base", massive_token)
    load(tmp_path, dtype)
    monkeypatch.setattr(hooks, "LinearDelta", renamed(LinearDelta, "layers.3.self_attn.o_proj", "nowhere"))
    with pytest.raises(NotServable, match=f"layer 3 computes .*{REFUSED}"):
        load(tmp_path, dtype)


def test_a_layer_that_adds_nothing_is_checked_with_its_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pair("llama", tmp_path / "llama", changes=(), dtype=torch.bfloat16)
    write_over(tmp_path / "llama" / "base", silent)
    monkeypatch.setattr(hooks, "LinearDelta", renamed(LinearDelta, "layers.1.mlp.down_proj", "nowhere"))
    with pytest.raises(NotServable, match=f"layer 1 computes .*{REFUSED}"):
        load(tmp_path, torch.bfloat16)


def test_a_model_that_is_not_finite_in_its_dtype_is_refused(tmp_path: Path) -> None:
    make_pair("llama", tmp_path / "llama", changes=(), dtype=torch.float16)
    write_over(tmp_path / "llama" / "base", lambda tensors: tensors["lm_head.weight"].fill_(60000))
    with pytest.raises(NotServable, match=r"not finite in torch\.float16: a weight is NaN or infinite"):
        load(tmp_path, torch.float16)


def renamed(kind: type, old: str, new: str) -> Callable[..., object]:
    """Make a class of layers that apply the delta of another layer."""

    def make(module: nn.Module, name: str, *rest: Any) -> object:
        return kind(module, name.replace(old, new), *rest)

    return make


def head_of_the_embedding(module: nn.Linear, name: str, embedding: str, context: BatchContext) -> HeadDelta:
    """Treat a head as tied to its embedding."""
    return HeadDelta(module, embedding, embedding, context)


def forgetful_embedding(module: nn.Embedding, name: str, context: BatchContext) -> EmbeddingDelta:
    return EmbeddingDelta(module, "model.no_such_embedding", context)


class TwiceNormed(NormDelta):
    """Runs its norm a second time over its own output."""

    def __init__(self, module: nn.Module, name: str, context: BatchContext) -> None:
        super().__init__(module, name, context)
        if name.endswith("layers.1.input_layernorm"):
            module.register_forward_hook(lambda module, args, output: module.forward(output))


LAYERS = 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("LinearDelta", renamed(LinearDelta, "layers.9.mlp.up", "layers.8.mlp.up")),
        ("LinearDelta", renamed(LinearDelta, "layers.3.self_attn.k_proj", "nowhere")),
        ("NormDelta", renamed(NormDelta, "layers.15.input_layernorm", "layers.14.input_layernorm")),
        ("NormDelta", TwiceNormed),
        ("HeadDelta", head_of_the_embedding),
        ("EmbeddingDelta", forgetful_embedding),
    ],
    ids=[
        "linear of another layer",
        "linear without delta",
        "norm of another layer",
        "norm twice",
        "head",
        "embedding",
    ],
)
def test_a_hook_on_the_wrong_layer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str, layer: object
) -> None:
    monkeypatch.setattr(hooks, name, layer)
    with pytest.raises(NotServable, match=REFUSED):
        load(tmp_path, dtype, num_hidden_layers=LAYERS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("architecture", "left_out", "value"),
    [
        ("gemma2", "scaling", None),
        ("gemma2", "softcap", None),
        ("gemma2", "window", None),
        ("gemma3_text", "window", None),
        ("mistral", "window", 4),
    ],
)
def test_attention_that_ignores_what_the_model_asks_for_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    architecture: str,
    left_out: str,
    value: int | None,
) -> None:
    attend = PagedAttention.attend

    def changed(
        self: PagedAttention, layer: int, query: Tensor, key: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        fields = {name: getattr(params, name) for name in ("scaling", "window", "softcap", "sinks")}
        return attend(self, layer, query, key, values, AttentionParams(**{**fields, left_out: value}))

    monkeypatch.setattr(attention.PagedAttention, "attend", changed)
    # The probe shortens windows that are longer than its text.
    config = {} if left_out != "window" else {"sliding_window": 128}
    with pytest.raises(NotServable, match=REFUSED):
        load(tmp_path, dtype, architecture, **config)


def test_a_scaled_embedding_whose_scale_is_missing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unscaled(module: nn.Embedding, name: str, context: BatchContext) -> EmbeddingDelta:
        layer = EmbeddingDelta(module, name, context)
        layer.scale = 1.0
        return layer

    monkeypatch.setattr(hooks, "EmbeddingDelta", unscaled)
    with pytest.raises(NotServable, match=f"the embedding computes .*{REFUSED}"):
        load(tmp_path, torch.bfloat16, "gemma")


def test_windows_are_as_the_model_has_them_when_it_is_served(tmp_path: Path) -> None:
    served = load(tmp_path, torch.float32, "gemma3_text", sliding_window=128)
    own = [module.sliding_window for module in served.model.modules() if hasattr(module, "sliding_window")]
    assert set(own) == {128, None}
    assert served.model.config.sliding_window == 128


def test_loading_ends_early_when_the_server_is_told_to_stop(tmp_path: Path) -> None:
    make_pair("llama", tmp_path, changes=())
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(Draining, match="told to stop"):
        load_model(Checkpoint.open(tmp_path / "base"), torch.device("cpu"), torch.float32, stopping)
