"""Programs that `bench.real` runs in processes of their own: `python -m bench.real_programs NAME ARGUMENTS`.

- `load CHECKPOINT`: load with safetensors into memory of its own, shard by shard, and print the time.
- `generate CHECKPOINT PROMPT NUM_NEW`: print the greedy tokens of a prompt by transformers alone, in float32.
- `logits CHECKPOINT FILE`: write the logits of one text by transformers alone, in bfloat16.
- `served-logits BASE ARTIFACT VARIANT_FILE BASE_FILE`: write a variant's and the base's logits of that text by the
  delta-aware model, as a step of the engine does.

A program imports what it needs alone, because its memory is measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Of the text whose logits are compared.
TEXT_TOKENS = 64


def load(checkpoint: str) -> None:
    from safetensors.torch import load_file

    start, mapped_s, owned = time.perf_counter(), 0.0, dict[str, Tensor]()
    for shard in sorted(Path(checkpoint).glob("*.safetensors")):
        begun = time.perf_counter()
        # On a CPU safetensors maps the file, and the first touch reads it.
        tensors = load_file(shard)
        mapped_s += time.perf_counter() - begun
        owned |= {name: tensor.clone() for name, tensor in tensors.items()}
    total_s = time.perf_counter() - start
    num_bytes = sum(tensor.nbytes for tensor in owned.values())
    print(
        json.dumps(
            {"load_file_s": mapped_s, "clone_s": total_s - mapped_s, "total_s": total_s, "bytes": num_bytes}
        )
    )


@torch.inference_mode()
def generate(checkpoint: str, prompt: str, num_new: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(checkpoint)(prompt, return_tensors="pt").input_ids
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=int(num_new), do_sample=False, pad_token_id=0
    )
    print(json.dumps({"token_ids": output[0, ids.shape[1] :].tolist()}))


@torch.inference_mode()
def logits(checkpoint: str, file: str) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    ids = torch.arange(1, 1 + TEXT_TOKENS)[None] * 7
    torch.save(model(input_ids=ids, use_cache=False).logits[0].float(), file)


def served_logits(base: str, artifact: str, variant_file: str, base_file: str) -> None:
    import threading

    from deltastore.checkpoint import Checkpoint
    from deltastore.format.artifact import Artifact
    from server.deltas.resident import ResidentDelta, Slot
    from server.engine.model_runner import ModelRunner, ScheduledSequence
    from server.engine.sequence import Sequence
    from server.model.loader import load_model
    from server.protocol.request import Request, SamplingParams, token_ids_of

    cpu = torch.device("cpu")
    served = load_model(Checkpoint.open(Path(base)), cpu, torch.bfloat16, threading.Event())
    num_pages = -(-TEXT_TOKENS // served.attention.page_tokens)
    served.attention.allocate(1 + num_pages)
    served.context.allocate(1, TEXT_TOKENS, cpu)

    def computed(delta: ResidentDelta | None) -> Tensor:
        ids = token_ids_of(7 * token for token in range(1, 1 + TEXT_TOKENS))
        # With prompt log-probabilities the logits of every token are computed.
        params = SamplingParams(prompt_logprobs=0)
        sequence = Sequence(Request("bench", "default", None, None, ids, 1 + max(ids), params), 0)
        sequence.page_table.pages = list(range(1, 1 + num_pages))
        batch = [ScheduledSequence(sequence, len(ids), delta)]
        return ModelRunner(served).forward(batch, sequence.page_table.pages)

    torch.save(computed(None), base_file)
    with Artifact.open(Path(artifact)) as opened, open(artifact, "rb") as file:
        memory = torch.empty(opened.manifest.device_bytes, dtype=torch.uint8)
        file.seek(opened.header.data_start)
        file.readinto(memory.numpy().data)
        tables = served.context.tables
        delta = tables.adopt(tables.layout(opened.header, opened.manifest, ""), Slot(0, memory))
    torch.save(computed(delta), variant_file)


PROGRAMS: dict[str, Callable[..., None]] = {
    "load": load,
    "generate": generate,
    "logits": logits,
    "served-logits": served_logits,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
