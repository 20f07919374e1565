"""Run a checkpoint with transformers alone: greedy tokens of a prompt, or the logits of one text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.real.models import TEXT_TOKENS


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt")
    parser.add_argument("--num-new", type=int, default=16)
    parser.add_argument("--logits", type=Path, help="write the text's logits there")
    args = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=getattr(torch, args.dtype))
    if args.logits:
        ids = torch.arange(1, 1 + TEXT_TOKENS)[None] * 7
        torch.save(model(input_ids=ids, use_cache=False).logits[0].float(), args.logits)
        return
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    ids = tokenizer(args.prompt, return_tensors="pt").input_ids
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.num_new, do_sample=False, pad_token_id=0
    )
    print(json.dumps({"token_ids": output[0, ids.shape[1] :].tolist()}))


if __name__ == "__main__":
    main()
