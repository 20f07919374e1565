"""vLLM's CPU build as a contender, with the base alone and with LoRA adapters. It runs with another interpreter."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bench.peers.contender import Contender, Prompts
from bench.peers.peer_process import PeerProcess, running_peer

VLLM = "vLLM"
NUM_ADAPTERS, RANK = 8, 16
PROGRAM = Path(__file__).with_name("vllm_program.py")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TRIAL_TOKENS = 16


@contextmanager
def fastest_vllm(
    python: Path, base: Path, adapters: Sequence[Path], trial: Prompts
) -> Iterator[tuple[PeerProcess, str]]:
    """Run vLLM with the binding of its threads that answers `trial` faster: its own choice, or all cores.

    Yields the process and the binding, a value of VLLM_CPU_OMP_THREADS_BIND.
    """
    seconds = {}
    for binding in ("auto", f"0-{len(os.sched_getaffinity(0)) - 1}"):
        with running_vllm(python, base, adapters, binding, len(trial)) as peer:
            peer.answer(trial, 1, num_adapters=0)
            began = time.perf_counter()
            peer.answer(trial, TRIAL_TOKENS, num_adapters=0)
            seconds[binding] = time.perf_counter() - began
    fastest = min(seconds, key=seconds.__getitem__)
    with running_vllm(python, base, adapters, fastest, len(trial)) as peer:
        yield peer, fastest


@contextmanager
def running_vllm(
    python: Path, base: Path, adapters: Sequence[Path], binding: str, max_num_seqs: int
) -> Iterator[PeerProcess]:
    """Start vLLM with an interpreter that has it."""
    settings = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_num_seqs": max_num_seqs,
        "enable_lora": True,
        "max_loras": NUM_ADAPTERS,
        "max_lora_rank": RANK,
        "dtype": "bfloat16",
        "max_model_len": 1024,
    }
    config = {"base": str(base), "adapters": [str(path) for path in adapters], "settings": settings}
    variables = {"VLLM_CPU_OMP_THREADS_BIND": binding, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with running_peer([python, PROGRAM], config, base.parent / "vllm.log", variables) as peer:
        yield peer


def vllm_contenders(peer: PeerProcess, num_requests: Sequence[int]) -> list[Contender]:
    """Return the base alone and the base with all adapters."""
    return [
        Contender(VLLM, number, num_adapters, partial(peer.answer, num_adapters=num_adapters))
        for number in num_requests
        for num_adapters in (0, NUM_ADAPTERS)
    ]


def write_adapters(directory: Path, base: Path) -> list[Path]:
    """Write LoRA adapters of all linear layers with random weights, as peft saves them."""
    # Deferred: an extra that only this peer needs.
    from peft import LoraConfig, get_peft_model

    paths = [directory / f"adapter-{number}" for number in range(NUM_ADAPTERS)]
    for number, path in enumerate(paths):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(LINEAR), init_lora_weights=False)
        get_peft_model(model, config).save_pretrained(str(path))
    return paths
