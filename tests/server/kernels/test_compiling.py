"""The CPU kernels are compiled once per machine, and a server on CUDA imports no compiler for the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_structure import imports_of

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ROOT / "server" / "kernels"


def run(*program: str, **environment: str) -> str:
    given = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, *program], cwd=ROOT, env=given, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def num_passes(cache: Path, **environment: str) -> list[int]:
    """Return how many passes numba's compiler ran when the kernels were prepared, and in the products that followed."""
    program = ("-m", "tests.server.helpers.compile_kernels")
    return [int(number) for number in run(*program, XDG_CACHE_HOME=str(cache), **environment).split()]


@pytest.mark.deploy
def test_no_process_compiles_a_kernel_after_the_build_of_an_image(tmp_path: Path) -> None:
    """Neither when it starts nor in its first products."""
    run("-m", "server.kernels", XDG_CACHE_HOME=str(tmp_path))
    assert num_passes(tmp_path) == [0, 0]


@pytest.mark.deploy
def test_all_kernels_of_a_processor_without_avx_are_compiled_before_the_first_product(tmp_path: Path) -> None:
    before, during = num_passes(tmp_path, NUMBA_ENABLE_AVX="0")
    assert before > 0
    assert during == 0


def test_the_model_and_the_kernels_of_cuda_are_imported_without_numba() -> None:
    program = "import sys, server.model.loader; print('numba' in sys.modules, 'llvmlite' in sys.modules)"
    assert run("-c", program) == "False False"


def test_kernels_inline_nothing_of_another_folder() -> None:
    """The cache of compiled kernels follows changes of their own folder alone."""
    found = {
        (path.name, name)
        for path in KERNELS.glob("*.py")
        if any(name.split(".")[0] == "numba" for name in imports_of(path))
        for name in imports_of(path)
        if name.split(".")[0] in {"deltastore", "server"}
        # No compiled code calls the cache of which kernels are the fastest.
        and not name.startswith(("server.kernels", "deltastore.compiled", "deltastore.user_cache"))
    }
    assert not found
