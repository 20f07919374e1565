"""The `peraxis` command itself: its imports, its errors and its exit codes."""

from __future__ import annotations

import importlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_group

from peraxis.cli import COMMANDS, CommandEntry, build, run

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''
import typer
from deltastore.errors import BaseMismatch, UsageError
app = typer.Typer()

@app.command()
def work(kind: str, as_json: bool = typer.Option(False, "--json")) -> None:
    """Work, and fail as asked."""
    if kind == "failed":
        raise BaseMismatch("delta 'a' was made\\nfrom another base")
    if kind == "authentication":
        from client.http import AuthenticationFailed
        raise AuthenticationFailed("the key has expired", 401, "invalid_api_key")
    if kind == "usage":
        raise UsageError("two options contradict each other")
    if kind == "interrupted":
        raise KeyboardInterrupt
    if kind == "findings":
        raise typer.Exit(1)
    if kind == "unreadable":
        open("no/such/file")
    if kind == "memory":
        raise MemoryError
    if kind == "torch memory":
        import torch
        torch.empty(1 << 60)
    if kind == "gpu memory":
        import torch
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    if kind == "threads":
        raise RuntimeError("can't start new thread")
    if kind == "bug":
        raise RuntimeError("no such thing")
    if kind == "terminated":
        import signal
        signal.raise_signal(signal.SIGTERM)
    print("done")
'''


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, CommandEntry]:
    (tmp_path / "mounted_for_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mounted_for_test", raising=False)
    return {
        "work": CommandEntry("mounted_for_test", "Test", "Work."),
        "jobs": CommandEntry("mounted_for_test", "Test", "Jobs.", True),
    }


@pytest.mark.parametrize("args", [["version"], ["--help"]])
def test_a_quick_answer_imports_none_of_the_packages(args: list[str]) -> None:
    program = (
        "import sys; from peraxis.cli import run; code = run(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'fastapi', 'numpy', 'compressor', 'server', 'client', 'peraxis.demo'};"
        "sys.exit(code or ', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *args], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "httpx",
    "pydantic_settings",
    "fastapi",
    "deltastore.registry.registry",
}
# Typer converts values by pydantic, and the settings of `serve` are a model of it.
MADE_BY_PYDANTIC = {"serve"}
# Each help is shown in a forked child that has imported `run` alone: json and os come with peraxis.cli. It prints the
# page, the exit code and the names of all modules that are imported then.
PROGRAM = """
import sys; from peraxis.cli import run
import json, os
for page in json.loads(sys.argv[1]):
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(json.dumps([page, run([*page, "--help"]), [*sys.modules]]), file=sys.stderr, flush=True)
        os._exit(0)
    os.wait()
"""


def pages() -> list[list[str]]:
    """Return every command line of a help page, without `--help`."""
    groups = {name: importlib.import_module(each.module) for name, each in COMMANDS.items() if each.is_group}
    nested = [[name, each] for name, module in groups.items() for each in get_group(module.app).commands]
    return [*([name] for name in COMMANDS), *nested]


@pytest.fixture(scope="module")
def shown() -> dict[str, tuple[int, set[str]]]:
    """The exit code of each page's help, and the modules that its process has imported by the end."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(pages())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    # An error of a page stands among the lines, and is no JSON.
    assert all(line.startswith("[") for line in done.stderr.splitlines()), done.stderr
    found = map(json.loads, done.stderr.splitlines())
    return {" ".join(page): (code, {*modules}) for page, code, modules in found}


@pytest.mark.parametrize("page", pages(), ids=" ".join)
def test_a_help_imports_only_what_it_shows(page: list[str], shown: dict[str, tuple[int, set[str]]]) -> None:
    code, modules = shown[" ".join(page)]
    heavy = HEAVY if page[0] in MADE_BY_PYDANTIC else HEAVY | {"pydantic"}
    assert (code, heavy & modules) == (0, set())


def test_the_help_of_every_option_is_a_whole_phrase() -> None:
    groups = [get_group(importlib.import_module(each.module).app) for each in COMMANDS.values()]
    options: list[Any] = [
        option for group in groups for command in group.commands.values() for option in command.params
    ]
    phrases = {str(option.help) for option in options}
    assert len(phrases) > 100
    assert [
        each for each in phrases if re.match(r"[^A-Z/]|(Of|Where|And|Or) ", each) or each[-1] != "."
    ] == []


def test_each_paragraph_of_a_help_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 500)
    assert run(["serve", "--help"]) == 0
    assert "A flag overrides the environment, which overrides the file." in capsys.readouterr().out


def test_the_options_of_completion_work_and_are_in_no_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not that of the tests, which may run without one.
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    assert run(["--help"]) == 0
    assert "completion" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        run(["--show-completion", "bash"])
    assert ended.value.code == 0
    assert "_PERAXIS_COMPLETE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "completed"), [("peraxis regis", ["registry"]), ("peraxis serve --admin-h", ["--admin-host"])]
)
def test_a_shell_completes_commands_and_options(
    words: str, completed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_PERAXIS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit) as ended:
        run([])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == completed


def test_version_prints_the_installed_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    assert capsys.readouterr().out.strip() == version("peraxis")


def test_help_lists_every_command_with_its_help_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and entry.help in out for name, entry in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_exists_in_its_package(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert f"peraxis {name}" in capsys.readouterr().out


def test_an_empty_command_line_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "compress" in capsys.readouterr().out


def test_a_command_that_works_exits_with_zero(
    commands: Mapping[str, CommandEntry], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["work", "well"], commands) == 0
    assert capsys.readouterr().out == "done\n"


def test_a_group_is_mounted_with_its_own_commands(
    commands: Mapping[str, CommandEntry], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["jobs", "work", "well"], commands) == 0
    assert capsys.readouterr().out == "done\n"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["work", "failed"], 1, "delta 'a' was made from another base"),
        (["work", "unreadable"], 1, "[Errno 2] No such file or directory: 'no/such/file'"),
        (["work", "usage"], 2, "two options contradict each other"),
        (["work", "authentication"], 4, "the key has expired"),
        (["work", "interrupted"], 130, "interrupted"),
        (["work", "terminated"], 143, "terminated"),
        (["work"], 2, "Missing argument 'kind'. (see 'peraxis work --help')"),
        (["work", "well", "--fast"], 2, "No such option: --fast (see 'peraxis work --help')"),
        (["wrk"], 2, "No such command 'wrk'. Did you mean 'work'? (see 'peraxis --help')"),
        (["jobs"], 2, "Missing command. (see 'peraxis jobs --help')"),
    ],
)
def test_an_error_is_one_line_on_stderr(
    commands: Mapping[str, CommandEntry],
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    code: int,
    message: str,
) -> None:
    assert run(args, commands) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"error: {message}\n")


@pytest.mark.parametrize("kind", ["memory", "torch memory", "gpu memory", "threads"])
def test_out_of_memory_is_one_line_with_the_options_to_lower(
    kind: str, commands: Mapping[str, CommandEntry], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["work", kind], commands) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: out of memory")
    assert "lower --samples" in line
    assert line.count("\n") == 1
    assert run(["work", kind, "--json"], commands) == 1
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "MemoryError"


def test_an_unexpected_error_is_not_reported_as_out_of_memory(
    commands: Mapping[str, CommandEntry],
) -> None:
    with pytest.raises(RuntimeError, match="no such thing"):
        run(["work", "bug"], commands)


def test_after_a_command_sigterm_is_as_it_was_before(commands: Mapping[str, CommandEntry]) -> None:
    run(["work", "terminated"], commands)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("args", [["version"], ["--help"], ["inspect", "no-such-file", "--json"]])
def test_a_full_stdout_is_one_line_on_stderr(args: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "peraxis", *args],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_with_json_an_error_is_one_document_on_stdout(
    commands: Mapping[str, CommandEntry], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["work", "failed", "--json"], commands) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "error": {"message": "delta 'a' was made from another base", "type": "BaseMismatch"}
    }
    assert captured.err == ""


def test_with_json_the_error_of_a_server_has_its_code(
    commands: Mapping[str, CommandEntry], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["work", "authentication", "--json"], commands) == 4
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "invalid_api_key"


def test_a_command_may_choose_its_exit_code_without_a_message(
    commands: Mapping[str, CommandEntry], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["work", "findings"], commands) == 1
    assert capsys.readouterr() == ("", "")


def test_building_the_command_imports_no_listed_module(commands: Mapping[str, CommandEntry]) -> None:
    build(commands)
    assert "mounted_for_test" not in sys.modules
