"""The options that all commands of this package share, and their results as JSON.

Every command imports this file, so it imports nothing that only some of them need.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.models import ArgumentInfo, OptionInfo

from client.http import DEFAULT_URL, URL_VARIABLE, ServerAddress
from client.waiting import WAIT_S
from deltastore.console import flag_of, naming_flags, with_flags

SERVER = "Server"
# Of arguments that errors of all calls name.
SHARED_FLAGS = {"url": "--url", "key_file": "--key-file", "wait_s": "--wait S"}

Url = Annotated[
    str,
    typer.Option(
        "--url", envvar=URL_VARIABLE, metavar="URL", help="The server's address.", rich_help_panel=SERVER
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="File with the API key; by default the key is taken from PERAXIS_API_KEY.",
        rich_help_panel=SERVER,
    ),
]
Tenant = Annotated[
    str | None,
    typer.Option(
        "--tenant", metavar="NAME", help="With an admin key: act for this tenant.", rich_help_panel=SERVER
    ),
]
Wait = Annotated[
    int | None,
    typer.Option(
        "--wait",
        metavar="S",
        min=0,
        help="Seconds to wait for a server that is starting, even if nothing listens yet. Without it, a server that "
        f"answers 503, or that has answered before, is waited for {WAIT_S} s.",
        rich_help_panel=SERVER,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The variant.")]
Reference = Annotated[
    str, typer.Argument(metavar="NAME[@VERSION]", help="The variant; without a version, its active one.")
]
Command = Callable[..., None]


def takes(make: Callable[..., object]) -> Callable[[Command], Command]:
    """Return a decorator for commands whose first parameter is what `make` returns: they get the options of `make`.

    Errors of the command and of `make`, which name arguments, then name flags.

    Typer reads a command's options from its signature, and has no other way to share them.
    """
    shared = _parameters(make)

    def decorate(command: Command) -> Command:
        parameters = [*_parameters(command)[1:], *shared]
        flags = flags_of(parameters)

        @wraps(command)
        def called(**given: Any) -> None:
            with naming_flags(flags):
                command(make(**{option.name: given.pop(option.name) for option in shared}), **given)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def takes_address(*, tenant: bool = True) -> Callable[[Command], Command]:
    """Return a decorator for commands whose first parameter is a ServerAddress: they get the options that make one.

    Args:
        tenant: Whether --tenant is among the options.
    """
    return takes(_address_for_tenant if tenant else _address)


def _address(url: Url = DEFAULT_URL, key_file: KeyFile = None) -> ServerAddress:
    return ServerAddress.of(url, key_file)


def _address_for_tenant(
    url: Url = DEFAULT_URL, key_file: KeyFile = None, acting_for: Tenant = None
) -> ServerAddress:
    return ServerAddress.of(url, key_file, acting_for)


def flags_of(parameters: Iterable[inspect.Parameter]) -> dict[str, str]:
    """Return the words by which a command's user knows its parameters: flags, and names of arguments."""
    flags = {}
    for parameter in parameters:
        for shown in get_args(parameter.annotation):
            if isinstance(shown, ArgumentInfo):
                flags[parameter.name] = shown.metavar or parameter.name.upper()
            elif isinstance(shown, OptionInfo):
                flag = next(iter(shown.param_decls or ()), flag_of(parameter.name))
                flags[parameter.name] = flag.partition("/")[0]
    return {**flags, **SHARED_FLAGS}


def print_line(line: str) -> None:
    """Print a line on stderr; where it repeats an error, flags stand in place of arguments."""
    print(with_flags(line, SHARED_FLAGS), file=sys.stderr, flush=True)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


def print_json(document: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=2))
