"""Measure `peraxis.attach`: its time beside the server's load of the same file, its memory, and decoding with it.

The first part attaches a delta with the shapes of Llama-3.1-8B to a model of that size, in turns with the load that a
server makes of the file; both end with every byte in memory that was never touched, and the file is in the page cache.
The model is zeros that take no memory, of a sparse checkpoint, whose fingerprint is computed once before. The second
part generates tokens with a model of 1.1B random weights, in turns bare and with deltas attached.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import peraxis
from bench.engine import SHAPES, SMALL, prompts, write_base
from bench.harness import (
    THREADS,
    Bench,
    Report,
    at_most,
    fixed,
    ms,
    option,
    rounded,
    say,
    seconds,
    table_of,
    text,
)
from bench.process import memory_of
from bench.synthetic import LlamaShapes, write_delta
from deltastore.base import Base
from deltastore.checkpoint import SINGLE_FILE, Checkpoint
from deltastore.format.header import TensorEntry, encode_header
from deltastore.loader import Loader
from deltastore.verified_object import ObjectSource

PROMPT_TOKENS = 16
BF16_BYTES = 2
LOAD_COLUMNS = {
    "what": text("what"),
    "median, ms": ms("median_s"),
    "fastest, ms": ms("least_s"),
    "slowest, ms": ms("most_s"),
}
DECODE_COLUMNS = {
    "rows": text("rows"),
    "variants": text("variants"),
    "bare, ms a token": ms("bare_s", 2),
    "attached, ms a token": ms("attached_s", 2),
    "attached / bare": fixed("ratio", 2),
}


@dataclass(frozen=True, slots=True)
class AttachScope:
    """Sizes of both parts."""

    attached: LlamaShapes
    decoded: LlamaShapes
    new_tokens: int
    compositions: Sequence[tuple[int, int]]  # rows of a batch, and the variants among them


FULL = AttachScope(
    LlamaShapes(32, hidden=4096, intermediate=14336, kv=1024, vocabulary=128256, head_dim=128),
    SHAPES["1.1b"],
    32,
    ((1, 1), (4, 1), (4, 4)),
)
SMALL_SCOPE = AttachScope(SMALL, SMALL, 4, ((1, 1), (4, 2)))


def write_sparse_base(directory: Path, shapes: LlamaShapes) -> Path:
    """Write a checkpoint of zeros in bfloat16 that takes next to no disk."""
    directory.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.intermediate,
        "num_hidden_layers": shapes.num_layers,
        "num_attention_heads": shapes.hidden // shapes.head_dim,
        "num_key_value_heads": shapes.kv // shapes.head_dim,
        "vocab_size": shapes.vocabulary,
        "tie_word_embeddings": shapes.tied,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    entries, end = list[TensorEntry](), 0
    for name, shape in shapes.tensors():
        num_bytes = BF16_BYTES * torch.Size(shape).numel()
        entries.append(TensorEntry(name, "BF16", shape, end, end + num_bytes))
        end += num_bytes
    with (directory / SINGLE_FILE).open("wb") as file:
        file.write(encode_header(entries, {"format": "pt"}))
        file.truncate(file.tell() + end)
    return directory


def zeros_of(base: Path) -> Any:
    """Return the model of a checkpoint of zeros, whose pages are not in memory before something writes to them."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.bfloat16)
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            zeros = torch.zeros(value.shape, dtype=value.dtype)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    return model.eval()


def attach_times(directory: Path, shapes: LlamaShapes, repeats: int, threads: int) -> dict[str, Any]:
    """Time `attach` and a server's load of the same file in turns; measure the memory that `attach` takes."""
    base = write_sparse_base(directory / "zeros", shapes)
    identity = Base.of(Checkpoint.open(base))
    source = write_delta(directory / "zeros.safetensors", shapes, files={}, base=identity)
    model = zeros_of(base)
    times: dict[str, list[float]] = {"attach": [], "load": []}
    grown = []
    loader = Loader(torch.device("cpu"), threads)
    try:
        # The first turn fills the page cache and is not counted.
        for turn in range(repeats + 1):
            load_s = _load_s(loader, source)
            before = memory_of(os.getpid())["RssAnon"]
            with ExitStack() as attached:
                attach_s = seconds(partial(_attach, attached, model, source.path, base))
                grown.append(memory_of(os.getpid())["RssAnon"] - before)
            if turn:
                times["load"].append(load_s)
                times["attach"].append(attach_s)
            say(f"attached {turn} of {repeats} times")
    finally:
        loader.close()
    return {
        "device_bytes": source.device_bytes,
        "grown_bytes": max(grown),
        "times": {
            what: {"median_s": median(values), "least_s": min(values), "most_s": max(values)}
            for what, values in times.items()
        },
    }


def _attach(opened: ExitStack, model: Any, path: Path, base: Path) -> None:
    opened.enter_context(peraxis.attach(model, path, base=base))


def _load_s(loader: Loader, source: ObjectSource) -> float:
    host, slot = (torch.empty(source.device_bytes, dtype=torch.uint8) for _ in range(2))
    return loader.load(source, host, slot).total_s


def decode_times(directory: Path, scope: AttachScope, repeats: int) -> Iterator[dict[str, Any]]:
    """Time the tokens of `generate`, bare and attached in turns; yield a row for each composition."""
    base = write_base(directory / "base", scope.decoded)
    identity = Base.of(Checkpoint.open(base))
    most = max(variants for _, variants in scope.compositions)
    deltas = {
        f"v{seed}": write_delta(
            directory / f"v{seed}.safetensors", scope.decoded, seed, files={}, base=identity
        ).path
        for seed in range(1, most + 1)
    }
    model: Any = AutoModelForCausalLM.from_pretrained(base).eval()
    for rows, variants in scope.compositions:
        ids = torch.tensor(prompts(rows, PROMPT_TOKENS, scope.decoded.vocabulary))
        names = [*deltas][:variants]
        bare, with_deltas = [], []
        for turn in range(repeats + 1):
            bare_s = _token_s(model, ids, scope.new_tokens)
            with (
                peraxis.attach(model, {name: deltas[name] for name in names}, base=base) as attached,
                attached.using([names[row % variants] for row in range(rows)]),
            ):
                attached_s = _token_s(model, ids, scope.new_tokens)
            # Kernels are compiled in the first turn.
            if turn:
                bare.append(bare_s)
                with_deltas.append(attached_s)
        say(f"{rows} rows of {variants} variants done")
        ratio = median(with_deltas) / median(bare)
        yield {
            "rows": rows,
            "variants": variants,
            "bare_s": median(bare),
            "attached_s": median(with_deltas),
            "ratio": ratio,
        }


def _token_s(model: Any, ids: torch.Tensor, num_new: int) -> float:
    """Return the seconds of each token of `generate` behind the first, which comes with the prompt."""
    generate = partial(
        model.generate, ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0
    )
    first, whole = (
        seconds(partial(generate, max_new_tokens=count, min_new_tokens=count)) for count in (1, 1 + num_new)
    )
    return max(0.0, whole - first) / num_new


def report(args: Namespace) -> Report:
    scope = SMALL_SCOPE if args.small else FULL
    torch.set_num_threads(args.threads)
    attached = rounded(attach_times(args.directory, scope.attached, args.repeats, args.threads))
    decoded = [rounded(row) for row in decode_times(args.directory, scope, args.repeats)]
    times = attached["times"]
    lines = [
        {"what": what, **times[name]} for what, name in (("the server's load", "load"), ("attach", "attach"))
    ]
    memory = attached["grown_bytes"] / attached["device_bytes"]
    return Report(
        {
            "repeats": args.repeats,
            "threads": args.threads,
            "new_tokens": scope.new_tokens,
            "statistic": "median",
        },
        {"attach": attached, "decode": decoded},
        [table_of(LOAD_COLUMNS, lines), table_of(DECODE_COLUMNS, decoded)],
        [
            at_most(
                "attach / the server's load", times["attach"]["median_s"] / times["load"]["median_s"], 1.2
            ),
            at_most("memory that attach adds / the delta's device bytes", memory, 1.1),
            at_most("decoding one row, attached / bare", decoded[0]["ratio"], 1.5),
        ],
        conditions=f"median of {args.repeats}, {args.threads} threads",
    )


main = Bench(
    "attach",
    __doc__,
    report,
    [option("--repeats", 5), THREADS],
    small="tiny models",
    folder="for the files, 4 GB: a disk, not memory",
)

if __name__ == "__main__":
    sys.exit(main())
