"""`peraxis demo --quick`: the whole way of the demo, by models too small to learn."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from peraxis.cli import run

# The demo takes 100 s on two cores, and several times that on a loaded machine.
ENDED_S = 1500.0
pytestmark = pytest.mark.timeout(1800)


@contextmanager
def quick_demo(work: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a process group of its own, with a temporary directory of its own."""
    scratch = work / "tmp"
    scratch.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "peraxis", "demo", "--quick", "--work", str(work / "models")],
        env=os.environ | {"TMPDIR": str(scratch)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what a quick demo prints on stdout."""
    work = tmp_path_factory.mktemp("demo")
    with quick_demo(work) as process:
        out, err = process.communicate(timeout=ENDED_S)
    assert process.returncode == 0, err
    assert not list((work / "tmp").glob("peraxis-demo-*"))
    return out


def test_every_stage_says_what_came_of_it(story: str) -> None:
    for line in (
        r"A base and three full fine-tunes of it, trained and scored in .* s:",
        r"  instruct  fitted to its own text +\d+ kB in place of \d+ kB, [\d.]+ times smaller, in [\d.]+ s",
        r"4 deltas uploaded to the running server in .* m?s\.",
        r"The base and three variants, asked at once, share a batch and answer in .* m?s:",
        r"96 more questions to 4 versions, mixed, in .* m?s\.",
        r"Rolled back: instruct is version 1, and version 1 answered after .* m?s\.",
        r"Promoted again: instruct is version 2, and version 2 answered after .* m?s\.",
    ):
        assert re.search(f"^{line}$", story, re.MULTILINE), line


def test_the_tables_have_every_version_and_both_kinds_of_first_token(story: str) -> None:
    for version in ("upper@1", "reverse@1", "instruct@1", "instruct@2"):
        assert re.search(rf"^\| {version} ", story, re.MULTILINE)
    for model in ("delta", "full FP16 checkpoint"):
        assert re.search(rf"^\| {model} +\| +[\d.]+ ms \| +[\d.]+ ms ", story, re.MULTILINE)


@pytest.mark.deploy
@pytest.mark.parametrize("stage", ["training instruct", "starting peraxis"])
def test_ctrl_c_ends_every_process_and_removes_what_is_temporary(stage: str, tmp_path: Path) -> None:
    with quick_demo(tmp_path) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if stage in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, rest = process.communicate(timeout=ENDED_S)
    assert process.returncode == 130, "".join(lines) + rest
    assert "Traceback" not in rest
    assert "--resume" not in rest
    assert "error: interrupted" in rest
    psutil.wait_procs(children, timeout=ENDED_S)
    assert not [child for child in children if child.is_running()]
    assert not list((tmp_path / "tmp").glob("peraxis-demo-*"))


def test_a_parent_that_is_killed_leaves_no_process_that_trains(tmp_path: Path) -> None:
    with quick_demo(tmp_path) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "training instruct" in line)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(children) > 1
    _, alive = psutil.wait_procs(children, timeout=ENDED_S)
    assert not alive


def test_a_directory_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "models"
    work.write_text("a file")
    assert run(["demo", "--quick", "--work", str(work)]) == 2
    err = capsys.readouterr().err
    assert re.search(r"^error: .*models/\w+: .*give --work a directory", err, re.MULTILINE), err
    assert "Traceback" not in err
