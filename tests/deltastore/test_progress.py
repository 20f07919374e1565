"""Progress in a log: whole lines that are spaced over all bars of the process."""

from __future__ import annotations

import os
import pty
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from deltastore import console


def test_bars_that_are_each_short_still_give_a_line_when_the_interval_has_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0.5)
    now = 0.0
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(console.ProgressBar, "_last_line_s", now)
    for number in range(12):
        with console.progress_bar(5, f"stage {number}", "step", enabled=True) as bar:
            for _ in range(5):
                now += 0.02
                bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("stage ") and "\r" not in line for line in lines)
    assert len({line.partition(":")[0] for line in lines}) == len(lines)


def test_a_log_has_no_control_characters_where_colours_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with console.progress_bar(3, "a [bold]\rname", "step", enabled=True) as bar:
        bar.update(3)
    written = capsys.readouterr().err
    assert written.splitlines()[-1] == "a [bold] name: 100%, 3 of 3 steps, 0:00:00 left"
    assert all(character.isprintable() for character in written.replace("\n", ""))


def test_no_units_at_all_are_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0)
    with console.byte_progress(0, "nothing", enabled=True):
        pass
    assert capsys.readouterr().err.startswith("nothing: ")


@pytest.mark.parametrize(("term", "is_bar"), [("xterm", True), ("dumb", False)])
def test_a_terminal_gets_a_bar_that_vanishes_and_a_dumb_one_lines(
    monkeypatch: pytest.MonkeyPatch, term: str, is_bar: bool
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0)
    monkeypatch.setenv("TERM", term)
    controller, terminal = pty.openpty()
    with open(terminal, "w") as file, console.byte_progress(2_000_000, "delta", True, file) as bar:
        bar.update(1_000_000)
    screen = ""
    # It gives what was written in pieces, and an error at their end.
    with suppress(OSError):
        while piece := os.read(controller, 1 << 16):
            screen += piece.decode()
    os.close(controller)
    erase_line = "\x1b[2K"
    assert ("50%, 1.00MB of 2.00MB" in screen, erase_line in screen) == (True, is_bar)


class Notebook:
    """IPython in a notebook, as far as bars use it; keeps what is displayed, in its present state."""

    def __init__(self, has_kernel: bool) -> None:
        self.shown: list[dict[str, str]] = []
        self.kernel = object() if has_kernel else None

    def get_ipython(self) -> Notebook:
        return self

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Notebook:
        assert raw
        assert display_id
        self.shown.append(data)
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown[-1] = data


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_notebook_gets_one_bar_of_html_that_ends_full(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(has_kernel)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0)
    with console.byte_progress(3000, "sending <b>", enabled=True) as bar:
        for _ in range(3):
            bar.update(1000)
    written = capsys.readouterr().err
    if not has_kernel:
        assert (notebook.shown, written.startswith("sending <b>: ")) == ([], True)
        return
    (shown,) = notebook.shown
    assert shown["text/plain"].startswith("sending <b>: 100%, 3.00kB of 3.00kB")
    assert shown["text/html"].startswith(
        '<progress value="3000" max="3000"></progress> sending &lt;b&gt;: 100%'
    )
    assert written == ""
    with console.byte_progress(3000, "quiet", enabled=False) as bar:
        bar.update(3000)
    assert len(notebook.shown) == 1
