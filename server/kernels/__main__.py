"""Compile the CPU kernels for this processor: `python -m server.kernels`, which the build of an image runs.

They stay in the cache of the user that runs it, where a server's start finds them.
"""

from __future__ import annotations

from server.kernels import compile_kernels

if __name__ == "__main__":
    compile_kernels()
