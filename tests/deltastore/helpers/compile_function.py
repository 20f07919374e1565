"""Compile the function `kernel` of the module `kernel` in a folder, or load it, and print what happened as JSON.

A program of its own: a process has compiled a function or it has not.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path

from numba.core.event import install_recorder

from deltastore.compiled import numba_cache
from deltastore.compiled.sources import Sources


def main(folder: Path) -> None:
    logging.basicConfig(format="%(message)s")
    sources = Sources.of(folder)
    sys.path.insert(0, str(folder))
    kernel = importlib.import_module("kernel").kernel
    with install_recorder("numba:run_pass") as recorder:
        compiled = numba_cache.function(kernel, "int64(int64)", sources, nogil=True)
    print(json.dumps({"result": compiled(20), "num_passes": len(recorder.buffer)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
