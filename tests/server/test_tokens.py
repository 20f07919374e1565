"""A variant gets, token for token, what `generate()` gives on its merged checkpoint, for every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.compressor.helpers.compressing import enriched
from tests.helpers.tiny_models import ARCHITECTURES, MORE_SERVED, Change, make_pair
from tests.server.helpers.served import generate, make_delta, merged, same_up_to_a_tie, serving

PROMPTS = [[10, 20, 30], list(range(40, 90)), [7] * 11]
NUM_TOKENS = 20
CHANGES = (
    Change(),
    Change(added_tokens=3),
)
UNEXTENDED = ("phi",)  # its output head has a bias, which cannot have added rows


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MORE_SERVED])
def test_a_variant_answers_as_its_merged_checkpoint(architecture: str, tmp_path: Path) -> None:
    changes = CHANGES if architecture not in UNEXTENDED else (Change(), Change())
    models = make_pair(architecture, tmp_path, seed=1, changes=changes)
    deltas = [
        make_delta(models.base, finetune, tmp_path / f"{number}.safetensors", method=method)
        for number, finetune in enumerate(models.finetunes)
        for method in (("both", "per-axis")[number],)
    ]
    references: list[Any] = [AutoModelForCausalLM.from_pretrained(models.base, dtype=torch.float32)]
    references += [
        merged(models.base, delta, tmp_path / f"merged-{number}") for number, delta in enumerate(deltas)
    ]
    with serving(models.base, tmp_path / "registry") as served:
        records = [None, *(served.publish(delta, f"variant-{number}") for number, delta in enumerate(deltas))]
        for prompt in PROMPTS:
            pending = [served.start(record, prompt, max_new_tokens=NUM_TOKENS) for record in records]
            wanted = [generate(reference, prompt, NUM_TOKENS) for reference in references]
            assert len({tuple(tokens) for tokens, _ in wanted}) == len(wanted), (
                "the variants must differ to be told apart"
            )
            for waiting, (tokens, margins) in zip(pending, wanted, strict=True):
                assert same_up_to_a_tie(waiting.answer().token_ids, tokens, margins)


@pytest.mark.parametrize(
    ("base_tied", "change"),
    [
        (True, Change(tied=False)),
        (False, Change(tied=True)),
        (True, Change(added_tokens=2)),
        (False, Change(added_tokens=9)),
    ],
)
@pytest.mark.parametrize("embeddings", ["compress", "whole"])
def test_ties_and_added_tokens_answer_as_merged(
    base_tied: bool, change: Change, embeddings: str, tmp_path: Path
) -> None:
    models = make_pair("llama", tmp_path, seed=2, changes=(change,), tie_word_embeddings=base_tied)
    delta = make_delta(models.base, models.finetunes[0], tmp_path / "d.safetensors", embeddings=embeddings)
    reference = merged(models.base, delta, tmp_path / "merged")
    last = reference.get_input_embeddings().num_embeddings - 1
    with serving(models.base, tmp_path / "registry", slot_headroom=16.0) as served:
        record = served.publish(delta, "variant")
        for prompt in ([1, 2, 3], [last, 5, last]):
            tokens, margins = generate(reference, prompt, NUM_TOKENS)
            assert same_up_to_a_tie(
                served.ask(record, prompt, max_new_tokens=NUM_TOKENS).token_ids, tokens, margins
            )


@pytest.mark.parametrize("change", [Change(), Change(tied=False), Change(added_tokens=2)])
@pytest.mark.parametrize("base_tied", [True, False])
def test_planes_and_residuals_answer_as_merged(base_tied: bool, change: Change, tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, seed=3, changes=(change,), tie_word_embeddings=base_tied)
    plain = make_delta(models.base, models.finetunes[0], tmp_path / "plain.safetensors")
    layer = "model.layers.1"
    forms = {"model.embed_tokens.weight": (2, 1), f"{layer}.self_attn.q_proj.weight": (1, 3)}
    forms |= {f"{layer}.mlp.down_proj.weight": (3, 2)}
    if not base_tied or change.tied is False:
        forms["lm_head.weight"] = (2, 3)
    rich = enriched(plain, tmp_path / "rich.safetensors", forms)
    references = [merged(models.base, delta, delta.with_suffix("")) for delta in (plain, rich)]
    with serving(models.base, tmp_path / "registry", slot_headroom=4.0) as served:
        records = [served.publish(delta, delta.stem) for delta in (plain, rich)]
        for prompt in PROMPTS:
            wanted = [generate(reference, prompt, NUM_TOKENS) for reference in references]
            assert wanted[0][0] != wanted[1][0], "the two must differ to be told apart"
            pending = [served.start(record, prompt, max_new_tokens=NUM_TOKENS) for record in records]
            for waiting, (tokens, margins) in zip(pending, wanted, strict=True):
                assert same_up_to_a_tie(waiting.answer().token_ids, tokens, margins)
