"""Measure the tokens per second of one server whose requests are for one variant or for many.

16, 32 and 64 requests at a time, 64 tokens in and 64 out, over the base alone and over 1 to 16 variants; and four at a
time, over the base and four variants. The same run measures the alternatives on the same weights and prompts: merged
weights swapped in, one variant after another; transformers' own batching of the base, static and continuous; and with
`--vllm`, vLLM compiled without LoRA, vLLM with the base alone and with eight LoRA adapters, and this server with vLLM
as its engine. All take turns, and each turn has prompts of its own, so that no prefix cache helps. Medians are
reported. A peer is a process: a configuration and then batches go in as JSON lines, and answers come out.

At the shapes of larger models, so that the process stays below 14 GB: there are 8 variants, an 8B model has 3 of its 32
layers, and one merged copy in memory stands for every variant's.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from transformers import AutoModelForCausalLM

from bench.engine import SHAPES, SMALL, BenchEngine, prompts, publish_variants, serving, write_base
from bench.harness import BEST_DEVICE, Bench, Goal, Report, at_least, option, say
from bench.synthetic import LlamaShapes
from deltastore.console import table
from deltastore.registry import Registry

NUM_REQUESTS, NUM_FEW = (16, 32, 64), 4
VARIANTS = (1, 2, 4, 8, 16)
MANY = 8  # variants of the goals
KV_CACHE_GB = 0.6  # at the shapes of larger models; else what the server takes
OURS, OURS_ON_VLLM = "Peraxis", "Peraxis with vLLM"
# Tokens of a step of vLLM on the CPU, unless it is told another number: peers have it.
VLLM_STEP = 4096
# Tokens of each answer while all warm up: deltas are loaded, and kernels compiled.
WARM_UP_TOKENS = 4


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
    # Keeps the directory of a program off its import path: a file here has the name of a module of Python's own.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **(variables or {})}
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


PROGRAM = Path(__file__).with_name("peer_programs.py")
SWAPPED, STATIC, CONTINUOUS = "merged weights swapped in", "transformers, static", "transformers, continuous"


def running_library(base: Path, num_merged: int) -> AbstractContextManager[PeerProcess]:
    """Start a process with the base's model and so many copies of merged weights."""
    config = {"base": str(base), "num_merged": num_merged}
    return running_peer([sys.executable, PROGRAM, "library"], config, base.parent / "library.log")


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


def running_vllm(
    python: Path, base: Path, adapters: Sequence[Path], binding: str, max_num_seqs: int
) -> AbstractContextManager[PeerProcess]:
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
    return running_peer([python, PROGRAM, "vllm"], config, log, variables)


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


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a run."""

    shapes: LlamaShapes
    name: str  # of the shapes
    num_requests: tuple[int, ...]  # at a time
    counts: tuple[int, ...]  # of variants
    num_merged: int  # copies of merged weights in memory; they stand for all variants' in turn
    kv_cache_gb: float | None

    @classmethod
    def of(cls, name: str, num_layers: int | None, num_requests: Sequence[int]) -> Scale:
        shapes = SHAPES[name]
        if num_layers:
            shapes = replace(shapes, num_layers=num_layers)
        requests = tuple(num_requests)
        if name == "158m":
            return cls(shapes, name, requests, VARIANTS, max(VARIANTS), None)
        return cls(shapes, name, requests, (MANY,), 1, KV_CACHE_GB)

    @property
    def description(self) -> str:
        """Shapes and conditions, for the head of the table."""
        layers = f"{self.name} shapes, {self.shapes.num_layers} layers"
        return f"{layers}; merged copies in memory, used in turn: {self.num_merged}"


def ours(service: BenchEngine, scale: Scale, name: str = OURS) -> list[Contender]:
    """Return the engine as a contender, with requests spread evenly over each number of variants."""

    def answer(num_variants: int, asked_for: Prompts, num_new: int) -> None:
        asked = [
            service.ask(service.records[i % num_variants] if num_variants else None, list(prompt), num_new)
            for i, prompt in enumerate(asked_for)
        ]
        for one in asked:
            check_length(len(one.times().tokens), num_new)

    cases = [(count, k) for count in scale.num_requests for k in (0, *scale.counts)]
    few = [(NUM_FEW, k) for k in (0, NUM_FEW)]
    return [Contender(name, count, k, partial(answer, k)) for count, k in (*cases, *few)]


def measure(subjects: Sequence[Contender], args: Namespace, vocabulary: int) -> None:
    """Time every subject `args.repeats` times, in turns; short answers before them warm up and are not counted.

    In one turn, all contenders with as many requests and variants have the same prompts, and no others have them.
    """
    for turn in range(args.repeats + 1):
        num_new = args.new if turn else WARM_UP_TOKENS
        for subject in subjects:
            seed = hash((turn, subject.num_requests, subject.num_variants))
            asked = prompts(subject.num_requests, args.prompt, vocabulary, seed)
            begun = time.perf_counter()
            subject.answer(asked, num_new)
            if turn:
                seconds = time.perf_counter() - begun
                subject.tokens_per_s.append(subject.num_requests * num_new / seconds)
        say(f"turn {turn} of {args.repeats} is done")


def rate_table(subjects: Sequence[Contender]) -> str:
    """Return tokens per second by number of requests, contender and number of variants."""
    counts = sorted({subject.num_variants for subject in subjects} - {0})
    names = dict.fromkeys((subject.num_requests, subject.name) for subject in subjects)
    rates = {subject.key: f"{subject.rate:.{0 if subject.rate >= 100 else 1}f}" for subject in subjects}
    rows = [
        (str(requests), name, *(rates.get((name, requests, count), "") for count in (0, *counts)))
        for requests, name in sorted(names, key=lambda one: one[0])
    ]
    heads = ("requests", "tokens/s", "base", *(f"{count} variant{'s' * (count > 1)}" for count in counts))
    return table(heads, rows)


def goals(rates: Mapping[Key, Sequence[float]]) -> Iterator[Goal]:
    """Compare figures of the same turns with their limits; without vLLM, its goals are left out.

    Args:
        rates: tokens per second of each turn.
    """

    def ratio(one: Key, *others: Key) -> float:
        """Return the median over the turns of one's rate by the best of the others', because machines drift."""
        turns = zip(rates[one], *(rates[other] for other in others), strict=True)
        return float(median(own / max(rest) for own, *rest in turns))

    num_requests = sorted({count for name, count, _ in rates if name == STATIC})
    for count in num_requests:
        base, many = (OURS, count, 0), (OURS, count, MANY)
        peers = [key for name in (STATIC, CONTINUOUS, VLLM, COMPILED) if (key := (name, count, 0)) in rates]
        yield at_least(f"{count} requests: base / the best peer's base", ratio(base, *peers), 1.3)
        yield at_least(f"{count} requests: {MANY} variants / base", ratio(many, base), 0.85)
        adapters, on_adapters = (
            f"{MANY} variants / vLLM's {NUM_ADAPTERS} adapters",
            (VLLM, count, NUM_ADAPTERS),
        )
        if on_adapters in rates:
            yield at_least(f"{count} requests: {adapters}", ratio(many, on_adapters), 4.0)
        if (on_vllm := (OURS_ON_VLLM, count, 0)) in rates:
            many, best = (OURS_ON_VLLM, count, MANY), [(name, count, 0) for name in (VLLM, COMPILED)]
            with_vllm = f"{count} requests, with vLLM"
            yield at_least(f"{with_vllm}: base / vLLM's best base", ratio(on_vllm, *best), 0.97)
            yield at_least(f"{with_vllm}: {MANY} variants / base", ratio(many, on_vllm), 0.5)
            yield at_least(f"{with_vllm}: {adapters}", ratio(many, on_adapters), 3.0)
    first = num_requests[0]
    swapping = ratio((OURS, first, MANY), (SWAPPED, first, MANY))
    yield at_least(f"{first} requests: {MANY} variants / merged weights swapped in", swapping, 3.0)
    few = ratio((OURS, NUM_FEW, NUM_FEW), (OURS, NUM_FEW, 0))
    yield at_least(f"{NUM_FEW} requests: {NUM_FEW} variants / base", few, 0.8)


def report(args: Namespace) -> Report:
    scale = Scale.of(args.shapes, args.layers, args.streams)
    if args.variants:
        scale = replace(scale, counts=tuple(args.variants), num_merged=max(args.variants))
    if args.small:
        scale = replace(scale, shapes=SMALL, name="tiny")
    with ExitStack() as stack:
        subjects, vllm = contenders(args, scale, stack)
        measure(subjects, args, scale.shapes.vocabulary)
    settings = {
        "shapes": asdict(scale.shapes),
        "dtype": args.dtype,
        "merged_copies": scale.num_merged,
        "prompt_tokens": args.prompt,
        "new_tokens": args.new,
        "repeats": args.repeats,
        "statistic": "median",
        "vllm": vllm,
    }
    results = [
        {
            "who": subject.name,
            "requests": subject.num_requests,
            "variants": subject.num_variants,
            "tokens_per_s": round(subject.rate, 1),
            "samples": [round(value, 1) for value in subject.tokens_per_s],
        }
        for subject in subjects
    ]
    found = list(goals({subject.key: subject.tokens_per_s for subject in subjects}))
    conditions = f"{scale.description}; median of {args.repeats}"
    tables = [rate_table(subjects)]
    return Report(settings, results, tables, found, conditions=conditions, device=BEST_DEVICE)


def contenders(
    args: Namespace, scale: Scale, stack: ExitStack
) -> tuple[list[Contender], dict[str, Any] | None]:
    """Start everything that is compared, until `stack` ends; return it, and how vLLM runs."""
    directory, shapes = args.directory, scale.shapes
    base = write_base(directory / "base", shapes, dtype=getattr(torch, args.dtype))
    registry = Registry(directory / "registry")
    records = publish_variants(registry, base, shapes, max(scale.counts))
    settings: dict[str, Any] = {"max_num_seqs": max(scale.num_requests), "kv_cache_gb": scale.kv_cache_gb}
    subjects, vllm = list[Contender](), None
    if args.vllm:
        trial = prompts(max(scale.num_requests), args.prompt, shapes.vocabulary)
        running = fastest_vllm(args.vllm, base, write_adapters(directory, base), trial)
        peer, binding = stack.enter_context(running)
        subjects += vllm_contenders(peer, scale.num_requests)
        vllm = {**peer.loaded, "thread_binding": binding}
        compiled = running_vllm(args.vllm, base, (), binding, max(scale.num_requests))
        subjects += compiled_contenders(stack.enter_context(compiled), scale.num_requests)
        sizes = {**settings, "kv_cache_gb": scale.kv_cache_gb or KV_CACHE_GB, "max_batch_tokens": VLLM_STEP}
        engine = serving(base, registry, records, backend="vllm", engine_python=args.vllm, **sizes)
        subjects += ours(stack.enter_context(engine), scale, OURS_ON_VLLM)
    library = stack.enter_context(running_library(base, scale.num_merged))
    subjects += library_contenders(library, scale.num_requests, scale.counts)
    service = stack.enter_context(serving(base, registry, records, **settings))
    return [*ours(service, scale), *subjects], vllm


OPTIONS = (
    option("--shapes", "158m", "whose sizes", choices=SHAPES),
    option("--layers", None, "so many of them rather than the default of the shapes", type=int),
    option("--variants", None, f"so many variants, {MANY} among them", type=int, nargs="+"),
    option("--streams", NUM_REQUESTS, "requests at a time", type=int, nargs="+"),
    option("--vllm", None, "the Python of an environment that has vLLM and peraxis-vllm", type=Path),
    option("--dtype", "bfloat16", "of the weights", choices=("bfloat16", "float32")),
    option("--repeats", 3),
    option("--prompt", 64, "tokens of each prompt"),
    option("--new", 64, "tokens of each answer"),
)
main = Bench(
    "throughput",
    __doc__,
    report,
    OPTIONS,
    small="a tiny model",
    folder="for the checkpoint and the registry",
    file=lambda args: "throughput.json" if args.shapes == "158m" else f"throughput-{args.shapes}.json",
)

if __name__ == "__main__":
    sys.exit(main())
