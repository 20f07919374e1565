"""Functions that numba compiles once per machine: their machine code is kept in the user's cache.

An entry is found by a digest of all that its machine code depends on: the source files, the versions of the compiler,
the processor and its features. So an outdated one is never found. Without a usable cache, every process compiles.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from deltastore.compiled.sources import Sources
from deltastore.user_cache import CacheDirectory, user_cache_dir

log = logging.getLogger(__name__)

# All that a compiled function depends on beside its source, the processor and the settings of numba.
VERSIONS = (numba.__version__, llvmlite.__version__, np.__version__, sys.implementation.cache_tag)


def callback(function: Callable[..., Any], signature: Any, sources: Sources, **options: Any) -> CFunc:
    """Compile a function for callers in C, or load it.

    Args:
        function: Its qualified name is that of its entry, so it must be unique in its module.
        signature: numba's signature.
        sources: the files of the function and of all that it inlines.
        options: numba's options, such as ``error_model``.

    Returns:
        The compiled function. Its `address` is valid as long as this object lives.

    Raises:
        ValueError: `function` was defined inside another function and still has its name from there.
    """
    compiled: Any = CFunc(function, normalize_signature(signature), {}, options)  # type: ignore[no-untyped-call]
    compiled._cache = _cache_of(function, sources, ("callback", options))
    compiled.compile()
    callback: CFunc = compiled
    return callback


def function(
    function: Callable[..., Any], signature: Any, sources: Sources, **options: Any
) -> Callable[..., Any]:
    """Compile a function for callers in Python, or load it. Arguments and errors are those of `callback`."""
    compiled: Any = numba.njit(**options)(function)
    compiled._cache = _cache_of(function, sources, ("function", options))
    compiled.compile(signature)
    compiled.disable_compile()
    called: Callable[..., Any] = compiled
    return called


def directory() -> CacheDirectory:
    """Return the directory of compiled functions."""
    return CacheDirectory(user_cache_dir() / "compiled")


def _cache_of(function: Callable[..., Any], sources: Sources, manner: object) -> _FunctionCache:
    name = f"{function.__module__}.{function.__qualname__}"
    if "<locals>" in name:
        # Numba names machine code by it. Two functions of one name would be mistaken for each other when loaded.
        raise ValueError(f"{name}: set its __qualname__ to a name that no other function of its module has")
    return _FunctionCache(name, sources, repr(manner))


@dataclass(frozen=True, slots=True)
class _FunctionCache(NullCache):
    """One function's entries, in the form in which numba asks for them."""

    name: str
    sources: Sources
    manner: str  # for whom it is compiled, and numba's options

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        # Numba initialises itself here when nothing was compiled before.
        target_context.refresh()
        content = directory().read(self._entry(sig, target_context.codegen()))
        if content is None or not self.sources.are_known():
            return None
        restored: CompileResult = CompileResult._rebuild(  # type: ignore[no-untyped-call]
            target_context, *pickle.loads(content)
        )
        return restored

    def save_overload(self, sig: Any, data: Any) -> None:
        if data.library.has_dynamic_globals:
            raise ValueError(f"{self.name} contains an address of this process, such as a ctypes function")
        if not self.sources.are_known():
            return
        try:
            content = dumps(data._reduce())  # type: ignore[no-untyped-call]
            directory().write(self._entry(sig, data.codegen), content)
        except OSError as error:
            _report(error.strerror or str(error))

    def _entry(self, sig: Any, codegen: Any) -> str:
        """Return the file name of the entry for a signature and a processor."""
        settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
        parts = (
            *(self.name, self.manner, str(sig), self.sources.digest),
            *(VERSIONS, codegen.magic_tuple(), settings),
        )
        readable = re.sub(r"[^\w.]", "-", self.name)[-64:]
        return f"{readable}-{hashlib.sha256(repr(parts).encode()).hexdigest()}"


@cache
def _report(reason: str) -> None:
    """Log once per process that compiled functions cannot be kept."""
    log.warning(
        "compiled functions cannot be kept in %s (%s), so every start compiles them again: set XDG_CACHE_HOME to a "
        "directory that this user can write",
        directory().path,
        reason,
    )
