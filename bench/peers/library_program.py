"""The alternatives inside transformers, in a process of their own: merged weights swapped in, and its own batching.

Started by `contender.py` with a base's directory and a number of merged copies on standard input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

CONTINUOUS_BATCH_TOKENS = 2048

Prompts = Sequence[Sequence[int]]


class Library:
    """Two models that share their weights, one for static and one for continuous batching, and merged weights."""

    def __init__(self, base: str, num_merged: int) -> None:
        self._static, self._continuous = _model(base), _model(base)
        self._continuous.load_state_dict(self._static.state_dict(), assign=True)
        # The merged weights are the base's own, so that the model stays the base. Tied ones are there once.
        self._merged = [
            {name: value.detach().clone() for name, value in self._static.named_parameters()}
            for _ in range(num_merged)
        ]

    @torch.inference_mode()
    def static(self, prompts: Prompts, num_new: int) -> int:
        """Generate as one batch of prompts of the same length; return the number of tokens."""
        ids = torch.tensor(prompts, device=self._static.device)
        mask = torch.ones_like(ids)
        output: Tensor = self._static.generate(  # type: ignore[operator]
            ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False, pad_token_id=0
        )
        return len(prompts) * (output.shape[1] - ids.shape[1])

    def swapped(self, prompts: Prompts, num_new: int, num_variants: int) -> int:
        """Answer one variant after another, with its merged weights copied from memory over the model's.

        The copies in memory stand for all variants' in turn.
        """
        num_tokens = 0
        for index in range(num_variants):
            self._static.load_state_dict(self._merged[index % len(self._merged)], strict=False)
            num_tokens += self.static(prompts[index::num_variants], num_new)
        return num_tokens

    def continuous(self, prompts: Prompts, num_new: int) -> int:
        """Generate with transformers' continuous batching; return the number of tokens."""
        # It would take 0.9 of free memory for its cache at every call.
        room = ContinuousBatchingConfig(num_blocks=2 * len(prompts), max_batch_tokens=CONTINUOUS_BATCH_TOKENS)
        config = GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = self._continuous.generate_batch(  # type: ignore[operator]
            prompts, generation_config=config, continuous_batching_config=room, progress_bar=False
        )
        return sum(len(output.generated_tokens) for output in outputs.values())


def main() -> None:
    # Warnings that libraries print must not mix with answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    config = json.loads(sys.stdin.readline())
    library = Library(config["base"], config["num_merged"])
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        way = batch.pop("way")
        print(json.dumps({"num_tokens": getattr(library, way)(**batch)}), file=answers, flush=True)


def _model(base: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # The wrapper of transformers has lost its signature.
    nn.Module.to(model, device)
    return model


if __name__ == "__main__":
    main()
