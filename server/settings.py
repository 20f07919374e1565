"""The service's settings: flag over environment over TOML file over default. Knows no HTTP and no model."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    DirectoryPath,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from deltastore.errors import SettingsError

ENV_PREFIX = "PERAXIS_"
GIGABYTE = 1_000_000_000

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class Settings(BaseModel):
    """What `peraxis serve` was told. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    base: DirectoryPath
    registry: Path
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 8000  # 0 takes any free port
    admin_port: Port | None = None  # where /metrics is served alone; None serves it beside the rest
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_gpu_deltas: Annotated[int, Field(ge=2, le=65536)] | None = (
        None  # slots; None: as many as fit, up to 64
    )
    slot_headroom: Annotated[float, Field(ge=1, le=100)] = 1.15
    max_host_cache_gb: Annotated[float, Field(ge=0, le=1e6)] | None = (
        None  # None: an eighth of what is free, up to 16
    )
    kv_cache_gb: Annotated[float, Field(gt=0, le=1e6)] | None = (
        None  # None: what fits, at most what can be used
    )
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 64  # samples that run at a time
    max_batch_tokens: Annotated[int, Field(ge=16)] | None = (
        None  # of a step; None: 128 on the CPU, 2048 on CUDA
    )
    max_queue: Annotated[int, Field(ge=1)] = 256
    load_timeout: Seconds = 60.0
    shutdown_timeout: Seconds = 30.0
    load_threads: Annotated[int, Field(ge=1, le=256)] = 4
    max_upload_gb: Annotated[float, Field(gt=0)] = 16.0
    max_model_len: Annotated[int, Field(ge=1)] | None = None  # None: what the base was trained for
    auth: Literal["none"] = "none"

    @field_validator("auth", mode="before")
    @classmethod
    def _only_without_keys(cls, value: object) -> object:
        if value != "none":
            raise ValueError(
                "this version has no API keys yet: take 'none' and let a proxy in front of the server check who calls"
            )
        return value

    @model_validator(mode="after")
    def _ports_differ(self) -> Settings:
        if self.admin_port is not None and self.admin_port == self.port != 0:
            raise ValueError(f"port and admin_port are both {self.port}: give each its own")
        return self

    @model_validator(mode="after")
    def _steps_hold_more_than_seats(self) -> Settings:
        if self.max_batch_tokens is not None and self.max_batch_tokens <= self.max_num_seqs:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens} and max_num_seqs {self.max_num_seqs}: a step must hold "
                "more tokens than samples, or prompts would never move while all of them decode"
            )
        return self

    @property
    def max_host_cache_bytes(self) -> int | None:
        return None if self.max_host_cache_gb is None else round(self.max_host_cache_gb * GIGABYTE)

    @property
    def kv_cache_bytes(self) -> int | None:
        return None if self.kv_cache_gb is None else round(self.kv_cache_gb * GIGABYTE)

    @property
    def max_upload_bytes(self) -> int:
        return round(self.max_upload_gb * GIGABYTE)


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings and, for each, where its value came from."""

    settings: Settings
    origins: Mapping[str, str]

    def describe(self) -> str:
        """One line per setting, in the form of a configuration file, with its origin as the comment; secrets masked."""
        lines = []
        for name in Settings.model_fields:
            value = getattr(self.settings, name)
            shown = f"{name} = {_as_toml(value)}" if value is not None else f"# {name} is not set"
            lines.append(f"{shown}  # {self.origins[name]}")
        return "\n".join(lines)


def load_settings(flags: Mapping[str, Any], config: Path | None = None) -> LoadedSettings:
    """Gather the settings.

    Args:
        flags: those that the command line gave, by setting name; what it did not give is absent.
        config: a TOML file of settings, or None.

    Raises:
        SettingsError: one line that names the first bad setting, where it came from and what it must be.
    """
    from_file = _read_file(config)

    class Sourced(Settings, BaseSettings):  # made here, because the library asks the class for its sources
        model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config)

    from_env = EnvSettingsSource(Sourced)()
    names = {*Settings.model_fields, *from_file, *flags}
    origins = {name: _origin(name, flags, from_env, from_file) for name in names}
    try:
        settings = Settings(**Sourced(**flags).model_dump())
    except ValidationError as error:
        raise SettingsError(_first_problem(error, origins)) from error
    return LoadedSettings(settings, origins)


def flag_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def _read_file(config: Path | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    try:
        with config.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"{config}: {error.strerror}: give --config a file that can be read") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{config}: no valid TOML: {error}") from error


def _origin(
    name: str, flags: Mapping[str, Any], from_env: Mapping[str, Any], from_file: Mapping[str, Any]
) -> str:
    if name in flags:
        return f"from {flag_name(name)}"
    if name in from_env:
        return f"from {ENV_PREFIX}{name.upper()}"
    return "from the configuration file" if name in from_file else "default"


def _first_problem(error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return f"{name} is missing: give {flag_name(name)}, {ENV_PREFIX}{name.upper()} or {name} in a --config file"
    if first["type"] == "extra_forbidden":
        return f"{name} ({origins[name]}) is no setting: `peraxis serve --help` lists them"
    return f"{name} ({origins[name]}): {message[0].lower()}{message[1:]}, got {first['input']!r}"


def _as_toml(value: object) -> str:
    if isinstance(value, (int, float)):
        return str(value)
    return json.dumps(str(value), ensure_ascii=False)  # a JSON string is a TOML one; a SecretStr masks itself
