"""vLLM in a process and an environment of its own: answers batches that come as JSON lines on standard input.

The first line is the configuration, and each later one a batch. It imports nothing of this repository, which is not
installed beside vLLM.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    # vLLM logs to standard output, so that answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    # After the redirection of its log.
    import vllm
    from vllm.lora.request import LoRARequest

    config = json.loads(sys.stdin.readline())
    llm = vllm.LLM(config["base"], **config["settings"])
    adapters = [LoRARequest(f"adapter-{i}", i + 1, path) for i, path in enumerate(config["adapters"])]
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        greedy = vllm.SamplingParams(
            temperature=0, max_tokens=batch["num_new"], ignore_eos=True, detokenize=False
        )
        num_tokens = answer(llm, batch["prompts"], greedy, adapters[: batch["num_adapters"]])
        print(json.dumps({"num_tokens": num_tokens}), file=answers, flush=True)


def answer(llm: Any, prompts: list[list[int]], params: Any, adapters: list[Any]) -> int:
    """Generate for all prompts, spread evenly over the adapters; return the number of tokens."""
    chosen = [adapters[i % len(adapters)] for i in range(len(prompts))] if adapters else None
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(inputs, params, lora_request=chosen, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


if __name__ == "__main__":
    main()
