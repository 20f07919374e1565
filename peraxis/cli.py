"""The `peraxis` command: mount the commands of the packages and turn errors into exit codes.

A package is imported when one of its commands runs, so that help and version answer at once.
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

from deltastore.errors import PeraxisError
from deltastore.memory import is_out_of_memory
from deltastore.threads import bound_spinning


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """One command of the help page, and the module that defines it."""

    # The module has a Typer `app` with a command of this name. With `is_group`, the whole `app` is the command.
    module: str
    panel: str
    help: str
    is_group: bool = False


TERMINATED = 128 + signal.SIGTERM

MAKE, PUBLISH, SERVE, OPERATE = "Make deltas", "Publish variants", "Serve them", "Operate a server"
# Typer's options of the root command, and the variable that a shell sets to have a word completed.
COMPLETION = frozenset({"--install-completion", "--show-completion"})
COMPLETE_VARIABLE = "_PERAXIS_COMPLETE"
COMMANDS: Mapping[str, CommandEntry] = {
    "compress": CommandEntry("compressor.cli", MAKE, "Make a delta from a base and its fine-tune."),
    "eval": CommandEntry("compressor.cli", MAKE, "Measure how close a delta is to its fine-tune."),
    "inspect": CommandEntry(
        "deltastore.cli", MAKE, "Show the contents of a delta, or plan one from a model's shapes."
    ),
    "verify": CommandEntry("deltastore.cli", MAKE, "Check a delta, and optionally that it fits a base."),
    "merge": CommandEntry("compressor.cli", MAKE, "Add a delta to its base and write a stock checkpoint."),
    "import": CommandEntry("compressor.cli", MAKE, "Make a delta from a file of BitDelta or of the paper."),
    "push": CommandEntry("client.push", PUBLISH, "Publish an artifact as the next version of a variant."),
    "push-hub": CommandEntry("compressor.cli", PUBLISH, "Upload a delta to the Hugging Face hub."),
    "ls": CommandEntry("client.variants", PUBLISH, "List the registered variants."),
    "show": CommandEntry("client.variants", PUBLISH, "Show one variant and its versions."),
    "promote": CommandEntry("client.variants", PUBLISH, "Make a version the active one."),
    "rollback": CommandEntry(
        "client.variants", PUBLISH, "Make the version active again that was active before."
    ),
    "share": CommandEntry("client.variants", PUBLISH, "Make a variant public: every tenant may use it."),
    "unshare": CommandEntry("client.variants", PUBLISH, "Make a public variant private again."),
    "rm": CommandEntry("client.variants", PUBLISH, "Delete a variant, or one version that is not active."),
    "serve": CommandEntry("server.cli", SERVE, "Serve a base and the variants of a registry over HTTP."),
    "chat": CommandEntry("client.chat", SERVE, "Talk to a variant, or to two side by side."),
    "demo": CommandEntry(
        "peraxis.demo.cli",
        SERVE,
        "Train and serve tiny models, or serve a pair of your own.",
    ),
    "ps": CommandEntry("client.variants", OPERATE, "List the versions that are in memory or have requests."),
    "load": CommandEntry("client.variants", OPERATE, "Load a variant into a slot before a request needs it."),
    "unload": CommandEntry(
        "client.variants", OPERATE, "Free a variant's slot as soon as no request uses it."
    ),
    "pin": CommandEntry("client.variants", OPERATE, "Load a variant into a slot and never evict it."),
    "unpin": CommandEntry("client.variants", OPERATE, "Allow the eviction of a pinned variant again."),
    "keys": CommandEntry("peraxis.keys", OPERATE, "Create, list and revoke tenants' API keys.", True),
    "tenants": CommandEntry("client.tenants", OPERATE, "List tenants, and set their limits.", True),
    "registry": CommandEntry(
        "deltastore.registry.cli", OPERATE, "List, clean and check a registry on disk.", True
    ),
    "doctor": CommandEntry("client.doctor", OPERATE, "Check that a running server answers, and your key."),
}


class LazyGroup(TyperGroup):
    """A group that knows its commands' names and help lines, and imports a command when it is resolved."""

    entries: Mapping[str, CommandEntry] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _give_help_a_default(self, ctx)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if (entry := self.entries.get(name or "")) is not None:
            command = _load(str(name), entry)
            _give_help_a_default(command, ctx)
        return name, command, rest


def build(commands: Mapping[str, CommandEntry] = COMMANDS, *, completion: bool = False) -> LazyGroup:
    """Return the root command over `commands` without importing them.

    Args:
        commands: The commands by name.
        completion: Whether it completes words for a shell and has the options that install that. With them, each
            command line imports pydantic, which takes as long as the rest of a help.
    """
    app = typer.Typer(
        name="peraxis",
        cls=LazyGroup,
        help="Serve many fine-tunes of one language model, each as a 1-bit delta over a shared base.",
        epilog="Start with: peraxis demo",
        add_completion=completion,
    )
    for name, entry in commands.items():
        app.command(name, help=entry.help, rich_help_panel=entry.panel)(_placeholder)
    app.command("version", help="Print the version.", rich_help_panel=OPERATE)(_print_version)
    root = typer.main.get_command(app)
    assert isinstance(root, LazyGroup)
    root.entries = commands
    return root


def run(args: Sequence[str], commands: Mapping[str, CommandEntry] = COMMANDS) -> int:
    """Run one command line and return its exit code. An error is one line on stderr, or with `--json` a document.

    Exit codes: 0 done, 1 a failed job, 2 wrong arguments, 4 authentication, 130 interrupted, 143 terminated, or the
    command's own.
    """
    as_json = "--json" in args
    try:
        with _terminable():
            completion = COMPLETE_VARIABLE in os.environ or not COMPLETION.isdisjoint(args)
            outcome = build(commands, completion=completion).main(
                list(args) or ["--help"], prog_name="peraxis", standalone_mode=False
            )
            # Flush here, so that a failing write is reported like every other error.
            sys.stdout.flush()
    except _Terminated:
        return _report("terminated", "Terminated", TERMINATED, as_json)
    except typer.TyperException as error:
        return _report(_message(error) + _hint(error), type(error).__name__, error.exit_code, as_json)
    except typer.Abort:
        return _report("aborted", "Abort", 1, as_json)
    except PeraxisError as error:
        return _report(str(error), type(error).__name__, error.exit_code, as_json, error.code)
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
    """Run the command line of this process; the entry point of the installed script."""
    # Before a command imports torch, whose OpenMP runtime reads the policy once.
    bound_spinning(os.environ)
    sys.exit(run(sys.argv[1:]))


class _Terminated(BaseException):
    """Raised by SIGTERM. Like KeyboardInterrupt it is no Exception, so it unwinds every `with` and `finally`."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the block, if it has no handler yet and this is the main thread."""
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
    # A second SIGTERM would interrupt the clean-up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated


def _memory_message(error: MemoryError | RuntimeError) -> str:
    reason = " ".join(str(error).split())[:120]
    return (
        f"out of memory{f' ({reason})' if reason else ''}: free some memory or use less: when serving, lower "
        "--max-gpu-deltas, --kv-cache-gb or --max-host-cache-gb; when compressing, lower --samples, add "
        "--no-learn-signs, or use --device cpu if GPU memory ran out"
    )


def _load(name: str, entry: CommandEntry) -> Any:
    group = get_group(importlib.import_module(entry.module).app)
    for command in (group, *group.commands.values()):
        command.help = _unfolded(command.help or "")
    # A missing command is then reported in one line, like every other wrong argument.
    group.no_args_is_help = False
    return group if entry.is_group else group.commands[name]


def _give_help_a_default(command: Any, ctx: Any) -> None:
    # Typer converts a value that is no bool by pydantic, whose import takes as long as the rest of a help.
    command.get_help_option(ctx).default = False


def _unfolded(text: str) -> str:
    """Join the lines of each paragraph, which Typer does only for the first one."""
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in text.split("\n\n"))


def _placeholder() -> None:
    raise RuntimeError("LazyGroup replaces this placeholder before it runs")


def _print_version() -> None:
    print(installed_version("peraxis"))


def _message(error: typer.TyperException) -> str:
    # Typer passes on the message of pydantic, which parses choices and paths for it.
    return error.format_message().replace(": Value error, ", ": ", 1)


def _hint(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f" (see '{context.command_path} --help')" if context is not None else ""


def _report(message: str, kind: str, exit_code: int, as_json: bool, code: str | None = None) -> int:
    """Print an error; `code` is the server's, if a server reported it. Return the exit code."""
    line = " ".join(message.split())
    error = {"message": line, "type": kind} | ({} if code is None else {"code": code})
    document = json.dumps({"error": error}) + "\n"
    if not _is_printed(document if as_json else "") or not as_json:
        print(f"error: {line}", file=sys.stderr)
    return exit_code


def _is_printed(text: str) -> bool:
    """Write and flush `text` to stdout. If stdout fails, redirect it to /dev/null and return False.

    Without the redirection, Python's own flush at exit would fail, too.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
