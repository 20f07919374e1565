"""Runs a compiled function on the threads that torch computes with. Knows OpenMP; nothing of products.

A second pool of threads beside torch's (numba brings one) would spin for the same cores between two layers, which costs
more than the work itself. So kernels join the OpenMP runtime that torch is linked against: same threads, same setting
(`torch.set_num_threads`), no start-up of their own. Where torch uses no OpenMP, kernels run on the calling thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba.core import types

from server.kernels.addresses import array

LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")


@cache
def runtime() -> ctypes.CDLL | None:
    """The library through which torch's OpenMP runtime is reached; None where there is none."""
    for name in LIBRARIES:
        path = Path(torch.__file__).parent / "lib" / name
        if not path.exists():
            continue
        library = ctypes.CDLL(
            str(path)
        )  # loaded already; its symbols include those of what it is linked against
        if hasattr(library, "GOMP_parallel"):
            return library
    return None


def counter(name: str) -> Any:
    """`omp_get_thread_num` or `omp_get_num_threads`, callable from compiled code inside a team."""
    function = getattr(runtime(), name)
    function.argtypes, function.restype = [], ctypes.c_int
    return function


@cache
def launcher() -> Callable[[int, bytes, int, int], None]:
    """``launch(function, argument, num_threads, 0)``: call the function at an address with that of `argument`, once
    per thread.
    """
    launch = getattr(runtime(), "GOMP_parallel")  # noqa: B009 - the runtime is there when this is called
    launch.argtypes, launch.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return launch  # type: ignore[no-any-return]


def team(share: Any, job_type: np.dtype[Any]) -> Callable[[bytes, int], None]:
    """Compile ``call(job, num_threads)``, in which each thread runs ``share(job, thread, num_threads)``.

    Args:
        share: compiled code.
        job_type: the record that a job's bytes are.
    """
    if runtime() is None:

        def work(job: Any) -> None:
            share(array(job, 1, job_type)[0], 0, 1)

    else:
        number, size = counter("omp_get_thread_num"), counter("omp_get_num_threads")

        def work(job: Any) -> None:  # outside of a team, it is thread 0 of 1
            share(array(job, 1, job_type)[0], number(), size())

    compiled: Any = numba.cfunc(types.void(types.voidptr), error_model="numpy")(work)
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)

    def call(job: bytes, num_threads: int) -> None:
        if num_threads == 1 or runtime() is None:
            alone(job)
        else:
            launcher()(compiled.address, job, num_threads, 0)

    return call
