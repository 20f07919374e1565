"""Runs compiled functions on torch's own team of OpenMP threads. Knows OpenMP; no products and no attention.

Numba's thread pool beside torch's would spin for the same cores between two layers, which costs more than the work
itself. So kernels call the OpenMP runtime that torch is linked against and share its threads and its setting
(`torch.set_num_threads`). If torch is built without OpenMP, kernels run on the calling thread.
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
    """Return the shared library that reaches torch's OpenMP runtime; None if there is none."""
    for name in LIBRARIES:
        path = Path(torch.__file__).parent / "lib" / name
        if not path.exists():
            continue
        # torch has loaded it already. Its symbols include those of the OpenMP runtime that it is linked against.
        library = ctypes.CDLL(str(path))
        if hasattr(library, "GOMP_parallel"):
            return library
    return None


def counter(name: str) -> Any:
    """Return `omp_get_thread_num` or `omp_get_num_threads`, which compiled code can call inside a team."""
    function = getattr(runtime(), name)
    function.argtypes, function.restype = [], ctypes.c_int
    return function


@cache
def launcher() -> Callable[[int, bytes, int, int], None]:
    """Return ``launch(function, argument, num_threads, 0)``, which calls a function with `argument` once per thread.

    Function and argument are passed by address.
    """
    launch = getattr(runtime(), "GOMP_parallel")  # noqa: B009 - the runtime is there when this is called
    launch.argtypes, launch.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return launch  # type: ignore[no-any-return]


def team(share: Any, job_type: np.dtype[Any]) -> Callable[[bytes, int], None]:
    """Compile ``call(job, num_threads)``, which runs ``share(job, thread, num_threads)`` on each thread of a team.

    Args:
        share: a numba function.
        job_type: the record dtype of a job, which `call` takes as bytes.
    """
    if runtime() is None:

        def work(job: Any) -> None:
            share(array(job, 1, job_type)[0], 0, 1)

    else:
        number, size = counter("omp_get_thread_num"), counter("omp_get_num_threads")

        # Outside of a team, OpenMP reports thread 0 of 1.
        def work(job: Any) -> None:
            share(array(job, 1, job_type)[0], number(), size())

    compiled: Any = numba.cfunc(types.void(types.voidptr), error_model="numpy")(work)
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)

    def call(job: bytes, num_threads: int) -> None:
        if num_threads == 1 or runtime() is None:
            alone(job)
        else:
            launcher()(compiled.address, job, num_threads, 0)

    return call
