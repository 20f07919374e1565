"""The service's modules are imported without a garbage collection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import gc, json
from server.engine.main import without_collection
passes = []
gc.callbacks.append(lambda phase, info: passes.append(info["generation"]))
with without_collection():
    import server.model.loader
    during = len(passes)
print(json.dumps([during, gc.isenabled(), gc.get_freeze_count() > 100_000, len(gc.get_objects()) < 1000]))
"""


def test_modules_are_imported_without_a_collection_and_later_ones_skip_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [0, True, True, True]
