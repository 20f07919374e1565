"""Continue the same text with base, fine-tune and delta, greedily, for people to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compressor.io.side_files import generation_file, tokenizer_files
from deltastore.base.checkpoint import Checkpoint
from deltastore.errors import CheckpointError
from deltastore.format.header import parse_json

# For types alone, because it imports transformers, which takes seconds.
if TYPE_CHECKING:
    from compressor.blockwise.weights import Weights

PROMPT_TOKENS = 48
NEW_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and each model's continuation, decoded with special tokens."""

    prompt: str
    base: str
    finetune: str
    delta: str


def examples(
    base: Weights,  # from `base_with_added_rows`, so that it has the fine-tune's vocabulary
    finetune: Checkpoint,
    delta: Weights,
    texts: Sequence[Tensor],  # [tokens] int64 each, valid for the fine-tune
    device: torch.device,
) -> list[Example]:
    """Continue the first half of each text, at most 48 tokens of it, by up to 40 tokens, one model after the other.

    A continuation ends with the fine-tune's end-of-text token. Blocks that do not fit into memory are read again for
    every token.

    Returns:
        One example per text; none if the fine-tune has no tokenizer.

    Raises:
        CheckpointError: a tokenizer that cannot be loaded, a model that cannot be run or whose logits are not finite.
    """
    if not texts or not tokenizer_files(finetune):
        return []
    # Deferred, because both import transformers, which takes seconds.
    from compressor.blockwise.decoder import Decoder
    from compressor.io.tokenizer import load_tokenizer

    tokenizer, ends = load_tokenizer(finetune.path), _end_ids(finetune)
    length = max(1, min(PROMPT_TOKENS, *(len(text) // 2 for text in texts)))
    prompts = torch.stack([text[:length] for text in texts])
    written = [
        _continued(Decoder(weights, device, torch.float32), prompts, ends)
        for weights in (base, finetune, delta)
    ]
    return [
        Example(_decoded(tokenizer, prompt), *(_continuation(tokenizer, prompt, ids[row]) for ids in written))
        for row, prompt in enumerate(prompts.tolist())
    ]


@torch.no_grad()
def _continued(decoder: Any, prompts: Tensor, ends: frozenset[int]) -> list[list[int]]:
    """Return the new ids of each prompt of ``[sequences, tokens]``, up to and including the first end token."""
    # Deferred, because it imports transformers, which takes seconds.
    from compressor.blockwise.sampling import GenerationPlan, free_bytes

    length = prompts.shape[1] + NEW_TOKENS
    most = getattr(decoder.config.get_text_config(), "max_position_embeddings", None) or length
    plan = GenerationPlan.of(decoder, length, free_bytes(decoder.device))
    model = decoder.streaming_model(plan.num_resident_blocks)
    ids, cache = prompts.to(decoder.device), None
    rows: list[list[int]] = [[] for _ in prompts]
    for _ in range(min(length, most) - prompts.shape[1]):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = output.logits[:, -1], output.past_key_values
        if not torch.isfinite(logits).all():
            raise CheckpointError(
                f"{decoder.weights.path}: its logits are not finite: "
                "the checkpoint is damaged, or its training diverged"
            )
        ids = logits.argmax(-1, keepdim=True)
        for row, token in zip(rows, ids[:, 0].tolist(), strict=True):
            if ends.isdisjoint(row):
                row.append(token)
        if not any(ends.isdisjoint(row) for row in rows):
            break
    return rows


def _continuation(tokenizer: Any, prompt: list[int], new: list[int]) -> str:
    """Return the new text, decoded together with the prompt if possible: a tokenizer may drop a leading space."""
    before, text = _decoded(tokenizer, prompt), _decoded(tokenizer, prompt + new)
    return text[len(before) :] if text.startswith(before) else _decoded(tokenizer, new)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _end_ids(finetune: Checkpoint) -> frozenset[int]:
    facts = parse_json(generation_file(finetune), str(finetune.path))
    ends = facts.get("eos_token_id") if isinstance(facts, dict) else None
    return frozenset(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int))
