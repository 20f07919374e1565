"""Say before any work what memory, time and disk compressing needs, and refuse where there is too little.

Reads headers and no weights. The model of a fit's memory and time is `fitting/cost.py`.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from compressor.io.pairs import Pairs, TensorPair
from deltastore.errors import MemoryTooSmall
from deltastore.format.plan import FP16_BYTES, one_bit_plan

if TYPE_CHECKING:  # brings the model library, which takes seconds
    from compressor.config import CompressConfig
    from compressor.fitting.cost import Part, Rate, Sizes, Stage
    from compressor.fitting.training import Training

FEWEST_SAMPLES = 32  # that are proposed
CODING_BYTES = 110 << 20  # of the threads that code weights alone, as measured
CODING_PASSES = 12  # over all bytes: fingerprints, differences, the artifact's signs and errors
RATE_S = 1.0  # of measuring
RATE_SHAPE = (1536, 2048)  # of the products that are measured: one batch's tokens, and a layer's features
REACHED = 0.7  # of what large products reach, by a block with its norms, attention and small matrices


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory, time and disk of one run."""

    stages: Sequence[Stage]
    seconds: Sequence[float]  # of each stage
    disk_bytes: int  # beside --out, at most
    free: Mapping[str, int]  # by place: `host`, `device`, `disk`

    def peak(self, where: str, *, least: bool = False) -> int:
        """Bytes of the stage that takes most there; with `least`, those without which it fails."""
        return max(stage.num_bytes(where, least=least) for stage in self.stages)

    @property
    def places(self) -> list[str]:
        return [where for where in ("host", "device") if self.peak(where)]

    def as_json(self) -> dict[str, Any]:
        return {
            "memory": {
                where: {
                    "bytes": self.peak(where),
                    "least_bytes": self.peak(where, least=True),
                    "free_bytes": self.free[where],
                }
                for where in self.places
            },
            "disk": {"bytes": self.disk_bytes, "free_bytes": self.free["disk"]},
            "seconds": round(sum(self.seconds), 1),
            "stages": [
                {
                    "name": stage.name,
                    "seconds": round(seconds, 1),
                    **{f"{where}_bytes": stage.num_bytes(where) for where in self.places},
                    "parts": [_part_as_json(part) for part in stage.parts],
                }
                for stage, seconds in zip(self.stages, self.seconds, strict=True)
            ],
        }

    def lines(self) -> Iterator[str]:
        """For people: totals, and then what each stage is made of."""
        for where in self.places:
            yield (
                f"{where} memory: {_size(self.peak(where))} at most, {_size(self.peak(where, least=True))} at least; "
                f"{_size(self.free[where])} are free"
            )
        yield f"disk: {_size(self.disk_bytes)} beside --out at most; {_size(self.free['disk'])} are free"
        yield f"time: about {_duration(sum(self.seconds))}"
        for stage, seconds in zip(self.stages, self.seconds, strict=True):
            sizes = ", ".join(f"{_size(stage.num_bytes(where))} of {where} memory" for where in self.places)
            yield f"{stage.name}: {_duration(seconds)}, {sizes}"
            for part in sorted(stage.parts, key=lambda part: -part.num_bytes):
                yield f"  {_size(part.num_bytes):>8}  {part.what}" + (
                    "" if part.where == "host" else " (device)"
                )


def needs(config: CompressConfig, pairs: Pairs, coded: Collection[str], files: Mapping[str, bytes]) -> Needs:
    """Plan a run; measures this machine's rate, which takes a second or two."""
    device = torch.device("cpu") if config.training is None else config.training.place()
    stages, rate = _stages(config, config.training, pairs, coded, device), measured_rate(device)
    return Needs(
        stages,
        [rate.seconds(stage) for stage in stages],
        disk_bytes(config, pairs, coded, files),
        {**_free(device), "disk": shutil.disk_usage(config.out.parent).free},
    )


def check_memory(config: CompressConfig, pairs: Pairs, coded: Collection[str]) -> None:
    """Refuse a run for which there is too little memory.

    Raises:
        MemoryTooSmall: how much is missing, and which options need less.
    """
    if config.training is None:
        return
    device = config.training.place()
    free = _free(device)
    missing = _missing(config, config.training, pairs, coded, device)
    for where, (needed, lacking) in missing.items():
        if lacking > 0:
            raise MemoryTooSmall(
                f"fitting needs about {_size(needed)} of {where} memory and {_size(free[where])} are free, "
                f"{_size(lacking)} too little: {_way_out(config, pairs, coded, device)}"
            )


def disk_bytes(
    config: CompressConfig, pairs: Pairs, coded: Collection[str], files: Mapping[str, bytes]
) -> int:
    """The artifact is written to a spool and then in one piece, so it takes its room twice for a moment.

    What calibration keeps for `--resume` is about once more, and the state of the end-to-end stage on top of it.
    """
    matrices = one_bit_plan({pair.name: pair.shape for pair in pairs.tensors if pair.name in coded})
    whole = sum(pair.tensor.num_bytes for pair in pairs.tensors if pair.name not in coded)
    added = sum(pair.added_rows * pair.row_bytes for pair in pairs.tensors if pair.name in coded)
    budget, copies = (1.0, 2) if config.training is None else (config.training.budget, 4)
    needed = int(copies * budget * matrices.device_bytes)
    needed += 2 * (whole + added + sum(map(len, files.values())))
    if config.training is not None:
        num_weights = sum(math.prod(pair.shape) for pair in pairs.tensors if pair.name in coded)
        needed += config.training.state_bytes(config.method, num_weights, matrices.scales_bytes // FP16_BYTES)
    return needed


def measured_rate(device: torch.device) -> Rate:
    """Measure briefly how fast matrix products and copies are here."""
    from compressor.fitting.cost import Rate

    rows, features = RATE_SHAPE
    left, right = torch.ones(rows, features, device=device), torch.ones(features, features, device=device)
    out = torch.empty_like(left)
    product_s = _fastest(lambda: torch.mm(left, right, out=out), device)
    large = torch.ones(1 << 25, device=device)
    copy_s = _fastest(lambda: large.clone(), device)
    return Rate(REACHED * 2 * rows * features**2 / product_s, 2 * large.nbytes / copy_s)


def sizes_of(pairs: Sequence[TensorPair], coded: Collection[str], config: Mapping[str, Any]) -> Sizes:
    """The shapes that a fit's cost depends on."""
    from compressor.fitting.cost import Sizes

    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for pair in pairs:
        parts = pair.name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            blocks.setdefault(".".join(parts[: number + 1]), {})[pair.name] = pair.tensor.shape
    finetune = pairs[0].finetune
    table = finetune.tensors[str(finetune.embedding_name)].shape if finetune.embedding_name else (1, 1)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    head_dim = int(config.get("head_dim") or table[1] // heads)
    return Sizes(
        blocks=list(blocks.values()),
        embedding=(table[0], table[1]),
        is_tied=finetune.is_tied(),
        coded={pair.name: (pair.shape[0], pair.shape[1]) for pair in pairs if pair.name in coded},
        kv_features=2 * int(config.get("num_key_value_heads") or heads) * head_dim,
    )


def _stages(
    config: CompressConfig,
    training: Training | None,
    pairs: Pairs,
    coded: Collection[str],
    device: torch.device,
) -> list[Stage]:
    from compressor.fitting.cost import Model, Part, Stage  # brings the model library, which takes seconds

    moved = float(CODING_PASSES * sum(pair.num_bytes for pair in pairs.tensors))
    coding = Stage("coding", [Part("row blocks of every thread", CODING_BYTES, "host")], 0.0, moved)
    if training is None:
        return [coding]
    sizes = sizes_of(pairs.tensors, coded, pairs.finetune.config)
    free = _free(device)["host" if device.type == "cpu" else "device"]
    return [*Model(sizes, training, config.method, device.type == "cpu", free).stages(), coding]


def _missing(
    config: CompressConfig, training: Training, pairs: Pairs, coded: Collection[str], device: torch.device
) -> dict[str, tuple[int, int]]:
    """By place, the bytes that are needed at least, and how many of them are not there."""
    free = _free(device)
    stages = _stages(config, training, pairs, coded, device)
    needed = {where: max(stage.num_bytes(where, least=True) for stage in stages) for where in free}
    return {where: (count, count - free[where]) for where, count in needed.items()}


def _way_out(config: CompressConfig, pairs: Pairs, coded: Collection[str], device: torch.device) -> str:
    """The first options that need little enough."""
    assert config.training is not None
    training, tried = config.training, []
    fewer = training.calibration.samples
    while fewer // 2 >= FEWEST_SAMPLES:
        fewer //= 2
        tried.append(
            (f"--samples {fewer}", replace(training.calibration, samples=fewer), training.learn_signs)
        )
    if training.moves_signs(config.method):
        tried.append(("--no-learn-signs", training.calibration, False))
        few = replace(training.calibration, samples=fewer)
        tried.append((f"--no-learn-signs and --samples {fewer}", few, False))
    for options, calibration, learns in tried:
        other = replace(training, calibration=calibration, learn_signs=learns)
        if all(lacking <= 0 for _, lacking in _missing(config, other, pairs, coded, device).values()):
            return f"give {options}"
    return "give --calibration none, which reads no text" + (
        "" if device.type == "cpu" else ", or --device cpu"
    )


def _free(device: torch.device) -> dict[str, int]:
    from compressor.blockwise.sampling import free_bytes  # brings the model library, which takes seconds

    free = {"host": free_bytes(torch.device("cpu"))}
    return free if device.type == "cpu" else free | {"device": free_bytes(device)}


def _fastest(work: Any, device: torch.device) -> float:
    """Seconds of the fastest of some runs, for `RATE_S` in all."""
    best, begun = math.inf, time.perf_counter()
    while time.perf_counter() - begun < RATE_S:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _part_as_json(part: Part) -> dict[str, Any]:
    least = part.num_bytes if part.least_bytes is None else part.least_bytes
    return {"what": part.what, "where": part.where, "bytes": part.num_bytes, "least_bytes": least}


def _size(num_bytes: int) -> str:
    return tqdm.format_sizeof(num_bytes, "B")


def _duration(seconds: float) -> str:
    return tqdm.format_interval(seconds)
