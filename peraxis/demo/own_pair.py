"""The demo of the user's own pair: a delta from weights alone, served and asked beside its base and its fine-tune.

A pair that cannot work is refused before its weights are downloaded. The fine-tune itself runs in a process of its
own (`python -m peraxis.demo.own_pair`) before the server starts, so that one model is in memory at any time.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from compressor.adapters import CONFIG_FILE as ADAPTER_FILE
from compressor.adapters import finetune_directory
from compressor.config import CompressConfig
from compressor.outputs import check_free_disk
from compressor.pairs import check_architecture
from compressor.pipeline import CompressResult, compress
from compressor.sources import has_tokenizer, load_tokenizer
from deltastore.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from deltastore.console import size_text, table
from deltastore.errors import CheckpointError, MemoryTooSmall, PeraxisError, UsageError
from deltastore.format.header import parse_json
from deltastore.format.sizes import one_bit_plan
from deltastore.hub import HubModel, checkpoint_directory, find_on_hub, is_hub_id
from deltastore.memory import available_bytes
from deltastore.registry.records import NAME, RESERVED
from deltastore.servable import own_dtype, servable_model
from deltastore.wrappers import own_document
from peraxis.demo.service import ServerClient, running

Progress = Callable[[str], None]

MAX_NEW_TOKENS = 64
# Questions for a fine-tune with a chat template, beginnings for one without.
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short, friendly reply to a customer whose parcel is late.",
)
BEGINNINGS = ("The capital of France is", "The sky is blue because", "Dear customer, we are sorry that")
NUM_TIMED = 3  # first tokens of each kind; the median is shown
WARM_UP_TOKENS = 4
MIN_TIMED_TOKENS = 16  # after the first ones; a rate from fewer says nothing
MAX_CONTEXT = 4096  # tokens; what the demo asks fits many times over
# Copies of the delta that are on disk at a time, at most: two while it is written, the upload, the registry's object.
DELTA_COPIES = 4
# Of a model in transformers, over its weights: activations and what loading holds; and torch with its libraries.
RUNNING_FACTOR, RUNNING_BYTES = 1.2, 1 << 30


@dataclass(frozen=True, slots=True)
class OwnPair:
    """The options of the command."""

    base: str  # a directory or a hub id
    finetune: str  # the same, or an adapter's
    prompts: Sequence[str]  # empty: the built-in ones
    work: Path  # the directory that keeps the delta
    keep: bool  # leave the server running


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer of one model, and the server's times if the server gave it."""

    text: str
    token_ids: Sequence[int]
    timings: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts, and who gets them through a chat template."""

    texts: Sequence[str]
    is_chat: bool  # for the fine-tune and its delta
    base_is_chat: bool

    def body(self, text: str, *, is_chat: bool, max_new_tokens: int = MAX_NEW_TOKENS) -> dict[str, Any]:
        """Return the body of `POST /generate`."""
        messages = [{"role": "user", "content": text}]
        prompt: dict[str, Any] = {"messages": messages} if is_chat else {"prompt": text}
        return {**prompt, "max_new_tokens": max_new_tokens, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds and rates of the served delta."""

    push_s: float
    cold_s: float  # to the first token, the delta read from disk
    warm_s: float
    tokens_per_s: float | None  # one request at a time; None if the answers were too short


def try_pair(pair: OwnPair, progress: Progress) -> None:
    """Compress the pair, serve and ask it, and print answers, sizes, times and the commands to go on with.

    Raises:
        UsageError: `work` cannot be written, or an adapter and no peft.
        NotServable: no server can run the base.
        CheckpointError: a model that is missing or damaged, or two that are no pair.
        MemoryTooSmall, StorageFull: the machine is too small for the base or for the delta.
        ServerFailed: the server did not start, or refused a call.
    """
    name = variant_name(pair.finetune)
    out = pair.work / f"{name}-demo.safetensors"
    with _scratch(pair.work) as scratch:
        base_dir = _fetched(pair, progress)
        with finetune_directory(pair.finetune, base_dir) as finetune_dir:
            progress("compressing from weights alone")
            result = compress(CompressConfig(pair.base, str(finetune_dir), out, progress=True))
            with _named_if_interrupted(out, progress):
                progress(f"compressed in {result.seconds:.1f} s: {size_text(result.artifact_bytes)}")
                stored_bytes = _stored_bytes(Checkpoint.open(finetune_dir))
                prompts = _prompts(pair, base_dir, finetune_dir)
                finetuned = finetune_answers(base_dir, finetune_dir, prompts, progress)
        with _named_if_interrupted(out, progress):
            options = _server_options(base_dir)
            log = scratch / "server.log"
            with running(base_dir, scratch / "registry", log, progress, options) as client:
                began = time.monotonic()
                client.upload(name, out)
                push_s = time.monotonic() - began
                progress(f"pushed as {name!r} in {push_s:.1f} s; asking base and delta")
                base = _answers(client, None, prompts, is_chat=prompts.base_is_chat)
                delta = _answers(client, name, prompts, is_chat=prompts.is_chat)
                progress("measuring first tokens")
                measured = _measure(client, name, prompts, delta, push_s)
                columns = {_base_title(prompts): base, f"delta ({name})": delta}
                if not isinstance(finetuned, str):
                    columns["fine-tune itself"] = finetuned
                _print_answers(prompts.texts, columns)
                if isinstance(finetuned, str):
                    print(f"The fine-tune itself is left out: {finetuned}.\n")
                print(_summary(result, stored_bytes, measured, delta, finetuned))
                print("\n" + "\n".join(_next_steps(pair, name, base_dir, out, prompts)))
                if pair.keep:
                    print(f"\nThis server is at {client.url} until Ctrl-C.", flush=True)
                    signal.pause()


def variant_name(finetune: str) -> str:
    """Return a valid name of a variant after a directory or a hub id."""
    path = Path(finetune)
    last = path.resolve().name if path.is_dir() else finetune.partition("@")[0].rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-")[:64]
    return name if NAME.fullmatch(name) and name not in RESERVED else "my-finetune"


@contextmanager
def _scratch(work: Path) -> Iterator[Path]:
    """Make the directory of the delta, and in it one for the registry and the log that is removed afterwards."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=".demo-", dir=work)
    except OSError as error:
        raise UsageError(
            f"{work}: the delta cannot be kept there ({error.strerror}): give --work a directory that can be written"
        ) from error
    with made as path:
        yield Path(path)


@contextmanager
def _named_if_interrupted(out: Path, progress: Progress) -> Iterator[None]:
    try:
        yield
    except BaseException:
        progress(f"the delta stays at {out}; the server and its files are gone")
        raise


def _fetched(pair: OwnPair, progress: Progress) -> Path:
    """Check all that configurations and sizes tell, download both models, and return the base's directory."""
    sources = {source: find_on_hub(source) for source in (pair.base, pair.finetune) if is_hub_id(source)}
    _check_pair(pair, sources, progress)
    missing_bytes = sum(model.missing_bytes for model in sources.values())
    if missing_bytes:
        cache = Path(constants.HF_HUB_CACHE)
        existing = next(path for path in (cache, *cache.absolute().parents) if path.is_dir())
        check_free_disk(
            existing, missing_bytes, "the models take", "set HF_HOME to a directory on a larger disk"
        )
    try:
        for model in sources.values():
            progress(model.size_line())
            model.fetch_all()
    except BaseException:
        progress(f"what was fetched stays in {constants.HF_HUB_CACHE} and is not fetched again")
        raise
    return checkpoint_directory(pair.base)


def _check_pair(pair: OwnPair, sources: Mapping[str, HubModel], progress: Progress) -> None:
    """Refuse a base that cannot be served, or a fine-tune of another one; downloads `config.json` alone."""
    progress("checking both configurations")
    for found in sources.values():
        if not any(name.endswith(".safetensors") for name in found.files):
            raise CheckpointError(f"{found}: it has no safetensors files on the hub: give a model that has")
    base_config = _file(pair.base, sources, "config.json")
    try:
        model = servable_model(base_config.parent)
    except PeraxisError as error:
        raise error.about(pair.base) from error
    _check_room(pair, model)
    if not _is_adapter(pair.finetune, sources):
        finetune_config = _file(pair.finetune, sources, "config.json")
        configs = [own_document(_document(path)) for path in (base_config, finetune_config)]
        check_architecture(configs[0], configs[1], pair.base, pair.finetune)


def _check_room(pair: OwnPair, model: Any) -> None:
    """Refuse a base that exceeds memory in its own dtype, and a delta that exceeds the disk."""
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    needed = DELTA_COPIES * one_bit_plan(shapes).device_bytes
    check_free_disk(
        pair.work, needed, "making and serving the delta takes", "give --work a directory elsewhere"
    )
    itemsize = getattr(model.config.dtype, "itemsize", 2)
    base_bytes = itemsize * sum(map(math.prod, shapes.values()))
    free = available_bytes()
    # The memory of a GPU is the server's to judge.
    if base_bytes > free and not torch.cuda.is_available():
        raise MemoryTooSmall(
            f"{pair.base}: its weights take {size_text(base_bytes)} of memory and {size_text(free)} are free: "
            "free some memory, or give a smaller pair"
        )


def _is_adapter(source: str, sources: Mapping[str, HubModel]) -> bool:
    """True for an adapter without a model, as `compressor.adapters.is_adapter` finds in a directory."""
    model = sources.get(source)
    names = set(model.files) if model else {path.name for path in Path(source).iterdir()}
    return ADAPTER_FILE in names and not {SINGLE_FILE, INDEX_FILE} & names


def _file(source: str, sources: Mapping[str, HubModel], name: str) -> Path:
    """Return the path of one small file of a model, fetched if it is on the hub."""
    model = sources.get(source)
    if model is not None and name in model.files:
        return model.fetch(name)
    path = Path(source) / name
    if model is not None or not path.is_file():
        raise CheckpointError(
            f"{source}: it has no {name}, so it is no Hugging Face checkpoint: give another one"
        )
    return path


def _document(path: Path) -> dict[str, Any]:
    document = parse_json(path.read_bytes(), str(path))
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: it is not a JSON object: fetch the file again")
    return document


def _prompts(pair: OwnPair, base_dir: Path, finetune_dir: Path) -> Prompts:
    is_chat = _has_template(_tokenizer_directory(base_dir, finetune_dir), base_dir)
    texts = pair.prompts or (QUESTIONS if is_chat else BEGINNINGS)
    return Prompts(texts, is_chat, is_chat and _has_template(base_dir, base_dir))


def _tokenizer_directory(base_dir: Path, finetune_dir: Path) -> Path:
    """Return where the variant's tokenizer is: a fine-tune without one has the base's."""
    return finetune_dir if has_tokenizer(finetune_dir) else base_dir


def _has_template(directory: Path, base_dir: Path) -> bool:
    return load_tokenizer(directory, base_dir).chat_template is not None


def _stored_bytes(checkpoint: Checkpoint) -> int:
    return sum(stored.num_bytes for stored in checkpoint.tensors.values())


def finetune_answers(
    base_dir: Path, finetune_dir: Path, prompts: Prompts, progress: Progress
) -> list[Answer] | str:
    """Generate the fine-tune's own answers with transformers, in another process, or return why that is left out."""
    checkpoint = Checkpoint.open(finetune_dir)
    # The dtype that the server takes for base and delta. CPUs compute in float16 many times slower.
    dtype = own_dtype(Checkpoint.open(base_dir))
    if dtype == torch.float16 and not torch.cuda.is_available():
        dtype = torch.float32
    weight_bytes = dtype.itemsize * sum(math.prod(stored.shape) for stored in checkpoint.tensors.values())
    needed, free = int(RUNNING_FACTOR * weight_bytes) + RUNNING_BYTES, available_bytes()
    if needed > free:
        return f"it needs about {size_text(needed)} of memory, and {size_text(free)} are free"
    progress(f"asking the fine-tune itself, {size_text(weight_bytes)} in transformers")
    task = {
        "model": str(finetune_dir),
        "base": str(base_dir),
        "tokenizer": str(_tokenizer_directory(base_dir, finetune_dir)),
        "dtype": str(dtype).removeprefix("torch."),
        "texts": list(prompts.texts),
        "is_chat": prompts.is_chat,
        "needed_bytes": needed,
    }
    command = [sys.executable, "-P", "-m", "peraxis.demo.own_pair"]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"transformers could not run it ({reason[:200]})"
    return [Answer(each["text"], each["token_ids"]) for each in json.loads(done.stdout)]


def generate_in_this_process(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Answer greedily with transformers, on a GPU whose memory suffices, else on the CPU; see `finetune_answers`."""
    from transformers.utils.logging import disable_progress_bar

    from compressor.decoder.decoder import whole_model

    disable_progress_bar()
    on_gpu = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > task["needed_bytes"]
    model = whole_model(Path(task["model"]), getattr(torch, task["dtype"])).eval()
    model.to("cuda" if on_gpu else "cpu")
    tokenizer = load_tokenizer(Path(task["tokenizer"]), Path(task["base"]))
    answers = []
    for text in task["texts"]:
        if task["is_chat"]:
            messages = [{"role": "user", "content": text}]
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            inputs = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")
        else:
            inputs = tokenizer(text, return_tensors="pt")
        ids, mask = (inputs[key].to(model.device) for key in ("input_ids", "attention_mask"))
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
            )
        new = output[0, ids.shape[1] :].tolist()
        answers.append({"text": tokenizer.decode(new, skip_special_tokens=True), "token_ids": new})
    return answers


def _server_options(base_dir: Path) -> list[str]:
    """Return options that keep the server small: the pair may fill most of the machine."""
    # Without a host cache, a delta that was unloaded is read from disk again, which the cold start measures.
    options = ["--max-gpu-deltas", "2", "--max-num-seqs", "2", "--max-host-cache-gb", "0"]
    longest = own_document(_document(base_dir / "config.json")).get("max_position_embeddings")
    if isinstance(longest, int) and longest > MAX_CONTEXT:
        options += ["--max-model-len", str(MAX_CONTEXT)]
    return options


def _answers(client: ServerClient, variant: str | None, prompts: Prompts, *, is_chat: bool) -> list[Answer]:
    # The first call pays for work that later calls do not repeat.
    client.generate(variant, prompts.body(prompts.texts[0], is_chat=is_chat, max_new_tokens=WARM_UP_TOKENS))
    answers = []
    for text in prompts.texts:
        reply = client.generate(variant, prompts.body(text, is_chat=is_chat))
        output = reply["outputs"][0]
        answers.append(Answer(output["text"], output["token_ids"], reply["timings"]))
    return answers


def _measure(
    client: ServerClient, name: str, prompts: Prompts, answers: Sequence[Answer], push_s: float
) -> Measured:
    """Measure first tokens of prompts that were not asked before, so that none is in the prefix cache."""
    cold, warm = list[float](), list[float]()
    for number in range(NUM_TIMED):
        client.unload(name)
        for seconds in (cold, warm):
            text = f"{number + 1}{'a' if seconds is cold else 'b'}. {prompts.texts[0]}"
            body = prompts.body(text, is_chat=prompts.is_chat, max_new_tokens=1)
            seconds.append(client.generate(name, body)["timings"]["ttft_s"])
    return Measured(push_s, statistics.median(cold), statistics.median(warm), _tokens_per_s(answers))


def _tokens_per_s(answers: Sequence[Answer]) -> float | None:
    """Return the rate of all tokens after the first ones, None if there are too few."""
    timed = [(len(answer.token_ids) - 1, answer.timings) for answer in answers if answer.timings]
    num_tokens = sum(count for count, _ in timed)
    seconds = sum(timings["total_s"] - timings["ttft_s"] for _, timings in timed)
    return num_tokens / seconds if num_tokens >= MIN_TIMED_TOKENS and seconds > 0 else None


def _base_title(prompts: Prompts) -> str:
    return "base (no template)" if prompts.is_chat and not prompts.base_is_chat else "base"


def _print_answers(texts: Sequence[str], columns: Mapping[str, Sequence[Answer]]) -> None:
    """Print the answers of all models to each prompt side by side."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=max(80, shutil.get_terminal_size((100, 24)).columns), highlight=False)
    for number, text in enumerate(texts):
        title = Text(f"> {_visible(text)}")
        side_by_side = Table(title=title, title_justify="left", expand=True)
        for column in columns:
            side_by_side.add_column(Text(column), ratio=1, overflow="fold")
        side_by_side.add_row(*(Text(_visible(answers[number].text)) for answers in columns.values()))
        console.print(side_by_side)
        console.print()


def _visible(text: str) -> str:
    """Return a model's text without the control characters with which it could command a terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _summary(
    result: CompressResult,
    stored_bytes: int,
    measured: Measured,
    delta: Sequence[Answer],
    finetuned: Sequence[Answer] | str,
) -> str:
    rate = "answers too short" if measured.tokens_per_s is None else f"{measured.tokens_per_s:.1f}"
    rows = [
        ["the fine-tune's checkpoint", size_text(stored_bytes)],
        ["its delta", size_text(result.artifact_bytes)],
        ["smaller than at 16 bits", f"{result.ratio:.1f}x"],
        ["compressing, weights alone", f"{result.seconds:.1f} s"],
        ["pushing, until it is verified and active", f"{measured.push_s:.2f} s"],
        [f"first token, delta on disk, median of {NUM_TIMED}", _milliseconds(measured.cold_s)],
        [f"first token, delta in its slot, median of {NUM_TIMED}", _milliseconds(measured.warm_s)],
        ["tokens/s of the delta, one request at a time", rate],
    ]
    if not isinstance(finetuned, str):
        pairs = zip(delta, finetuned, strict=True)
        shared = ", ".join(f"{_num_shared(a, b)} of {len(b.token_ids)}" for a, b in pairs)
        rows.append(["first tokens that are the fine-tune's", shared])
    return table(["your pair", ""], rows)


def _num_shared(answer: Answer, other: Answer) -> int:
    """Return how many tokens come before the first difference."""
    pairs = zip(answer.token_ids, other.token_ids, strict=False)
    different = (number for number, (a, b) in enumerate(pairs) if a != b)
    return next(different, min(len(answer.token_ids), len(other.token_ids)))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _next_steps(pair: OwnPair, name: str, base_dir: Path, out: Path, prompts: Prompts) -> list[str]:
    """Return the commands that go on from here, with the real paths."""
    serve = ["peraxis", "serve", "--base", str(base_dir), "--registry", str(pair.work / "registry")]
    push = ["peraxis", "push", str(out), "--name", name]
    chat = ["peraxis", "chat", name]
    if not prompts.is_chat:
        body = json.dumps({"model": name, "prompt": prompts.texts[0], "max_tokens": MAX_NEW_TOKENS})
        url = "http://localhost:8000/v1/completions"
        chat = ["curl", "-s", url, "-H", "Content-Type: application/json", "-d", body]
    fit = ["peraxis", "compress", "--base", pair.base, "--finetune", pair.finetune]
    fit += ["--out", str(pair.work / f"{name}.safetensors")]
    return [
        f"The delta is {out}. Go on with it, the second and third command in another terminal:",
        *(textwrap.indent(shlex.join(command), "  ") for command in (serve, push, chat)),
        "Fitted to text, which takes longer, a delta of the same size keeps more of its fine-tune:",
        f"  {shlex.join(fit)}",
    ]


if __name__ == "__main__":
    json.dump(generate_in_this_process(json.load(sys.stdin)), sys.stdout)
