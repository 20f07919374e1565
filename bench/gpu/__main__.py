"""Measure deltas on a GPU: correctness of kernels, loads by stage, steps over k variants, prompts, memory.

Runs at most nine minutes, on random weights with the shapes of Llama 3.1 8B. Needs an installation without numba;
`make wheels` collects the packages that a GPU image lacks. Without a GPU every row is "not measured"; `--small
--device cpu` runs all sections at tiny shapes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from triton.errors import TritonError

from bench.gpu.check import check
from bench.gpu.load import measure_load
from bench.gpu.measure import FULL, SMALL, BenchSizes, Rows, blueprint, build_model
from bench.gpu.steps import StepBench
from bench.report import RESULTS, describe, write_result
from deltastore.console import table
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
        print(f"{self.seconds:6.1f} s  {', '.join(names)}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def _explain(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            self.rows.explain(name, reason)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    sizes = SMALL if args.small else FULL
    rows = Rows(sizes)
    device = torch.device(args.device)
    run = SectionRunner(rows, args.minutes)
    is_measured = device.type == "cuda" and not args.small
    out = args.out or (RESULTS / "gpu.json" if is_measured else None)
    try:
        if args.small or device.type == "cuda":
            with tempfile.TemporaryDirectory(dir=args.dir) as name, torch.no_grad():
                measure(run, sizes, device, Path(name))
        else:
            print("no GPU: nothing is measured; --small --device cpu tries all of it out\n", file=sys.stderr)
    finally:
        # Rows measured before an error of this program are not lost.
        report(run, sizes, device, out)
    return int(rows.is_wrong)


def report(run: SectionRunner, sizes: BenchSizes, device: torch.device, out: Path | None) -> None:
    """Print the table, and write the measured rows to `out`."""
    tiny = "; TINY shapes: figures show that it runs, and nothing else" if sizes is SMALL else ""
    print(f"{describe(device)}; {run.seconds:.0f} s{tiny}\n")
    print(table(("what", "measured", "goal", "", "note"), [row.cells() for row in run.rows]))
    if out is not None:
        settings = {"sizes": asdict(sizes), "statistic": "median", "seconds": round(run.seconds)}
        write_result(out, "gpu", device, {"settings": settings, "results": run.rows.as_json()})


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


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no section begins later")
    parser.add_argument("--dir", type=Path, help="where files are made; a disk, not a file system in memory")
    parser.add_argument(
        "--out", type=Path, help="the JSON file; by default bench/results/gpu.json, if measured"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
