"""Tests of output checks: no command writes over its inputs, and it refuses before any work."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from compressor.outputs import check_not_an_input
from deltastore.errors import UsageError
from peraxis.cli import run


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of things that are no models, so that any work on them fails otherwise."""
    for name in ("base", "tuned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    for name in ("diff.pt", "text.txt", "delta"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("base")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compressing(out: str) -> list[str]:
    return ["compress", "--base", "base", "--finetune", "tuned", "--calibration", "text.txt", "--out", out]


def importing(out: str) -> list[str]:
    files = ["--base", "base", "--finetune", "tuned", "--diff", "diff.pt"]
    return ["import", "bitdelta", *files, "--out", out]


def merging(out: str) -> list[str]:
    return ["merge", "--base", "base", "--delta", "delta", "--out", out]


@pytest.mark.parametrize(
    ("command", "out"),
    [
        *((command, out) for command in (compressing, importing, merging) for out in ("base", "base/new", "link/new")),
        *((command, "tuned/config.json") for command in (compressing, importing)),
        (compressing, "text.txt"),
        (importing, "./base/../diff.pt"),
        (merging, "delta"),
    ],
)  # fmt: skip
def test_an_out_that_is_or_lies_in_an_input_is_a_wrong_argument(
    command: Callable[[str], list[str]], out: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert run(command(out)) == 2
    line = r"error: --out \S+: it (is|lies in) \S+, which --\w+ reads: give --out the name of a file .*elsewhere\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_an_out_beside_the_inputs_is_apart_from_them(place: Path) -> None:
    check_not_an_input(place / "base.safetensors", {"base": place / "base", "finetune": "org/model"})


def test_the_line_names_the_option_that_reads(place: Path) -> None:
    with pytest.raises(UsageError, match="lies in tuned, which `finetune` reads"):
        check_not_an_input(Path("tuned/delta"), {"base": "base", "finetune": "tuned", "text": None})
