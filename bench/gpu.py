"""Measure deltas on a GPU: correctness of kernels, loads by stage, steps over k variants, prompts, memory.

Runs at most nine minutes, on random weights with the shapes of Llama 3.1 8B. Needs an installation without numba;
`make wheels` collects the packages that a GPU image lacks. Without a GPU every row is "not measured"; `--small
--device cpu` runs all sections at tiny shapes.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from triton.errors import TritonError

from bench.gpu_model import FULL, SMALL, BenchSizes, Rows, blueprint, build_model
from bench.gpu_sections import StepBench, check, measure_load
from bench.harness import DEVICE, Bench, Columns, Report, option, say, table_of
from server import kernels

MINUTES = 8.5
SMALL_LENGTHS = (1, 37, 300)
# Raised by kernels and devices; any other exception is an error of this program.
DEVICE_ERRORS = (RuntimeError, OSError, TritonError)


class SectionRunner:
    """Runs sections until the time is over. A section that fails does not stop the others."""

    def __init__(self, rows: Rows, minutes: float) -> None:
        self.rows = rows
        self._start = time.perf_counter()
        self._end = self._start + 60 * minutes

    def section(self, names: Sequence[str], work: Callable[[], object]) -> None:
        """Call `work`, which fills the sections `names` of the table; note the reason if it fails."""
        if time.perf_counter() > self._end:
            self._explain(names, "out of time")
            return
        try:
            work()
        except DEVICE_ERRORS as error:
            self._explain(
                names, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        say(f"{self.seconds:6.1f} s  {', '.join(names)}")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def _explain(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            self.rows.explain(name, reason)


def measure(run: SectionRunner, sizes: BenchSizes, device: torch.device, directory: Path) -> None:
    """Run all sections, on the plain model first, then paged, then delta-enabled."""
    rows = run.rows
    lengths = {"lengths": SMALL_LENGTHS} if sizes is SMALL else {}
    kernels.prepare(device)
    run.section(["kernels"], lambda: check(rows, device, **lengths))
    model = build_model(sizes, device)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    drawing = blueprint({name: tuple(value.shape) for name, value in weights.items()})
    run.section(["load"], lambda: measure_load(rows, weights, drawing, directory, sizes.repeats))
    stage = StepBench(model, sizes, device, rows)
    plain: dict[int, float] = {}
    paged: dict[int, float] = {}
    base: dict[int, float] = {}
    run.section(["base traffic"], lambda: plain.update(stage.plain()))
    run.section(["base traffic"], lambda: paged.update(stage.page()))
    run.section(["fit"], lambda: stage.fit(drawing))
    run.section(["decode"], lambda: base.update(stage.decode()))
    run.section(["base traffic"], lambda: stage.compare(plain, paged, base))
    run.section(["prefill"], stage.prefill)


def report(args: Namespace) -> Report:
    """Run what the device allows."""
    sizes, device = SMALL if args.small else FULL, torch.device(args.device)
    run = SectionRunner(Rows(sizes), args.minutes)
    try:
        if args.small or device.type == "cuda":
            with torch.no_grad():
                measure(run, sizes, device, args.directory)
        else:
            say("no GPU: nothing is measured; --small --device cpu tries all of it out\n")
    except BaseException:
        # Rows that were measured before an error of this program are not lost.
        _report(run, sizes, device).publish("gpu", args.out)
        raise
    return _report(run, sizes, device)


def _report(run: SectionRunner, sizes: BenchSizes, device: torch.device) -> Report:
    tiny = "; TINY shapes: figures show that it runs, and nothing else" if sizes is SMALL else ""
    return Report(
        {"sizes": asdict(sizes), "statistic": "median", "seconds": round(run.seconds)},
        run.rows.as_json(),
        [table_of(COLUMNS, run.rows)],
        conditions=f"{run.seconds:.0f} s{tiny}",
        device=device,
        is_failed=run.rows.is_wrong,
    )


COLUMNS: Columns = {
    "what": lambda row: f"{row.section}: {row.name}",
    "measured": lambda row: "not measured" if row.value is None else f"{row.value:.4g} {row.unit}".strip(),
    "goal": lambda row: row.goal,
    "": lambda row: {None: "", True: "met", False: "NOT MET"}[row.met],
    "note": lambda row: row.note,
}
OPTIONS = [DEVICE, option("--minutes", MINUTES, "no section begins later")]
main = Bench(
    "gpu",
    __doc__,
    report,
    OPTIONS,
    small="tiny shapes",
    folder="for the files: a disk, not memory",
    file=lambda args: "gpu.json" if torch.device(args.device).type == "cuda" else None,
)

if __name__ == "__main__":
    sys.exit(main())
