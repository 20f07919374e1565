"""The next engine removes what one that was killed while it compiled has left, unless another one compiles."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deltastore.errors import NotServable
from server.engine.main import COMPILED, VLLM_ENVIRONMENT, compiling, serve_engine
from server.metrics.metrics import EngineMetrics
from server.settings import Settings

HELD = """
import sys
import threading
from pathlib import Path
from server.engine.main import compiling
with compiling(Path(sys.argv[1])):
    print("compiling", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables, and with those that a test sets removed behind it."""
    for name in (*VLLM_ENVIRONMENT, *COMPILED):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def start(cache: Path) -> subprocess.Popen[str]:
    """Return a process that compiles until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, cache], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    return process


def compiled_in(cache: Path) -> list[Path]:
    """Make the files that are compiled, and return them."""
    files = [
        cache / "inductor" / "ab" / "main.so",
        cache / "vllm" / "torch_compile_cache" / "one" / "code.py",
    ]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    return files


def test_what_a_killed_start_compiled_is_removed_once(tmp_path: Path) -> None:
    files, kept = compiled_in(tmp_path), tmp_path / "vllm" / "modelinfos"
    kept.mkdir()
    killed = start(tmp_path)
    killed.kill()
    killed.communicate()
    with compiling(tmp_path):
        assert not any(path.exists() for path in files)
    assert kept.is_dir()
    compiled_in(tmp_path)
    with compiling(tmp_path):
        assert all(path.exists() for path in files)


def test_nothing_is_removed_while_another_start_compiles(tmp_path: Path) -> None:
    files = compiled_in(tmp_path)
    killed, going = start(tmp_path), start(tmp_path)
    killed.kill()
    killed.communicate()
    with compiling(tmp_path):
        assert all(path.exists() for path in files)
    going.communicate()
    with compiling(tmp_path):
        assert not any(path.exists() for path in files)


def test_a_start_that_fails_in_order_leaves_what_it_compiled(tmp_path: Path) -> None:
    files = compiled_in(tmp_path)
    with pytest.raises(NotServable), compiling(tmp_path):
        raise NotServable("no memory")
    with compiling(tmp_path):
        assert all(path.exists() for path in files)


def test_a_directory_of_the_operator_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, _ = compiled_in(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    (own := tmp_path / "own" / "main.so").parent.mkdir()
    own.touch()
    killed = start(tmp_path)
    killed.kill()
    killed.communicate()
    with compiling(tmp_path):
        assert own.exists()
        assert library.exists()


def test_a_user_without_a_home_compiles_without_notes() -> None:
    with compiling(Path(os.devnull) / "peraxis"):
        assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_the_variables_are_set_before_vllm_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    class Backend(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name == "build_vllm_engine":
                seen.append(os.environ.get("HF_HUB_OFFLINE"))
            raise AttributeError(name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "server.engine.vllm_backend", Backend("server.engine.vllm_backend"))
    settings = Settings(base=tmp_path, registry=str(tmp_path), backend="vllm")
    with pytest.raises(ImportError, match="build_vllm_engine"):
        serve_engine(settings, f"ipc://{tmp_path}/socket", EngineMetrics(), threading.Event())
    assert "1" in seen
    assert not list((tmp_path / "peraxis" / "compiling").iterdir())
