"""Compile all CPU kernels, or load them, and print the number of passes that numba's compiler ran.

A program of its own: a process has compiled its kernels or it has not.
"""

from __future__ import annotations

from numba.core.event import install_recorder

from server.kernels import compile_kernels

if __name__ == "__main__":
    with install_recorder("numba:run_pass") as recorder:
        compile_kernels()
    print(len(recorder.buffer))
