"""Cold starts: from the wish for a model that is not in memory to its first token; a delta's and a full checkpoint's.

Both begin with files on disk and a process that runs, end with the first token of the same prompt, and leave every byte
in memory of the process's own. The full checkpoint has it easier: its model is built already, only weights are missing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from demo import page_cache
from demo.service import ServerClient

REPEATS = 10


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Median seconds of ten, with the files in the page cache and with them dropped from it."""

    warm_s: float
    dropped_s: float
    dropped: bool  # whether a look at the cache afterwards found the files gone


def delta_cold_start(service: ServerClient, variant: str, prompt: str, artifact: Path) -> ColdStart:
    """A variant of a running server: it is unloaded, then asked for one token.

    Args:
        artifact: the stored object that the server reads.
    """

    def once() -> float:
        timings = service.generate(variant, {"prompt": prompt, "max_new_tokens": 1})["timings"]
        assert timings["cold"]
        return float(timings["ttft_s"])

    return _measure(once, [artifact], before=lambda: service.unload(variant))


def checkpoint_cold_start(directory: Path, prompt: str) -> ColdStart:
    """A full checkpoint: its weights are read into a model that has none, then one token is computed."""
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory)(prompt)["input_ids"]])
    config = AutoConfig.from_pretrained(directory)
    files = sorted(directory.glob("*.safetensors"))
    dtype = next(iter(load_file(files[0]).values())).dtype

    def once() -> float:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        return _load_and_run(model, files, ids)

    return _measure(once, files, before=lambda: None)


@torch.inference_mode()
def _load_and_run(model: PreTrainedModel, files: Sequence[Path], ids: torch.Tensor) -> float:
    started = time.perf_counter()
    for file in files:
        model.load_state_dict(
            load_file(file), strict=False
        )  # copies: the library's tensors are views of the file
    int(model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax())
    return time.perf_counter() - started


def _measure(once: Callable[[], float], files: Sequence[Path], before: Callable[[], None]) -> ColdStart:
    before()
    once()  # the first one also pays for what is not loading
    warm, dropped, gone = [], [], []
    for _ in range(REPEATS):
        before()
        warm.append(once())
        before()
        gone.append(page_cache.drop(files))
        dropped.append(once())
    return ColdStart(statistics.median(warm), statistics.median(dropped), all(gone))
