"""Memory and processor time of real process trees."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.process import ProcessTree, memory_of, part_of

# The child inherits the parent's streams, and starts when the parent is sent a line. Both end with their input.
PARENT = """
import subprocess, sys
print(flush=True)
sys.stdin.readline()
subprocess.run([sys.executable, *sys.argv[1:]])
"""
CHILD = "import os, sys; block = bytearray(64 << 20); print(os.getpid(), flush=True); sys.stdin.read()"


def test_the_memory_of_a_tree_includes_its_children() -> None:
    command, pipe = [sys.executable, "-c", PARENT, "-c", CHILD], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdout.readline()
        tree = ProcessTree(parent.pid)
        before = tree.memory()["VmRSS"]
        print(file=parent.stdin, flush=True)
        child = int(parent.stdout.readline())
        assert tree.memory()["VmRSS"] > before + (48 << 20)
        assert tree.of_each("VmHWM")[child][1] > 64 << 20


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
