"""Packed and widened layers of the base compute torch's own product, and others stay as they are."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from deltastore.checkpoint import Checkpoint
from deltastore.errors import NotServable
from server.model import loader
from server.model.loader import (
    MIN_WIDENED_ROWS,
    PackedLinear,
    WidenedLinear,
    load_model,
    pack,
    packable,
    widen,
)
from server.model.weights import read_base
from tests.helpers.tiny_models import make_pair

CPU = torch.device("cpu")
# One rounding of bfloat16: sums in another order may be rounded the other way.
HALF_STEP = 2**-7
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this processor"
)


def drawn_layer(in_features: int, out_features: int, *, bias: bool) -> nn.Linear:
    torch.manual_seed(in_features)
    return nn.Linear(in_features, out_features, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


def bfloat16_base(directory: Path, **config: Any) -> Path:
    return make_pair("llama", directory, changes=(), dtype=torch.bfloat16, **config).base


def check(layer: nn.Linear, x: Tensor) -> None:
    """Compare a layer with its packed copy."""
    packed = copy.deepcopy(layer)
    pack(packed)
    torch.testing.assert_close(packed(x), layer(x), rtol=HALF_STEP, atol=HALF_STEP)


@needs_bfloat16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
@pytest.mark.parametrize("shape", [(1, 1), (13, 7), (64, 32), (333, 259)])
@torch.inference_mode()
def test_a_packed_layer_computes_the_same_product(shape: tuple[int, int], num_rows: int, bias: bool) -> None:
    check(drawn_layer(*shape, bias=bias), torch.randn(1, num_rows, shape[0]).bfloat16())


@needs_bfloat16
@torch.inference_mode()
def test_inputs_may_be_strided_or_without_rows() -> None:
    layer = drawn_layer(40, 24, bias=True)
    check(layer, torch.randn(40, 6).bfloat16().T)
    check(layer, torch.randn(5, 80).bfloat16()[:, 3:43])
    check(layer, torch.randn(1, 0, 40).bfloat16())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, MIN_WIDENED_ROWS - 1, MIN_WIDENED_ROWS, 33])
@pytest.mark.parametrize("shape", [(1, 1), (13, 7), (333, 259)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_a_widened_layer_computes_the_same_product_in_blocks(
    dtype: torch.dtype, shape: tuple[int, int], num_rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "WIDENED_WEIGHTS", 100 * shape[0])
    layer = drawn_layer(*shape, bias=bias).to(dtype)
    exact = copy.deepcopy(layer).double()
    widen(layer)
    for x in (
        torch.randn(1, num_rows, shape[0]),
        torch.randn(num_rows, shape[0] + 3)[:, 3:],
        torch.randn(2, num_rows, shape[0]),
    ):
        y = layer(x.to(dtype))
        assert y.dtype == dtype
        torch.testing.assert_close(y, exact(x.to(dtype).double()).to(dtype), rtol=HALF_STEP, atol=HALF_STEP)


@torch.inference_mode()
def test_a_widened_layer_takes_no_rows() -> None:
    layer = drawn_layer(40, 24, bias=True)
    widen(layer)
    assert layer(torch.randn(1, 0, 40).bfloat16()).shape == (1, 0, 24)


@pytest.mark.parametrize("is_slow", [True, False])
def test_where_16_bits_are_slow_all_layers_are_widened_a_tied_head_too(
    is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_is_slow", lambda dtype: is_slow and dtype == torch.bfloat16)
    monkeypatch.setattr(loader, "_has_instructions", lambda: False)
    directory = bfloat16_base(tmp_path, tie_word_embeddings=True)
    for dtype in (torch.bfloat16, torch.float32):
        served = load_model(Checkpoint.open(directory), CPU, dtype, threading.Event())
        layers = [module for module in served.model.modules() if isinstance(module, nn.Linear)]
        widened = [layer for layer in layers if isinstance(layer.forward, WidenedLinear)]
        assert widened == (layers if is_slow and dtype == torch.bfloat16 else [])


@needs_bfloat16
def test_a_bfloat16_base_is_packed_except_a_head_tied_to_its_embedding(tmp_path: Path) -> None:
    for tied in (True, False):
        directory = bfloat16_base(tmp_path / str(tied), tie_word_embeddings=tied)
        served = load_model(Checkpoint.open(directory), CPU, torch.bfloat16, threading.Event())
        plain = {
            name
            for name, module in served.model.named_modules()
            if isinstance(module, nn.Linear) and not isinstance(module.forward, PackedLinear)
        }
        assert plain == ({"lm_head"} if tied else set())


def test_a_float32_base_keeps_torchs_own_product(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_pair("llama", tmp_path, changes=()).base)
    model, _ = read_base(checkpoint, CPU, torch.float32, threading.Event())
    assert packable(model) == []


@needs_bfloat16
def test_the_weights_of_packed_layers_are_counted(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(bfloat16_base(tmp_path))
    served = load_model(checkpoint, CPU, torch.bfloat16, threading.Event())
    assert served.weight_bytes == sum(stored.num_bytes for stored in checkpoint.tensors.values())


@needs_bfloat16
def test_a_model_that_reads_the_weight_of_a_packed_layer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: LlamaMLP, x: Tensor) -> Tensor:
        gate = nn.functional.linear(x, self.gate_proj.weight)
        down: Tensor = self.down_proj(nn.functional.silu(gate) * self.up_proj(x))
        return down

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    checkpoint = Checkpoint.open(bfloat16_base(tmp_path))
    with pytest.raises(NotServable, match="cannot run with its layers replaced"):
        load_model(checkpoint, CPU, torch.bfloat16, threading.Event())
