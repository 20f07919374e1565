"""Choose how OpenMP's threads wait: steps of this project's work by policy, alone and beside a busy process.

Each cell is the median step of a fresh process, since the OpenMP runtime reads its policy once; cells of a round take
turns. A policy is judged by its worst cell, as a multiple of the best policy's step of the same work and neighbours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.harness import Bench, Report, option, seconds
from deltastore.console import table

# The variables of each policy. GOMP_SPINCOUNT is how often a thread looks before it sleeps; without either, 300,000.
POLICIES: Mapping[str, Mapping[str, str]] = {
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 300": {"GOMP_SPINCOUNT": "300"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 3,000": {"GOMP_SPINCOUNT": "3000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin 30,000": {"GOMP_SPINCOUNT": "30000"},
    "libgomp's default": {},
}
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SMALL = LlamaConfig(
    vocab_size=259,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
)
# 158M weights.
LARGE = LlamaConfig(
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
)


def training() -> Callable[[], object]:
    """Return a step of distillation's size: 1,536 tokens of a small model, forward and backward."""
    model, ids = LlamaForCausalLM(SMALL), torch.randint(256, (8, 192))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return step


def sampling() -> Callable[[], object]:
    """Return a step of calibration's sampling: one token of 256 sequences of a small model."""
    return _decoding(LlamaForCausalLM(SMALL), 256)


def decoding() -> Callable[[], object]:
    """Return one token of 16 sequences of 158M weights, as transformers decodes it."""
    return _decoding(LlamaForCausalLM(LARGE), 16)


def _decoding(model: LlamaForCausalLM, rows: int) -> Callable[[], object]:
    ids = torch.randint(256, (rows, 32))

    @torch.inference_mode()
    def step() -> None:
        cache = model(input_ids=ids[:, :1], use_cache=True).past_key_values
        for position in range(1, 8):
            cache = model(
                input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True
            ).past_key_values

    return step


WORKS: Mapping[str, Callable[[], Callable[[], object]]] = {
    "training": training,
    "sampling": sampling,
    "decoding": decoding,
}
# Work and busy processes of each column.
CELLS = [(work, num_busy) for num_busy in (0, 1) for work in WORKS]


def report(args: Namespace) -> Report | None:
    """Measure every cell; with `--work`, print the seconds of one cell's steps."""
    if args.work:
        print(json.dumps(_steps(WORKS[args.work](), args.seconds)))
        return None
    cells: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(args.rounds):
        for work, num_busy in CELLS:
            for policy in POLICIES:
                steps = _measured(work, policy, num_busy, args.seconds)
                cells.setdefault((work, num_busy, policy), []).extend(steps)
    medians = {cell: median(steps) for cell, steps in cells.items()}
    rows = {policy: _row(policy, medians) for policy in POLICIES}
    head = ["policy", *(f"{work}, {num_busy} busy" for work, num_busy in CELLS), "worst"]
    shown = [[policy, *(f"{each:.2f}" for each in (*row, max(row)))] for policy, row in rows.items()]
    results = [
        {"work": work, "busy_processes": busy, "policy": policy, "median_s": median_s}
        for (work, busy, policy), median_s in medians.items()
    ]
    conditions = "steps as multiples of the column's best"
    return Report({"policies": POLICIES}, results, [table(head, shown)], conditions=conditions)


def _row(policy: str, medians: Mapping[tuple[str, int, str], float]) -> list[float]:
    return [
        medians[work, num_busy, policy] / min(medians[work, num_busy, each] for each in POLICIES)
        for work, num_busy in CELLS
    ]


def _measured(work: str, policy: str, num_busy: int, cell_s: float) -> list[float]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-m", "bench.waiting", "--work", work, "--seconds", str(cell_s)]
    with _busy(num_busy):
        ended = subprocess.run(
            command, env={**environment, **POLICIES[policy]}, capture_output=True, text=True, check=True
        )
    return list(json.loads(ended.stdout))


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Run processes that compute without end inside the block."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _steps(step: Callable[[], object], cell_s: float) -> list[float]:
    step()
    taken = list[float]()
    while sum(taken) < cell_s:
        taken.append(seconds(step))
    return taken


OPTIONS = (
    option("--rounds", 3),
    option("--seconds", 2.0, "of each cell"),
    option("--work", None, SUPPRESS, choices=WORKS),
)
main = Bench("waiting", __doc__, report, OPTIONS)

if __name__ == "__main__":
    sys.exit(main())
