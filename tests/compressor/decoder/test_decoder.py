"""Tests of `Decoder`: run block by block it equals the whole transformers model, and keeps no more in memory."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import Overlay
from compressor.fidelity import last_hiddens
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError
from tests.compressor.helpers.compressing import rewrite_config
from tests.compressor.helpers.decoders import CPU, RUN, make_model, open_decoder, whole_model
from tests.helpers.tiny_models import Change, make_pair

IDS = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(1))  # longer than every window
ATTENTION = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
GROUPS = {
    "llama": [*ATTENTION, ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]],
    "phi3": [["self_attn.qkv_proj"], ["self_attn.o_proj"], ["mlp.gate_up_proj"], ["mlp.down_proj"]],
    "gpt_neox": [["attention.query_key_value"], ["attention.dense"], ["mlp.dense_h_to_4h"], ["mlp.dense_4h_to_h"]],
    "mixtral": ATTENTION,
}  # fmt: skip


def live_bytes() -> int:
    """Return the bytes of all parameters that are not on the meta device."""
    storages = {
        found.untyped_storage().data_ptr(): found.untyped_storage().nbytes()
        for found in gc.get_objects()
        if type(found) is nn.Parameter and not found.is_meta
    }
    return sum(storages.values())


@pytest.mark.parametrize("architecture", RUN)
def test_hidden_states_and_logits_are_those_of_the_whole_model(architecture: str, tmp_path: Path) -> None:
    path = make_model(architecture, tmp_path)
    with torch.no_grad():
        expected = whole_model(path)(IDS, output_hidden_states=True)
    decoder = open_decoder(path)
    hiddens = decoder.embed([IDS[:2], IDS[2:]])
    seen = [torch.cat(hiddens)]
    for index in range(decoder.num_blocks):
        decoder.advance(decoder.load_block(index), index, hiddens)
        seen.append(torch.cat(hiddens))
    decoder.finish_all(hiddens)
    # transformers lists the last one after its norm.
    seen[-1] = torch.cat(hiddens)
    torch.testing.assert_close(seen, list(expected.hidden_states))
    torch.testing.assert_close(decoder.logits(decoder.load_head(), seen[-1]), expected.logits)


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
def test_logits_of_more_rows_than_a_model_has_positions(architecture: str, tmp_path: Path) -> None:
    path = make_model(architecture, tmp_path)
    decoder = open_decoder(path)
    (hidden,) = last_hiddens(decoder, [IDS])
    with torch.no_grad():
        logits = decoder.logits(decoder.load_head(), hidden.flatten(0, 1)[None])
        torch.testing.assert_close(logits, whole_model(path)(IDS).logits.flatten(0, 1)[None])


def test_experts_are_stored_one_by_one_and_run_fused(tmp_path: Path) -> None:
    decoder = open_decoder(make_model("mixtral", tmp_path))
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in decoder.weights.tensors
    experts = decoder.load_block(0).get_submodule("mlp.experts")
    stored = decoder.weights.read("model.layers.0.block_sparse_moe.experts.3.w2.weight")
    assert torch.equal(experts.get_parameter("down_proj")[3], stored)


@pytest.mark.parametrize("architecture", GROUPS)
def test_linears_come_in_groups_in_the_order_of_the_forward(architecture: str, tmp_path: Path) -> None:
    decoder = open_decoder(make_model(architecture, tmp_path))
    groups = decoder.linears(decoder.load_block(1), 1)
    assert [[linear.path for linear in group] for group in groups] == GROUPS[architecture]


@pytest.mark.parametrize("architecture", RUN)
def test_a_linear_is_named_as_the_checkpoint_names_its_weight(architecture: str, tmp_path: Path) -> None:
    decoder = open_decoder(make_model(architecture, tmp_path))
    block = decoder.load_block(1)
    for linear in (linear for group in decoder.linears(block, 1) for linear in group):
        stored = decoder.weights.read(linear.name)
        assert torch.equal(block.get_submodule(linear.path).get_parameter("weight"), stored)


def test_the_tensors_of_embedding_and_head_are_named(tmp_path: Path) -> None:
    models = make_pair("qwen2", tmp_path, changes=(Change(tied=False),))
    tied, untied = open_decoder(models.base), open_decoder(models.finetunes[0])
    assert (tied.embedding_name, tied.head_name) == ("model.embed_tokens.weight", "model.embed_tokens.weight")
    assert (untied.embedding_name, untied.head_name) == ("model.embed_tokens.weight", "lm_head.weight")


def test_added_tokens_of_a_finetune_are_embedded(tmp_path: Path) -> None:
    path = make_pair("llama", tmp_path, changes=(Change(added_tokens=3),)).finetunes[0]
    decoder = open_decoder(path)
    ids = torch.arange(decoder.num_embeddings - 5, decoder.num_embeddings)[None]
    assert torch.equal(decoder.embed([ids])[0], whole_model(path).get_input_embeddings()(ids).detach())


def test_a_block_goes_when_its_caller_lets_go(tmp_path: Path) -> None:
    decoder = open_decoder(make_model("llama", tmp_path))
    hiddens = decoder.embed([IDS])
    gc.disable()  # it must go at once, not at the next collection
    try:
        block = decoder.load_block(0)
        decoder.linears(block, 0)
        decoder.input_of(block, 0, "mlp.down_proj", hiddens[0])
        decoder.advance(block, 0, hiddens)
        gone = weakref.ref(block)
        del block
        assert gone() is None
    finally:
        gc.enable()


def test_only_two_blocks_have_memory_while_two_models_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_pair("llama", tmp_path, num_hidden_layers=4)
    gc.collect()
    before, loaded, most = live_bytes(), Decoder.load_block, [0]

    def watched(self: Decoder, index: int) -> nn.Module:
        block = loaded(self, index)
        most[0] = max(most[0], live_bytes() - before)
        return block

    monkeypatch.setattr(Decoder, "load_block", watched)
    decoders = [open_decoder(path) for path in (models.base, models.finetunes[0])]
    hiddens = [decoder.embed([IDS]) for decoder in decoders]
    frames = live_bytes() - before
    for index in range(4):
        blocks = [decoder.load_block(index) for decoder in decoders]
        for decoder, block, hidden in zip(decoders, blocks, hiddens, strict=True):
            decoder.advance(block, index, hidden)
        del blocks, block
    assert most[0] == frames + 2 * decoders[0].block_bytes(0)
    assert frames == 2 * 64 * 4  # the last norms alone


def test_hidden_states_are_kept_in_the_dtype_asked_for(tmp_path: Path) -> None:
    decoder = open_decoder(make_model("llama", tmp_path), torch.bfloat16)
    hiddens = decoder.embed([IDS], keep=torch.float32)
    block = decoder.load_block(0)
    decoder.advance(block, 0, hiddens)
    assert hiddens[0].dtype == torch.float32
    assert {parameter.dtype for parameter in block.parameters()} == {torch.bfloat16}
    assert decoder.embed([IDS])[0].dtype == torch.bfloat16


def test_an_overlay_runs_with_the_tensors_put_over_it(tmp_path: Path) -> None:
    path, name = make_model("llama", tmp_path), "model.layers.0.mlp.down_proj.weight"
    checkpoint = Checkpoint.open(path)

    def doubled(wanted: str) -> Tensor | None:
        return 2 * checkpoint.read(name) if wanted == name else None

    decoder = Decoder(Overlay(checkpoint, doubled), CPU, torch.float32)
    model = whole_model(path)
    model.get_parameter(name).data *= 2
    with torch.no_grad():
        assert torch.equal(decoder.streaming_model(0)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("architecture", "num_resident"), [("mistral", 0), ("gpt_neox", 1), ("qwen3_moe", 2)]
)
def test_a_streamed_model_generates_as_transformers_does(
    architecture: str, num_resident: int, tmp_path: Path
) -> None:
    path = make_model(architecture, tmp_path)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = whole_model(path).generate(IDS, attention_mask=torch.ones_like(IDS), generation_config=config)
    model = open_decoder(path).streaming_model(num_resident)
    actual = model.generate(IDS, attention_mask=torch.ones_like(IDS), generation_config=config)
    assert torch.equal(actual, expected)


def test_gradients_flow_through_blocks_last_norm_and_head(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    model = whole_model(path)
    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_(True)
    model(inputs_embeds=embedded).logits.square().mean().backward()
    decoder = open_decoder(path)
    hidden = entry = decoder.embed([IDS])[0].requires_grad_(True)
    for index in range(decoder.num_blocks):
        hidden = decoder.run(decoder.load_block(index), index, hidden)
    decoder.logits(decoder.load_head(), decoder.finish(hidden)).square().mean().backward()
    torch.testing.assert_close(entry.grad, embedded.grad)


def test_a_model_whose_layers_give_more_than_hidden_states_is_refused(tmp_path: Path) -> None:
    decoder = open_decoder(make_model("bloom", tmp_path))
    with pytest.raises(CheckpointError, match=r"'bloom' give more than hidden states.*`text='none'`"):
        decoder.run(decoder.load_block(0), 0, torch.zeros(1, 2, 64))


def test_a_model_whose_layers_read_more_than_hidden_states_is_refused(tmp_path: Path) -> None:
    decoder = open_decoder(make_model("gemma3n_text", tmp_path))
    with pytest.raises(CheckpointError, match=r"'gemma3n_text' read more than hidden states.*`text='none'`"):
        decoder.embed([IDS])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    decoder = open_decoder(path)
    decoder.load_block(0)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*not there"):
        decoder.load_block(1)


def test_a_tensor_of_another_shape_than_the_configuration_says_is_named(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight' has shape \(259, 64\)"):
        open_decoder(path).embed([IDS])


@pytest.mark.parametrize(
    "fields",
    [
        {"pad_token_id": 100_000},
        {"attn_implementation": "flash_attention_2"},
        {"torch_dtype": "auto", "dtype": None},
    ],
    ids=str,
)
def test_a_field_on_which_no_logit_depends_keeps_no_model_from_being_built(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    path = make_model("llama", tmp_path)
    with torch.no_grad():
        expected = whole_model(path)(IDS).logits
    rewrite_config(path, **fields)
    decoder = open_decoder(path)
    (hidden,) = last_hiddens(decoder, [IDS])
    torch.testing.assert_close(decoder.logits(decoder.load_head(), hidden), expected)


def test_a_configuration_that_is_no_decoder_is_refused(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "vit"}))
    with pytest.raises(CheckpointError, match="transformers builds no model"):
        open_decoder(path)
