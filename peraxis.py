"""The `peraxis` command: mounts the commands of the packages and turns errors into exit codes.

A package is imported when one of its commands is used, so that help and version answer at once.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_group

from deltastore.errors import PeraxisError, UsageError
from deltastore.memory import is_out_of_memory


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command lives: a module with a Typer `app`, which holds it by name or, as a group, is it."""

    module: str
    panel: str
    help: str
    is_group: bool = False


TERMINATED = 128 + signal.SIGTERM

DELTAS, SERVICE, OTHER = "Make and read deltas", "Serve them", "Other"
COMMANDS: Mapping[str, Entry] = {
    "compress": Entry("compressor.cli", DELTAS, "Make a delta from a base and its fine-tune."),
    "merge": Entry("compressor.cli", DELTAS, "Add a delta to its base and write a stock checkpoint."),
    "import": Entry("compressor.convert.cli", DELTAS, "Make a delta of BitDelta's file, or of the paper's."),
    "eval": Entry("compressor.evaluate.cli", DELTAS, "Measure how near a delta is to its fine-tune."),
    "inspect": Entry(
        "deltastore.cli", DELTAS, "Show what is inside a delta, or what a model's shapes would give."
    ),
    "verify": Entry("deltastore.cli", DELTAS, "Check a delta, also against its base."),
    "serve": Entry("server.cli", SERVICE, "Serve a base and the variants of a registry over HTTP."),
    "registry": Entry("deltastore.registry.cli", SERVICE, "List, clean and check a registry on disk.", True),
    "demo": Entry("demo.cli", OTHER, "Walk the whole way once, on this machine's CPU."),
}


class LazyGroup(TyperGroup):
    """A group of names and help lines; what a name stands for is imported when it is resolved."""

    entries: Mapping[str, Entry] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        entry = self.entries.get(name or "")
        return name, command if entry is None else _load(str(name), entry), rest


def build(commands: Mapping[str, Entry] = COMMANDS) -> LazyGroup:
    """The root command over `commands`; imports none of them."""
    app = typer.Typer(
        name="peraxis",
        cls=LazyGroup,
        help="Serve many fine-tunes of one language model, each as a 1-bit delta over a shared base.",
        epilog="Start with: peraxis demo",
    )
    for name, entry in commands.items():
        app.command(name, help=entry.help, rich_help_panel=entry.panel)(_placeholder)
    app.command("version", help="Print the version.", rich_help_panel=OTHER)(_print_version)
    root = typer.main.get_command(app)
    assert isinstance(root, LazyGroup)
    root.entries = commands
    return root


def run(args: Sequence[str], commands: Mapping[str, Entry] = COMMANDS) -> int:
    """Run one command line and return its exit code; an error is one line on stderr, or one JSON document.

    0 done; 1 a failed job; 2 wrong arguments; 130 interrupted; 143 terminated; another code where a command says so.
    """
    as_json = "--json" in args
    try:
        with _terminable():
            outcome = build(commands).main(
                list(args) or ["--help"], prog_name="peraxis", standalone_mode=False
            )
            sys.stdout.flush()  # here, where what goes wrong is told as everything else is
    except _Terminated:
        return _report("terminated", "Terminated", TERMINATED, as_json)
    except typer.TyperException as error:
        return _report(error.format_message() + _hint(error), type(error).__name__, error.exit_code, as_json)
    except typer.Abort:
        return _report("aborted", "Abort", 1, as_json)
    except PeraxisError as error:
        return _report(str(error), type(error).__name__, 2 if isinstance(error, UsageError) else 1, as_json)
    except OSError as error:
        return _report(str(error), type(error).__name__, 1, as_json)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _report(_memory_message(error), "MemoryError", 1, as_json)
    if outcome == 130:
        return _report("interrupted", "Interrupted", 130, as_json)
    return outcome if isinstance(outcome, int) else 0


def main() -> None:
    """Entry point of the installed script."""
    sys.exit(run(sys.argv[1:]))


class _Terminated(BaseException):
    """SIGTERM; like KeyboardInterrupt it passes whoever catches errors, and cleans up on its way."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the command, where nobody listens to it and signals can be had at all."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would stop the cleaning up
    raise _Terminated


def _memory_message(error: MemoryError | RuntimeError) -> str:
    reason = " ".join(str(error).split())[:120]
    return (
        f"out of memory{f' ({reason})' if reason else ''}: free some, or use less: when serving, lower "
        "--max-gpu-deltas, --kv-cache-gb or --max-host-cache-gb; when compressing, lower --samples, give "
        "--no-learn-signs, or --device cpu where it is the GPU's"
    )


def _load(name: str, entry: Entry) -> Any:
    group = get_group(importlib.import_module(entry.module).app)
    group.no_args_is_help = (
        False  # a missing command is a wrong argument, reported as one line like every other
    )
    return group if entry.is_group else group.commands[name]


def _placeholder() -> None:
    raise AssertionError("a listed command is replaced by its own before it runs")


def _print_version() -> None:
    print(installed_version("peraxis"))


def _hint(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f" (see '{context.command_path} --help')" if context is not None else ""


def _report(message: str, kind: str, code: int, as_json: bool) -> int:
    line = " ".join(message.split())
    document = json.dumps({"error": {"message": line, "type": kind}}) + "\n"
    if not _is_printed(document if as_json else "") or not as_json:
        print(f"error: {line}", file=sys.stderr)
    return code


def _is_printed(text: str) -> bool:
    """Whether stdout took this and all before; where not, the rest goes nowhere, lest Python complain at exit."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


if __name__ == "__main__":
    main()
