"""Memory and processor time of real process trees."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.process import ProcessTree, memory_of, part_of

CHILD = "import sys; block = bytearray(64 << 20); print(flush=True); sys.stdin.read()"


def test_the_memory_of_a_tree_includes_its_children() -> None:
    tree = ProcessTree(os.getpid())
    before = tree.memory()["VmRSS"]
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree.memory()["VmRSS"] > before + (48 << 20)
        assert tree.of_each("VmHWM")[child.pid][1] > 64 << 20
        child.kill()


def test_a_tree_that_has_ended_uses_no_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert ProcessTree(child.pid).memory() == {}
    assert memory_of(child.pid) == {}


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["/usr/bin/python3", "-m", "peraxis", "serve"], "peraxis"),
        (["python", "-P", "-m", "server.engine.main", "7"], "engine"),
        (["sleep", "-m"], "sleep"),
        ([], ""),
    ],
)
def test_a_process_is_named_by_its_module(command: list[str], part: str) -> None:
    assert part_of(command) == part
