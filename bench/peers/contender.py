"""The ways to answer a batch of requests that are compared: transformers' own, vLLM's CPU build, and ours.

A peer is a process: a configuration and then batches go in as JSON lines, and answers come out. vLLM runs with another
interpreter, with the base alone and with LoRA adapters.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from transformers import AutoModelForCausalLM

Prompts = Sequence[Sequence[int]]  # token ids
Key = tuple[str, int, int]  # name, requests at a time, variants


@dataclass(slots=True)
class Contender:
    """One way to answer so many requests at a time, and its times."""

    name: str
    num_requests: int
    num_variants: int  # 0 is the base alone
    # Called with the prompts and the number of new tokens of each.
    answer: Callable[[Prompts, int], object]
    tokens_per_s: list[float] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.name, self.num_requests, self.num_variants

    @property
    def rate(self) -> float:
        """Median tokens per second."""
        return median(self.tokens_per_s)


def check_length(found: int, expected: int) -> None:
    """Check the number of tokens of an answer, whose time would not be comparable otherwise.

    Raises:
        RuntimeError: it is another one.
    """
    if found != expected:
        raise RuntimeError(f"{expected} tokens were asked for, {found} were generated")


END_S = 60


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """A running process whose model is loaded."""

    loaded: Mapping[str, Any]  # its first answer
    _input: IO[str]
    _output: IO[str]
    _log: Path

    def answer(self, prompts: Prompts, num_new: int, **how: Any) -> None:
        """Let it generate `num_new` tokens for each prompt.

        Raises:
            RuntimeError: it ended, or generated another number of tokens.
        """
        batch = {"prompts": [list(one) for one in prompts], "num_new": num_new, **how}
        print(json.dumps(batch), file=self._input, flush=True)
        check_length(_read(self._output, self._log)["num_tokens"], len(prompts) * num_new)


@contextmanager
def running_peer(
    command: Sequence[object],
    config: Mapping[str, Any],
    log: Path,
    variables: Mapping[str, str] | None = None,
) -> Iterator[PeerProcess]:
    """Start a peer, wait until its model is loaded, and end it.

    Raises:
        RuntimeError: with the end of `log`, when it does not start.
    """
    pipe, words = subprocess.PIPE, [str(part) for part in command]
    environment = {**os.environ, **(variables or {})}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(config), file=process.stdin, flush=True)
            yield PeerProcess(_read(process.stdout, log), process.stdin, process.stdout, log)
        finally:
            _end(process, process.stdin)


def _end(process: subprocess.Popen[str], its_input: IO[str]) -> None:
    """Close the input, at whose end a peer ends; kill it if it does not."""
    with contextlib.suppress(BrokenPipeError):
        its_input.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _read(output: IO[str], log: Path) -> dict[str, Any]:
    if line := output.readline():
        return dict(json.loads(line))
    raise RuntimeError(f"a peer ended: {log.read_text()[-4000:]}")


SWAPPED, STATIC, CONTINUOUS = "merged weights swapped in", "transformers, static", "transformers, continuous"


@contextmanager
def running_library(base: Path, num_merged: int) -> Iterator[PeerProcess]:
    """Start a process with the base's model and so many copies of merged weights."""
    command = [sys.executable, "-m", "bench.peers.library_program"]
    config = {"base": str(base), "num_merged": num_merged}
    with running_peer(command, config, base.parent / "library.log") as peer:
        yield peer


def library_contenders(
    peer: PeerProcess, num_requests: Sequence[int], counts: Sequence[int]
) -> list[Contender]:
    """Return batching of the base at each number of requests, and swapping of variants at the smallest of them."""
    ways = {STATIC: "static", CONTINUOUS: "continuous"}
    batching = [
        Contender(name, number, 0, partial(peer.answer, way=way))
        for number in num_requests
        for name, way in ways.items()
    ]
    swapping = [
        Contender(SWAPPED, min(num_requests), k, partial(peer.answer, way="swapped", num_variants=k))
        for k in counts
    ]
    return [*swapping, *batching]


VLLM, COMPILED = "vLLM", "vLLM, compiled without LoRA"
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
    """Start vLLM with an interpreter that has it: with adapters, or else compiled and without LoRA."""
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": bool(adapters),
        "max_num_seqs": max_num_seqs,
        "max_model_len": 1024,
    }
    if adapters:
        settings |= {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": RANK}
    config = {"base": str(base), "adapters": [str(path) for path in adapters], "settings": settings}
    variables = {"VLLM_CPU_OMP_THREADS_BIND": binding, "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = base.parent / f"vllm-{'adapters' if adapters else 'compiled'}.log"
    with running_peer([python, PROGRAM], config, log, variables) as peer:
        yield peer


def vllm_contenders(peer: PeerProcess, num_requests: Sequence[int]) -> list[Contender]:
    """Return the base alone and the base with all adapters."""
    return [
        Contender(VLLM, number, num_adapters, partial(peer.answer, num_adapters=num_adapters))
        for number in num_requests
        for num_adapters in (0, NUM_ADAPTERS)
    ]


def compiled_contenders(peer: PeerProcess, num_requests: Sequence[int]) -> list[Contender]:
    """Return the base of a vLLM that is compiled without LoRA."""
    return [Contender(COMPILED, number, 0, partial(peer.answer, num_adapters=0)) for number in num_requests]


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
