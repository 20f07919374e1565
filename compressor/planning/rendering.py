"""Requirements of a run as JSON and as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from compressor.fitting.stage_cost import MemoryItem
from compressor.planning.requirements import Requirements
from deltastore.quantities import size_text


def requirements_as_json(requirements: Requirements) -> dict[str, Any]:
    """Return totals and every stage with its parts, in bytes and seconds."""
    kinds = requirements.memory_kinds
    return {
        "memory": {
            where: {
                "bytes": requirements.peak(where),
                "least_bytes": requirements.peak(where, least=True),
                "free_bytes": requirements.free[where],
            }
            for where in kinds
        },
        "disk": {"bytes": requirements.disk_bytes, "free_bytes": requirements.free["disk"]},
        "seconds": round(sum(requirements.seconds), 1),
        "stages": [
            {
                "name": stage.name,
                "seconds": round(seconds, 1),
                **{f"{where}_bytes": stage.num_bytes(where) for where in kinds},
                "parts": [_item_as_json(item) for item in stage.items],
            }
            for stage, seconds in zip(requirements.stages, requirements.seconds, strict=True)
        ],
    }


def requirements_lines(requirements: Requirements) -> Iterator[str]:
    """Yield totals, and then each stage with its parts, the largest first."""
    kinds, free = requirements.memory_kinds, requirements.free
    for where in kinds:
        yield (
            f"{where} memory: {size_text(requirements.peak(where))} at most, "
            f"{size_text(requirements.peak(where, least=True))} at least; {size_text(free[where])} are free"
        )
    yield f"disk: {size_text(requirements.disk_bytes)} beside --out at most; {size_text(free['disk'])} are free"
    yield f"time: about {tqdm.format_interval(sum(requirements.seconds))}"
    for stage, seconds in zip(requirements.stages, requirements.seconds, strict=True):
        sizes = ", ".join(f"{size_text(stage.num_bytes(where))} of {where} memory" for where in kinds)
        yield f"{stage.name}: {tqdm.format_interval(seconds)}, {sizes}"
        for item in sorted(stage.items, key=lambda item: -item.num_bytes):
            suffix = "" if item.where == "host" else " (device)"
            yield f"  {size_text(item.num_bytes):>8}  {item.what}{suffix}"


def _item_as_json(item: MemoryItem) -> dict[str, Any]:
    least = item.num_bytes if item.least_bytes is None else item.least_bytes
    return {"what": item.what, "where": item.where, "bytes": item.num_bytes, "least_bytes": least}
