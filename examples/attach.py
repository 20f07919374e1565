"""Answer prompts as several variants of one base, side by side in one batch of transformers.

Run it as: python examples/attach.py BASE PROMPT DELTA [DELTA ...]
"""

import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import peraxis


def main(base: str, prompt: str, *deltas: str) -> None:
    """Print what the base and each variant write after a prompt."""
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    inputs = tokenizer([prompt] * (1 + len(deltas)), return_tensors="pt")
    names = [None, *(Path(delta).stem for delta in deltas)]
    with (
        peraxis.attach(model, {Path(delta).stem: delta for delta in deltas}) as attached,
        attached.using(names),
    ):
        tokens = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    for name, row in zip(names, tokens, strict=True):
        print(f"{name or 'base'}: {tokenizer.decode(row, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
