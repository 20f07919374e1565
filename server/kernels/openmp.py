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

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic

from deltastore.compiled import numba_cache
from server.kernels.reference import SOURCES


def _pointer(typing_context: Any, address: Any) -> Any:
    """Turn an integer address into the pointer that `array` takes."""
    return types.voidptr(types.intp), lambda context, builder, signature, arguments: builder.inttoptr(
        arguments[0], context.get_value_type(types.voidptr)
    )


at: Any = intrinsic(_pointer)
array: Any = numba.carray  # type: ignore[attr-defined]


LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")
# Functions that compiled code calls by name, so that it contains no address and can be kept for other processes. The
# names are not OpenMP's own: those could be found in another runtime of the process.
_thread_number: Any = types.ExternalFunction("peraxis_omp_get_thread_num", types.int32())
_team_size: Any = types.ExternalFunction("peraxis_omp_get_num_threads", types.int32())


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
            for symbol in ("omp_get_thread_num", "omp_get_num_threads"):
                address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
                llvm.add_symbol(f"peraxis_{symbol}", address)
            return library
    return None


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
        share: a numba function of this folder.
        job_type: the record dtype of a job, which `call` takes as bytes.
    """
    has_threads = runtime() is not None

    def alone_work(job: Any) -> None:
        share(array(job, 1, job_type)[0], 0, 1)

    # Outside of a team, OpenMP reports thread 0 of 1.
    def team_work(job: Any) -> None:
        share(array(job, 1, job_type)[0], _thread_number(), _team_size())

    work = team_work if has_threads else alone_work
    work.__qualname__ = f"{work.__name__}-{share.__module__}.{share.__qualname__}"
    compiled: Any = numba_cache.callback(work, types.void(types.voidptr), SOURCES, error_model="numpy")
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)

    def call(job: bytes, num_threads: int) -> None:
        if num_threads == 1 or not has_threads:
            alone(job)
        else:
            launcher()(compiled.address, job, num_threads, 0)

    return call
