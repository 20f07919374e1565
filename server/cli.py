"""`peraxis serve`: parse the flags, load the settings, run the server. The flags are made from the settings' fields."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperOption

from deltastore.errors import UsageError
from server.settings import Settings, choices_of, flag_name, flags_of_settings
from server.settings_sources import REMOVED, load_settings

log = logging.getLogger(__name__)

app = typer.Typer(add_completion=False)

# For --check, which needs neither.
STAND_INS: Mapping[str, Path] = {"base": Path("/"), "registry": Path("/")}
# Typer makes the working directory of an empty path.
TEXT_OF_PATHS: Mapping[Any, Any] = {Path: str, list[Path]: list[str]}


class ServeCommand(TyperCommand):
    """The command with the default of each setting in its help.

    Options themselves have no default and are never required, because only those that are given override the
    environment and the file.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, after which the command ends."""
        for option in self.params:
            if isinstance(option, TyperOption) and (flag := flags_of_settings().get(option.name)):
                field = Settings.model_fields[option.name]
                option.required = field.is_required()
                option.default = None if flag.computed or field.is_required() else field.default
                option.show_default = flag.computed or True
        super().format_help(ctx, formatter)


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with `**flags` an option for each setting that has a flag; it gets those that are not None."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    named = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = inspect.Signature([*_options(), *named])  # type: ignore[attr-defined]
    return command


def _options() -> Iterator[inspect.Parameter]:
    for name, flag in flags_of_settings().items():
        field = Settings.model_fields[name]
        parsed, metavar = _parsed_type(field.annotation), flag.metavar
        # No choice and no path for typer: Settings checks each value, whatever its source.
        if choices := choices_of(name):
            metavar = f"<{'|'.join(choices)}>"
        elif parsed in TEXT_OF_PATHS:
            parsed, metavar = TEXT_OF_PATHS[parsed], metavar or "<path>"
        own = flag_name(name)
        option = typer.Option(
            f"{own}/--no-{own[2:]}" if parsed is bool else own,
            help=field.description,
            metavar=metavar,
            rich_help_panel=flag.panel,
        )
        annotation: Any = Annotated[parsed | None, option]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    for name, (parsed, _) in REMOVED.items():
        option = typer.Option(flag_name(name), hidden=True, help="No longer a setting.")
        annotation = Annotated[parsed | None, option]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parsed_type(annotation: Any) -> Any:
    """Return the type that typer parses a setting to: bool, int, float, Path, str, or a list of one."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _parsed_type(arguments[0])
    if origin in (Union, UnionType):
        return _parsed_type(next(each for each in arguments if each is not NoneType))
    if origin is tuple:
        return list[_parsed_type(arguments[0])]  # type: ignore[misc]
    return str if origin is Literal else annotation


@app.command(cls=ServeCommand)
@takes_settings
def serve(
    *,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings by name.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every setting with its source, and exit.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Check torch, device, memory, base and registry, change nothing, and exit; with 1 if a check failed. "
            "Takes --base or --registry alone, too.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --check: print the result as one JSON document.")
    ] = False,
    **flags: Any,
) -> None:
    """Serve a base and the variants of a registry over HTTP.

    Examples: peraxis serve --base ./base --registry ./registry; peraxis serve --check --base ./base

    Every setting can also come from the environment (PERAXIS_PORT) or from the --config file. A flag overrides the
    environment, which overrides the file.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if as_json and not check:
        raise UsageError("--json prints the result of --check: give --check, too")
    if check and print_config:
        raise UsageError("give --check or --print-config, and not both")
    loaded = load_settings(given, config, stand_ins=STAND_INS if check else None)
    if print_config:
        print(loaded.describe())
        return
    # Deferred: --help and --print-config need none of this, and only checks and the inline engine import torch.
    if check:
        from deltastore.console import has_failed, print_diagnoses
        from server.check import check_machine

        diagnoses = check_machine(loaded)
        print_diagnoses(diagnoses, as_json)
        raise typer.Exit(1 if has_failed(diagnoses) else 0)
    from deltastore.registry.claims import check_place, is_bucket
    from server.log import configure_logging

    configure_logging("inline" if loaded.settings.engine == "inline" else "supervisor", loaded.settings)
    log.info("starting with base %s and registry %s", loaded.settings.base, loaded.settings.registry)
    # Before a server makes a registry there.
    if not is_bucket(loaded.settings.registry):
        check_place(Path(loaded.settings.registry))
    if not loaded.settings.base.is_dir():
        from deltastore.hub import checkpoint_directory

        loaded = loaded.with_base(checkpoint_directory(str(loaded.settings.base)))
    if loaded.settings.engine == "inline":
        from server.inline import run_inline

        raise typer.Exit(run_inline(loaded.settings))
    from server.supervisor.supervisor import supervise

    raise typer.Exit(supervise(loaded.settings))
