"""The compiler of target cuda, called as Triton calls it."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from triton.runtime.build import compile_module_from_src

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "cuda_utils", "", -1, 0};
PyMODINIT_FUNC PyInit_cuda_utils(void) {
    PyObject *made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "answer", 42);
    return made;
}
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the script as CC, with an empty cache of Triton's."""
    script = tmp_path / "bin/prebuilt-cc"
    script.parent.mkdir()
    shutil.copy(ROOT / "docker/prebuilt-cc", script)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return script


def test_triton_gets_the_module_that_was_compiled_before(compiler: Path) -> None:
    gcc, headers = shutil.which("gcc"), sysconfig.get_path("include", "posix_prefix")
    if gcc is None or not Path(headers, "Python.h").exists():
        pytest.skip("gcc or Python's headers are not installed: apt-get install gcc python3-dev")
    source, library = compiler.parent / "source.c", compiler.parents[1] / "lib/cuda_utils.so"
    source.write_text(SOURCE)
    library.parent.mkdir()
    subprocess.run([gcc, "-shared", "-fPIC", f"-I{headers}", source, "-o", library], check=True)

    # Another text, so that a compiler would give another module.
    module = compile_module_from_src(SOURCE.replace("42", "43"), "cuda_utils")

    assert module.answer == 42


def test_any_other_module_fails_with_the_way_out(compiler: Path) -> None:
    failed = subprocess.run([compiler, "/tmp/other.c", "-o", "/tmp/other.so"], capture_output=True, text=True)

    assert failed.returncode == 1
    assert "set CC to a C compiler" in failed.stderr
