"""Rows of the GPU bench's table: names, goals, and figures once they are measured. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

HOST_TO_READY_MS = 25.0
FASTER_THAN_CHECKPOINT = 10.0
STEP_SLACK = 1.25  # of base + k deltas of a sixteenth
BASE_TRAFFIC = 0.98
RESIDENT = 45


@dataclass(frozen=True, slots=True)
class BenchSizes:
    """Sizes of the model and of each measurement."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tokens: tuple[int, ...]  # of decode steps
    variants: tuple[int, ...]  # in one step, 0 is the base alone
    context: int  # tokens that each sequence has in the cache before a step
    prompts: tuple[int, ...]
    repeats: int

    def compositions(self) -> Iterator[tuple[int, int]]:
        """Tokens and variants of each decode step; a variant has at least one token."""
        return ((tokens, k) for tokens in self.tokens for k in self.variants if k <= tokens)


FULL = BenchSizes(32, 4096, 14336, 32, 8, 128256, (16, 64), (0, 1, 2, 4, 8, 16, 32), 512, (512, 4096), 20)
SMALL = BenchSizes(2, 96, 160, 6, 2, 200, (4, 6), (0, 1, 2, 4), 20, (8, 37), 2)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    section: str
    name: str
    unit: str
    goal: str = ""
    value: float | None = None
    met: bool | None = None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        value = "not measured" if self.value is None else f"{self.value:.4g} {self.unit}".strip()
        met = "" if self.met is None else ("met" if self.met else "NOT MET")
        return f"{self.section}: {self.name}", value, self.goal, met, self.note


class Rows:
    """All planned rows, in order."""

    def __init__(self, sizes: BenchSizes) -> None:
        self._rows = {(row.section, row.name): row for row in _planned(sizes)}

    def put(self, section: str, name: str, value: float, met: bool | None = None, note: str = "") -> None:
        """Fill a planned row."""
        row = self._rows[section, name]
        if (met is None) != (not row.goal):
            raise ValueError(f"{section}, {name}: a row with a goal needs `met`, and no other row takes it")
        self._rows[section, name] = replace(row, value=value, met=met, note=note)

    def explain(self, section: str, reason: str) -> None:
        """Note a reason in the rows of a section that are not measured."""
        for key, row in self._rows.items():
            if row.section == section and row.value is None:
                self._rows[key] = replace(row, note=reason)

    @property
    def is_wrong(self) -> bool:
        """True if a kernel's error exceeded the tolerance."""
        return any(row.section == "kernels" and row.met is False for row in self._rows.values())

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def as_json(self) -> list[dict[str, Any]]:
        """The measured rows."""
        return [asdict(row) for row in self if row.value is not None]


def _planned(sizes: BenchSizes) -> Iterator[Row]:
    for name in (
        "sign product",
        "sign product, bf16",
        "embedding rows",
        "paged attention",
        "paged attention, bf16",
    ):
        yield Row("kernels", name, "of the tolerance", "at most 1")
    yield Row("load", "limit: one pinned copy of a delta's bytes", "ms")
    yield Row("load", "delta, host to slot: copy", "ms")
    yield Row("load", "delta, host to ready: copy and views", "ms", f"at most {HOST_TO_READY_MS:.0f} ms")
    for cache in ("warm", "dropped"):
        for stage in ("read and verify", "rest of the copy", "total with views"):
            yield Row("load", f"delta, disk, page cache {cache}: {stage}", "ms")
        yield Row("load", f"full checkpoint, stock safetensors, page cache {cache}", "ms")
    yield Row(
        "load",
        "host to ready, times faster than the checkpoint (warm)",
        "",
        f"at least {FASTER_THAN_CHECKPOINT:.0f}",
    )
    yield Row("load", "disk to ready, times faster than the checkpoint (dropped)", "")
    for tokens in sizes.tokens:
        yield Row("base traffic", f"{tokens} tokens: plain transformers", "ms")
        yield Row("base traffic", f"{tokens} tokens: paged, no deltas possible", "ms")
        yield Row("base traffic", f"{tokens} tokens: delta-enabled, without a graph", "ms")
        for against in ("plain transformers", "paged, no deltas possible"):
            yield Row(
                "base traffic", f"{tokens} tokens: of the speed of {against}", "", f"at least {BASE_TRAFFIC}"
            )
    for tokens, k in sizes.compositions():
        goal = f"at most {step_limit(k):.2f} of base alone" if k else ""
        yield Row("decode", f"{tokens} tokens, {k or 'no'} variants", "ms", goal)
    for tokens in sizes.prompts:
        for who in ("plain transformers", "base", "one variant"):
            yield Row("prefill", f"{tokens} tokens: {who}", "ms")
    yield Row("fit", "slot", "MB")
    yield Row("fit", "variants resident beside base and cache", "", f"at least {RESIDENT}")


def step_limit(num_variants: int) -> float:
    """Return the limit of a step with so many deltas, in units of the base's step."""
    return STEP_SLACK * (1 + num_variants / 16)
