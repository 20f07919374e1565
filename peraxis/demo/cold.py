"""Cold starts of a delta and of a full checkpoint: from a request for a model that is not in memory to its first token.

Both begin with files on disk and a running process, end with the first token of the same prompt, and leave every byte
in the process's own memory. The full checkpoint has an advantage: its model is built already and lacks only weights.
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

from peraxis.demo import page_cache
from peraxis.demo.service import ServerClient, ServerFailed

REPEATS = 10


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Median seconds of ten, with the files in the page cache and with them dropped from it."""

    warm_s: float
    dropped_s: float
    dropped: bool  # True if the files were verified to be out of the cache each time


def delta_cold_start(service: ServerClient, variant: str, prompt: str, artifact: Path) -> ColdStart:
    """Measure a variant of a running server: unload it, then ask it for one token.

    Args:
        service: The running server.
        variant: The variant's name.
        prompt: The prompt of the first token.
        artifact: The stored object that the server reads.

    Raises:
        ServerFailed: The server had not unloaded the variant.
    """

    def once() -> float:
        timings = service.generate(variant, {"prompt": prompt, "max_new_tokens": 1})["timings"]
        if not timings["cold"]:
            raise ServerFailed(
                f"variant {variant!r} was loaded already: nothing else may use the demo's server"
            )
        return float(timings["ttft_s"])

    return _measure(once, [artifact], before=lambda: service.unload(variant))


def checkpoint_cold_start(directory: Path, prompt: str) -> ColdStart:
    """Measure a full checkpoint: read its weights into a model without any, then compute one token."""
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
        # Copies, because the tensors of safetensors are views of the mapped file.
        model.load_state_dict(load_file(file), strict=False)
    int(model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax())
    return time.perf_counter() - started


def _measure(once: Callable[[], float], files: Sequence[Path], before: Callable[[], None]) -> ColdStart:
    # The first call also pays for work that later calls do not repeat.
    before()
    once()
    warm, dropped, gone = [], [], []
    for _ in range(REPEATS):
        before()
        warm.append(once())
        before()
        gone.append(page_cache.drop(files))
        dropped.append(once())
    return ColdStart(statistics.median(warm), statistics.median(dropped), all(gone))
