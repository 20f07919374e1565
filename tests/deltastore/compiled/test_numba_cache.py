"""Compiled functions are kept for other processes, and an outdated or damaged one is never used."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from numba.core import types
from numba.core.event import install_recorder

from deltastore.compiled import numba_cache
from deltastore.compiled.sources import Sources
from tests.conftest import SmallDisk

ROOT = Path(__file__).resolve().parents[3]
KERNEL = "from part import part\n\ndef kernel(x):\n    return part(x) + 1\n"
PART = "import numba\n\n@numba.njit\ndef part(x):\n    return {factor} * x\n"


@dataclass(frozen=True, slots=True)
class Run:
    """One process that needed the function."""

    result: int
    num_passes: int  # of numba's compiler
    log: str


@dataclass(frozen=True, slots=True)
class Setup:
    """The function's source, and the user's cache."""

    folder: Path
    cache: Path

    def write_source(self, factor: int) -> None:
        # A file that is replaced within a second keeps its time, and Python its old bytecode.
        shutil.rmtree(self.folder / "__pycache__", ignore_errors=True)
        (self.folder / "kernel.py").write_text(KERNEL)
        (self.folder / "part.py").write_text(PART.format(factor=factor))

    def run(self, **environment: str) -> Run:
        program = [sys.executable, "-m", "tests.deltastore.helpers.compile_function", str(self.folder)]
        given = {
            **os.environ,
            "XDG_CACHE_HOME": str(self.cache),
            "PYTHONDONTWRITEBYTECODE": "",
            **environment,
        }
        done = subprocess.run(program, cwd=ROOT, env=given, capture_output=True, text=True, check=True)
        return Run(**json.loads(done.stdout), log=done.stderr)

    def entries(self) -> list[Path]:
        return sorted((self.cache / "peraxis" / "compiled").iterdir())


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    made = Setup(tmp_path / "source", tmp_path / "cache")
    made.folder.mkdir()
    made.write_source(factor=2)
    return made


def test_the_second_process_compiles_nothing(setup: Setup) -> None:
    first, second = setup.run(), setup.run()
    assert (first.result, second.result) == (41, 41)
    assert first.num_passes > 0
    assert second.num_passes == 0
    assert len(setup.entries()) == 1


def test_processes_of_two_versions_leave_each_other_their_entries(setup: Setup) -> None:
    setup.run()
    setup.write_source(factor=3)
    assert setup.run().num_passes > 0
    newer = setup.run()
    setup.write_source(factor=2)
    older = setup.run()
    assert (newer.result, newer.num_passes, older.result, older.num_passes) == (61, 0, 41, 0)


def test_a_change_of_an_inlined_function_in_another_file_compiles_again(setup: Setup) -> None:
    setup.run()
    setup.write_source(factor=3)
    changed = setup.run()
    assert changed.result == 61
    assert changed.num_passes > 0


def test_what_was_compiled_from_outdated_bytecode_is_not_taken_for_that_of_the_new_source(
    setup: Setup,
) -> None:
    part = setup.folder / "part.py"
    setup.run()
    state = part.stat()
    part.write_text(PART.format(factor=3))
    os.utime(part, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert setup.run().result == 41
    shutil.rmtree(setup.folder / "__pycache__")
    assert setup.run().result == 61


def test_processes_that_write_no_bytecode_share_the_entry(setup: Setup) -> None:
    assert setup.run(PYTHONDONTWRITEBYTECODE="1").num_passes > 0
    assert setup.run().num_passes == 0
    assert setup.run().num_passes == 0


def test_other_settings_of_numba_compile_again(setup: Setup) -> None:
    setup.run()
    assert setup.run(NUMBA_OPT="1").num_passes > 0


def test_another_processor_compiles_again(setup: Setup) -> None:
    setup.run()
    assert setup.run(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="").num_passes > 0
    assert len(setup.entries()) == 2


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_entry_is_compiled_again_and_replaced(setup: Setup, keep: int) -> None:
    setup.run()
    (entry,) = setup.entries()
    os.truncate(entry, keep % entry.stat().st_size)
    repaired, after = setup.run(), setup.run()
    assert repaired.result == after.result == 41
    assert repaired.num_passes > 0
    assert after.num_passes == 0


def test_processes_that_start_at_once_all_have_the_function(setup: Setup) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = [run.result for run in pool.map(lambda _: setup.run(), range(4))]
    assert results == [41] * 4
    assert setup.run().num_passes == 0
    assert len(setup.entries()) == 1


def test_a_directory_that_cannot_be_made_costs_a_log_line(setup: Setup) -> None:
    setup.cache.write_text("a file")
    run = setup.run()
    assert run.result == 41
    assert run.log.count("\n") == 1
    assert "set XDG_CACHE_HOME" in run.log


def test_a_full_disk_costs_a_log_line(setup: Setup, small_disk: SmallDisk) -> None:
    disk = small_disk(4096)
    run = Setup(setup.folder, disk).run()
    assert run.result == 41
    assert "No space left on device" in run.log


def test_a_directory_that_others_can_write_is_neither_read_nor_written(setup: Setup) -> None:
    setup.run()
    (entry,) = setup.entries()
    entry.parent.chmod(0o777)
    run = setup.run()
    assert run.result == 41
    assert run.num_passes > 0
    assert "can be written by other users" in run.log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_a_directory_of_another_user_is_neither_read_nor_written(setup: Setup) -> None:
    setup.run()
    (entry,) = setup.entries()
    os.chown(entry.parent, 65534, 65534)
    run = setup.run()
    assert (run.result, setup.entries()) == (41, [entry])
    assert run.num_passes > 0
    assert "can be written by other users" in run.log


def test_a_read_only_directory_is_read_and_costs_a_log_line(setup: Setup, small_disk: SmallDisk) -> None:
    disk = small_disk(1 << 20)
    on_disk = Setup(setup.folder, disk)
    on_disk.run()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert on_disk.run().num_passes == 0
    setup.write_source(factor=3)
    changed = on_disk.run()
    assert changed.result == 61
    assert "Read-only file system" in changed.log


def one_more(x: int) -> int:
    return x + 1


def test_nothing_is_kept_or_loaded_when_a_source_was_replaced_after_its_import(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(setup.cache))
    sources = Sources.of(setup.folder)
    numba_cache.function(one_more, "int64(int64)", sources)
    (entry,) = setup.entries()
    setup.write_source(factor=3)
    with install_recorder("numba:run_pass") as recorder:
        assert numba_cache.function(one_more, "int64(int64)", sources)(1) == 2
    assert recorder.buffer
    assert setup.entries() == [entry]


def test_nothing_is_kept_of_a_package_without_source_files(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(setup.cache))
    assert numba_cache.function(one_more, "int64(int64)", Sources.of(tmp_path / "archive.zip"))(1) == 2
    assert not setup.cache.exists()


def test_a_callback_is_called_from_c(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(setup.cache))
    signature = types.int64(types.int64)
    compiled: list[Any] = [
        numba_cache.callback(one_more, signature, Sources.of(setup.folder)) for _ in range(2)
    ]
    call_type = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    assert [call_type(one.address)(7) for one in compiled] == [8, 8]
    assert len(setup.entries()) == 1


def test_other_options_and_other_callers_have_entries_of_their_own(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(setup.cache))
    sources, signature = Sources.of(setup.folder), types.int64(types.int64)
    numba_cache.callback(one_more, signature, sources)
    numba_cache.function(one_more, signature, sources)
    numba_cache.function(one_more, signature, sources, error_model="numpy")
    assert len(setup.entries()) == 3


def test_a_function_that_another_one_defines_needs_a_name_of_its_own(setup: Setup) -> None:
    def inner(x: int) -> int:
        return x

    with pytest.raises(ValueError, match="set its __qualname__"):
        numba_cache.function(inner, "int64(int64)", Sources.of(setup.folder))


def test_a_function_with_an_address_of_this_process_is_refused(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(setup.cache))
    absolute = ctypes.CDLL(None).abs
    absolute.argtypes, absolute.restype = [ctypes.c_int], ctypes.c_int

    def calls(x: int) -> int:
        return int(absolute(x))

    calls.__qualname__ = "calls"
    with pytest.raises(ValueError, match="address of this process"):
        numba_cache.function(calls, "int64(int64)", Sources.of(setup.folder))


def test_a_cache_that_cannot_be_written_is_reported_once_per_process(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup.cache.write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(setup.cache))
    with caplog.at_level(logging.WARNING):
        for kind in ("int64(int64)", "float64(float64)"):
            numba_cache.function(one_more, kind, Sources.of(setup.folder))
    assert len(caplog.records) == 1
