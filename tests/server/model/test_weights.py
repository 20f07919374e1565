"""A base that cannot be served is refused before its weights are read, in one line that names the reason."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltastore import console
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError, NotServable, PeraxisError
from deltastore.fingerprint import fingerprints
from deltastore.servable import own_dtype
from server.model import weights
from server.model.loader import load_model
from server.model.weights import read_base
from tests.helpers.tiny_models import make_pair

CPU = torch.device("cpu")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_pair("llama", tmp_path, changes=()).base


def load(base: Path) -> None:
    load_model(Checkpoint.open(base), CPU, torch.float32, threading.Event())


def configure(base: Path, **changes: Any) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **changes}))


def rewrite(base: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(base / "model.safetensors")
    change(tensors)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the message of the refusal, and check that no tensor was read before."""

    def no_read(*_: object) -> Tensor:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(weights._Reading, "read", no_read)
    with pytest.raises(PeraxisError) as found:
        load(base)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_more_layers_than_the_shards_hold_are_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(base, num_hidden_layers=400)
    message = refused(base, monkeypatch)
    assert "'model.layers.2.self_attn.q_proj.weight', which its config.json asks for, is in none" in message


def test_another_shape_than_the_configuration_s_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(base, intermediate_size=100)
    message = refused(base, monkeypatch)
    assert "mlp.gate_proj.weight' has the shape [92, 64] and its config.json asks for [100, 64]" in message


def test_weights_that_are_not_floats_are_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(base, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    assert "is I8: save the model in bfloat16" in refused(base, monkeypatch)


def test_a_quantised_base_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(base, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert "serve the base in bfloat16" in refused(base, monkeypatch)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": "many"},
        {"num_attention_heads": 0},
        {"hidden_act": "no_such"},
        {"model_type": "no_such"},
        {"model_type": "t5"},
        {"rope_parameters": "all"},
        {"pad_token_id": 999_999},
        {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "no_such"},
    ],
    ids=str,
)
def test_a_configuration_that_makes_no_model_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    configure(base, **changes)
    assert str(base) in (message := refused(base, monkeypatch)) or "model type" in message


def test_a_missing_head_is_refused(base: Path) -> None:
    rewrite(base, lambda tensors: tensors.pop("lm_head.weight"))
    configure(base, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*is in none of its shards"):
        load(base)


def test_nan_in_a_weight_is_refused_as_such(base: Path) -> None:
    rewrite(base, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(torch.nan))
    with pytest.raises(NotServable, match="a weight is NaN or infinite"):
        load(base)


def test_the_fingerprint_is_computed_while_reading(base: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(base)
    _, found = read_base(checkpoint, CPU, torch.bfloat16, threading.Event())
    assert found.fingerprint == fingerprints(checkpoint, cache=tmp_path / "other.json").own


def test_progress_of_reading_is_in_the_log_and_nowhere_else(
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0)
    caplog.set_level("INFO", "server")
    load(base)
    assert sum(message.startswith("reading base:") for message in caplog.messages) > 2
    assert "reading" not in capsys.readouterr().err


def test_a_shard_that_changes_while_it_is_read_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = weights._Reading.read

    def replaced_meanwhile(self: weights._Reading, name: str) -> Tensor:
        tensor = read(self, name)
        rewrite(base, lambda tensors: None)
        return tensor

    monkeypatch.setattr(weights._Reading, "read", replaced_meanwhile)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        load(base)


def test_weights_do_not_depend_on_their_files_after_loading(base: Path) -> None:
    model, _ = read_base(Checkpoint.open(base), CPU, torch.float32, threading.Event())
    weight = model.get_parameter("model.embed_tokens.weight")
    before = weight.clone()
    (base / "model.safetensors").write_bytes(bytes((base / "model.safetensors").stat().st_size))
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("float16", torch.float16),
        ("torch.bfloat16", torch.bfloat16),
        ("auto", torch.float32),
        (None, torch.float32),
    ],
)
def test_the_dtype_is_the_one_that_the_configuration_names_or_that_of_the_weights(
    base: Path, named: str | None, expected: torch.dtype
) -> None:
    configure(base, dtype=named)
    assert own_dtype(Checkpoint.open(base)) == expected
