"""Peers of `bench.throughput`, each in a process of its own: answer batches that come as JSON lines on standard input.

`peer_programs.py library` is transformers: merged weights swapped in, and its own batching. `peer_programs.py vllm` is
vLLM, run by an interpreter that has it. The first line is the configuration, and each later one a batch. It imports
nothing of this repository, which is not installed beside vLLM.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

CONTINUOUS_BATCH_TOKENS = 2048

Prompts = Sequence[Sequence[int]]
# Answers a batch and returns the number of generated tokens.
Answer = Callable[[dict[str, Any]], int]


def main(peer: str) -> None:
    # Libraries print warnings and logs to standard output, so that answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loaded, answer = {"library": library, "vllm": vllm}[peer](json.loads(sys.stdin.readline()))
    print(json.dumps(loaded), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps({"num_tokens": answer(json.loads(line))}), file=answers, flush=True)


def vllm(config: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Load vLLM; prompts of a batch are spread evenly over its adapters."""
    # After the redirection of its log.
    import vllm
    from vllm.lora.request import LoRARequest

    llm = vllm.LLM(config["base"], **config["settings"])
    adapters = [LoRARequest(f"adapter-{i}", i + 1, path) for i, path in enumerate(config["adapters"])]

    def answer(batch: dict[str, Any]) -> int:
        greedy = vllm.SamplingParams(
            temperature=0, max_tokens=batch["num_new"], ignore_eos=True, detokenize=False
        )
        own, inputs = (
            adapters[: batch["num_adapters"]],
            [{"prompt_token_ids": ids} for ids in batch["prompts"]],
        )
        chosen = [own[i % len(own)] for i in range(len(inputs))] if own else None
        outputs = llm.generate(inputs, greedy, lora_request=chosen, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return {"version": vllm.__version__}, answer


def library(config: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Load transformers: models for static and continuous batching that share weights, and merged weights."""
    import torch
    from torch import Tensor, nn
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

    def model() -> PreTrainedModel:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(config["base"], dtype="auto")
        # The wrapper of transformers has lost its signature.
        nn.Module.to(loaded, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return loaded

    one, other = model(), model()
    other.load_state_dict(one.state_dict(), assign=True)
    # The merged weights are the base's own, so that the model stays the base. Tied ones are there once.
    merged = [
        {name: value.detach().clone() for name, value in one.named_parameters()}
        for _ in range(config["num_merged"])
    ]

    @torch.inference_mode()
    def static(prompts: Prompts, num_new: int) -> int:
        """Generate as one batch of prompts of the same length."""
        ids = torch.tensor(prompts, device=one.device)
        mask = torch.ones_like(ids)
        output: Tensor = one.generate(  # type: ignore[operator]
            ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False, pad_token_id=0
        )
        return len(prompts) * (output.shape[1] - ids.shape[1])

    def swapped(prompts: Prompts, num_new: int, num_variants: int) -> int:
        """Answer one variant after another, with its merged weights copied from memory over the model's.

        The copies in memory stand for all variants' in turn.
        """
        num_tokens = 0
        for index in range(num_variants):
            one.load_state_dict(merged[index % len(merged)], strict=False)
            num_tokens += static(prompts[index::num_variants], num_new)
        return num_tokens

    def continuous(prompts: Prompts, num_new: int) -> int:
        """Generate with transformers' continuous batching."""
        # It would take 0.9 of free memory for its cache at every call.
        room = ContinuousBatchingConfig(num_blocks=2 * len(prompts), max_batch_tokens=CONTINUOUS_BATCH_TOKENS)
        greedy = GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = other.generate_batch(  # type: ignore[operator]
            prompts, generation_config=greedy, continuous_batching_config=room, progress_bar=False
        )
        return sum(len(output.generated_tokens) for output in outputs.values())

    ways: dict[str, Callable[..., int]] = {"static": static, "swapped": swapped, "continuous": continuous}
    return {}, lambda batch: ways[batch.pop("way")](**batch)


if __name__ == "__main__":
    main(sys.argv[1])
