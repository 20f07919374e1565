"""The sources of settings: flags over environment over TOML file over defaults. What is wrong in one is one line."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deltastore.errors import SettingsError
from server.settings import ENV_PREFIX, Settings, flag_name
from server.tenants.tenant import TenantLimits, as_toml

# Settings that are no more, with the type of their flags, and the way out.
_NO_HUB = "a server fetches from no hub; `peraxis push hf://ORG/REPO[@REV][:FILE]` does, with your own token"
REMOVED: Mapping[str, tuple[type, str]] = {"allow_hub": (bool, _NO_HUB), "hub_url": (str, _NO_HUB)}
# The source of a setting that was not given.
DEFAULT = "default"
# Not those that Kubernetes sets in each pod from the names of Services.
VARIABLE = re.compile(rf"{ENV_PREFIX}(?!.*(?:SERVICE_|PORT_\d)).*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and the source of each value."""

    settings: Settings
    origins: Mapping[str, str]

    def is_given(self, name: str) -> bool:
        """True for a setting that is no default."""
        return self.origins[name] != DEFAULT

    def with_base(self, directory: Path) -> LoadedSettings:
        """Return the same settings with the directory of a base that was given as a hub id."""
        return replace(self, settings=self.settings.model_copy(update={"base": directory}))

    def describe(self) -> str:
        """Return the settings as a TOML configuration file, with each source as a comment and secrets masked."""
        lines = []
        for name in Settings.model_fields:
            value = getattr(self.settings, name)
            shown = f"{name} = {_as_toml(value)}" if value is not None else f"# {name} is not set"
            lines.append(f"{shown}  # {self.origins[name]}")
        return "\n".join(lines)


def load_settings(
    flags: Mapping[str, Any],
    config: Path | None = None,
    *,
    given_by: str | None = None,
    stand_ins: Mapping[str, Any] | None = None,
) -> LoadedSettings:
    """Load the settings from flags, environment, TOML file and defaults, in this order of precedence.

    Args:
        flags: values of the flags that were given, by setting name.
        config: a TOML file of settings, or None.
        given_by: the place of `flags` for messages, if it is not the command line.
        stand_ins: values of required settings that may be missing; they count as defaults.

    Raises:
        SettingsError: a setting is invalid or misspelt. One line names it, the value's source and what it must be.
    """
    # Deferred: only the process that reads the settings needs it, and `serve --help` does without.
    from pydantic_settings import (
        BaseSettings,
        EnvSettingsSource,
        InitSettingsSource,
        PydanticBaseSettingsSource,
        SettingsConfigDict,
        TomlConfigSettingsSource,
    )

    _check_variables()
    from_file = _read_file(config)
    _check_removed(flags, from_file, given_by)
    for name in from_file:
        # pydantic-settings would take it, as it takes variables in any case.
        if name not in Settings.model_fields and name.lower() in Settings.model_fields:
            raise SettingsError(
                f"{config}: {name} is not a setting: {name.lower()} is; write it in lower case"
            )

    # pydantic-settings asks the class for its sources, so the class is defined where `config` is known.
    class Sourced(Settings, BaseSettings):
        # A variable is taken as it is: validators split lists, and parse the table of limits.
        model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, enable_decoding=False)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            from_toml = TomlConfigSettingsSource(settings_cls, config)
            return (
                init_settings,
                env_settings,
                from_toml,
                InitSettingsSource(settings_cls, dict(stand_ins or {})),
            )

    from_env = EnvSettingsSource(Sourced)()
    names = {*Settings.model_fields, *from_file, *flags}
    origins = {name: _origin(name, flags, from_env, from_file, given_by) for name in names}
    try:
        settings = Settings(**Sourced(**flags).model_dump())
    except ValidationError as error:
        raise SettingsError(_first_problem(error, origins, given_by)) from error
    return LoadedSettings(settings, origins)


def _check_variables() -> None:
    """Raise SettingsError for a variable whose name is nearly that of a setting, such as PERAXIS_ATUH."""
    for variable in filter(VARIABLE.fullmatch, os.environ):
        name = variable[len(ENV_PREFIX) :].lower()
        if name in Settings.model_fields or name in REMOVED:
            continue
        # A part behind two underscores would name a field of a table.
        if meant := get_close_matches(name.partition("__")[0], Settings.model_fields, 1, cutoff=0.7):
            raise SettingsError(
                f"{variable} is not a setting: {ENV_PREFIX}{meant[0].upper()} is; rename it or unset it"
            )


def _check_removed(flags: Mapping[str, Any], from_file: Mapping[str, Any], given_by: str | None) -> None:
    """Raise SettingsError for a setting that is no more."""
    from_env = {name: value for name in REMOVED if (value := os.environ.get(f"{ENV_PREFIX}{name.upper()}"))}
    for name, (_, way_out) in REMOVED.items():
        if (origin := _origin(name, flags, from_env, from_file, given_by)) != DEFAULT:
            raise SettingsError(f"{name} ({origin}) is no longer a setting: {way_out}")


def _read_file(config: Path | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    try:
        with config.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"{config}: {error.strerror}: give --config a readable file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{config}: not valid TOML: {error}") from error


def _origin(
    name: str,
    flags: Mapping[str, Any],
    from_env: Mapping[str, Any],
    from_file: Mapping[str, Any],
    given_by: str | None,
) -> str:
    if name in flags:
        return f"from {given_by or flag_name(name)}"
    if name in from_env:
        return f"from {ENV_PREFIX}{name.upper()}"
    return "from the configuration file" if name in from_file else DEFAULT


def _first_problem(error: ValidationError, origins: Mapping[str, str], given_by: str | None) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    name = str(first["loc"][0])
    if first["type"] == "missing":
        variable = f"{ENV_PREFIX}{name.upper()}"
        if given_by is not None:
            return f"{name} is missing: give it in {given_by}, or give {variable}"
        return f"{name} is missing: give {flag_name(name)}, {variable} or {name} in a --config file"
    if first["type"] == "extra_forbidden":
        lists = "`peraxis serve --help`" if given_by is None else "docs/reference.md"
        return f"{name} ({origins[name]}) is not a setting: {lists} lists them"
    if first["type"] == "path_not_directory":
        path = first["input"]
        problem = f"{path} is a file" if Path(path).exists() else f"there is no directory {path}"
        wanted = "the directory of a Hugging Face checkpoint" if name == "base" else "an existing directory"
        return f"{name} ({origins[name]}): {problem}: give {wanted}"
    # Not an abbreviation, such as JSON.
    message = message if message[1:2].isupper() else message[0].lower() + message[1:]
    return f"{name} ({origins[name]}): {message}, got {first['input']!r}"


def _as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, TenantLimits):
        return as_toml(value)
    if isinstance(value, tuple):
        return json.dumps([str(each) for each in value], ensure_ascii=False)
    # A JSON string is a valid TOML string. A SecretStr masks itself.
    return json.dumps(str(value), ensure_ascii=False)
