"""Runs the GPU bench on a CPU as a machine would that has none of the service's libraries. A program of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType

ROOT = str(Path(__file__).resolve().parents[3])
ABSENT = {
    "fastapi",
    "httpx",
    "jinja2",
    "prometheus_client",
    "typer",
    "uvicorn",
}


class Absent:
    """Refuses what our own files import of those; other libraries may have them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        file = importer(sys._getframe(1))
        is_ours = (
            file.startswith(f"{ROOT}/") and "site-packages" not in file
        )  # an environment may lie in here
        if is_ours and name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is not installed where the bench runs")


def importer(frame: FrameType | None) -> str:
    """The file whose import statement runs."""
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    from bench.gpu import main

    sys.exit(main(sys.argv[1:]))
