"""Settings of `peraxis serve`: flag over environment over TOML file over default."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

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
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from deltastore.errors import SettingsError
from deltastore.registry.place import is_bucket
from server.tenants.limits.tenant_limits import LimitsSetting, TenantLimits, as_toml

ENV_PREFIX = "PERAXIS_"
DEFAULT_HUB_URL = "https://huggingface.co"
GIGABYTE = 1_000_000_000
# The source of a setting that was not given.
DEFAULT = "default"
# Not those that Kubernetes sets in each pod from the names of Services.
VARIABLE = re.compile(rf"{ENV_PREFIX}(?!.*(?:SERVICE_|PORT_\d)).*")
HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


def _default_hub_url() -> str:
    """Return the hub that huggingface_hub would use."""
    return os.environ.get("HF_ENDPOINT") or DEFAULT_HUB_URL


class Settings(BaseModel):
    """Settings of `peraxis serve`, under the names of its flags. Times are seconds, gigabytes are 10^9 bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    base: DirectoryPath
    # A directory, or s3://BUCKET/PREFIX.
    registry: Annotated[str, Field(min_length=1)]
    # Where the objects of a bucket are kept on this machine. None: peraxis/registry in the user's cache directory.
    registry_cache: Path | None = None
    # Bound on the objects there; uploads and their checks need space beside them.
    registry_cache_gb: Annotated[float, Field(gt=0, le=1e6)] = 50.0
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    # 0 takes any free port.
    port: Port = 8000
    # The only port of /metrics, /stats, /variants and /keys. None serves them on `port`.
    admin_port: Port | None = None
    # None listens on `host`.
    admin_host: Annotated[str, Field(min_length=1)] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    # Number of slots. None: as many as fit, up to 64.
    max_gpu_deltas: Annotated[int, Field(ge=2, le=65536)] | None = None
    # Size of a slot over the bytes of the one-bit plan.
    slot_headroom: Annotated[float, Field(ge=1, le=100)] = 1.15
    # None: an eighth of free host memory, up to 16.
    max_host_cache_gb: Annotated[float, Field(ge=0, le=1e6)] | None = None
    # None: as much as fits, up to what `max_num_seqs` sequences can use.
    kv_cache_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    # Sequences that run at a time.
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 64
    # Tokens of one step. None: 128 on the CPU, 2048 on CUDA, and at least twice `max_num_seqs`.
    max_batch_tokens: Annotated[int, Field(ge=16)] | None = None
    # Requests that wait beside `max_num_seqs` running ones.
    max_queue: Annotated[int, Field(ge=1)] = 256
    load_timeout: Seconds = 60.0
    shutdown_timeout: Seconds = 30.0
    load_threads: Annotated[int, Field(ge=1, le=256)] = 4
    max_upload_gb: Annotated[float, Field(gt=0)] = 16.0
    # Open connections of one HTTP process; at most three quarters of its file descriptors.
    max_connections: Annotated[int, Field(ge=16)] = 4096
    # Tokens of prompt and output together. None: the positions that the base was trained for.
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    # "inline" runs the engine and one HTTP process as threads of one process.
    engine: Literal["process", "inline"] = "process"
    http_workers: Annotated[int, Field(ge=1, le=64)] = 1
    # Without a step's end, after which the engine is restarted.
    step_timeout: Seconds = 120.0
    # Deaths of the engine, or of HTTP processes, within a minute before the server gives up.
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 4
    # "json" logs one JSON object per line.
    log_format: Literal["text", "json"] = "text"
    # Log each prompt, and the messages of unexpected exceptions, which may quote one.
    log_prompts: bool = False
    # URL of an OpenTelemetry collector that takes OTLP over HTTP. None sends no traces.
    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")] | None = None
    # "vllm-lora" adds vLLM's calls for LoRA adapters, and `/v1/models` then lists what is loaded.
    compat: Literal["none", "vllm-lora"] = "none"
    # Artifacts below this directory can be published by vLLM's load call. None: only registered names can be loaded.
    lora_dir: DirectoryPath | None = None
    # Directories whose artifacts tenants may publish by their paths; none by default.
    source_dir: Annotated[tuple[DirectoryPath, ...], NoDecode] = ()
    # Publish from public repositories of the hub at `hub_url`.
    allow_hub: bool = False
    hub_url: str = Field(default_factory=_default_hub_url, validate_default=True)
    # "keys" asks for an API key of the registry. "none" gives every request to one tenant, with every role.
    auth: Literal["none", "keys"] = "none"
    # Serve without keys on an address that other machines reach.
    allow_unauthenticated: bool = False
    # With `auth` none: names in a request's Host beside localhost. None given and `allow_unauthenticated`: any.
    allowed_host: Annotated[tuple[str, ...], NoDecode] = ()
    default_limits: LimitsSetting = Field(
        default=TenantLimits(),
        description="With --auth keys: a table of the limits of tenants that have none of their own in the registry. "
        "Without these of its fields, max_variants is 10,000, max_versions 1,000 and max_stored_bytes half of the "
        "registry's volume.",
    )
    # With --auth keys: keys that may make a variant public. "admin" keeps public names for operators.
    public_names: Literal["publish", "admin"] = "publish"

    @field_validator("registry", mode="before")
    @classmethod
    def _take_paths(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

    @field_validator("source_dir", mode="before")
    @classmethod
    def _split_directories(cls, value: object) -> object:
        # In the environment, as in PATH.
        return tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value

    @field_validator("allowed_host", mode="before")
    @classmethod
    def _split_hosts(cls, value: object) -> object:
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

    @field_validator("allowed_host")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not HOST_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a host: give it without scheme, port and path")
        return tuple(map(str.lower, value))

    @field_validator("source_dir")
    @classmethod
    def _make_directories_absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(Path(os.path.abspath(each)) for each in value)

    @field_validator("hub_url")
    @classmethod
    def _check_hub_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError("a hub's URL has the form https://HOST")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _without_keys_only_this_machine_is_served(self) -> Settings:
        for name, host in (("host", self.host), ("admin_host", self.admin_host)):
            if self.auth == "keys" or self.allow_unauthenticated or host is None or _is_loopback(host):
                continue
            raise ValueError(
                f"{name} {host} may be reached from other machines and auth is none, so that anyone there could use "
                f"and delete every variant: take --auth keys or --{name.replace('_', '-')} 127.0.0.1, or "
                "--allow-unauthenticated if something before the server authenticates its callers"
            )
        return self

    @model_validator(mode="after")
    def _the_admin_host_has_a_port(self) -> Settings:
        if self.admin_host is not None and self.admin_port is None:
            raise ValueError(f"admin_host is {self.admin_host} and there is no admin port: give --admin-port")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Settings:
        if self.admin_port is not None and self.admin_port == self.port != 0:
            raise ValueError(f"port and admin_port are both {self.port}: give each its own")
        return self

    @model_validator(mode="after")
    def _one_process_has_one_http_worker(self) -> Settings:
        if self.engine == "inline" and self.http_workers != 1:
            raise ValueError(
                f"engine is inline and http_workers {self.http_workers}: run the engine as a process"
            )
        return self

    @model_validator(mode="after")
    def _a_step_holds_more_than_decode_tokens(self) -> Settings:
        if self.max_batch_tokens is not None and self.max_batch_tokens <= self.max_num_seqs:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens} and max_num_seqs {self.max_num_seqs}: a step must hold "
                "more tokens than sequences, or prompts would wait while all sequences decode"
            )
        return self

    @model_validator(mode="after")
    def _traces_need_their_packages(self) -> Settings:
        if self.otlp_endpoint is not None and find_spec("opentelemetry") is None:
            raise ValueError("otlp_endpoint is set and OpenTelemetry is missing: pip install 'peraxis[otel]'")
        return self

    @model_validator(mode="after")
    def _a_bucket_can_be_served(self) -> Settings:
        if is_bucket(self.registry) and find_spec("obstore") is None:
            raise ValueError(f"registry is {self.registry} and obstore is missing: pip install 'peraxis[s3]'")
        return self

    @model_validator(mode="after")
    def _the_cache_holds_an_upload(self) -> Settings:
        if is_bucket(self.registry) and self.registry_cache_gb < self.max_upload_gb:
            raise ValueError(
                f"registry_cache_gb is {self.registry_cache_gb:g} and max_upload_gb {self.max_upload_gb:g}: a variant "
                "of that size could not be loaded; raise the one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _a_directory_of_adapters_has_a_call_that_reads_it(self) -> Settings:
        if self.lora_dir is not None and self.compat != "vllm-lora":
            raise ValueError(f"lora_dir is {self.lora_dir} and compat {self.compat}: set compat to vllm-lora")
        return self

    @property
    def max_host_cache_bytes(self) -> int | None:
        return None if self.max_host_cache_gb is None else round(self.max_host_cache_gb * GIGABYTE)

    @property
    def kv_cache_bytes(self) -> int | None:
        return None if self.kv_cache_gb is None else round(self.kv_cache_gb * GIGABYTE)

    @property
    def registry_cache_bytes(self) -> int:
        return round(self.registry_cache_gb * GIGABYTE)

    @property
    def max_upload_bytes(self) -> int:
        return round(self.max_upload_gb * GIGABYTE)


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and the source of each value."""

    settings: Settings
    origins: Mapping[str, str]

    def is_given(self, name: str) -> bool:
        """True for a setting that is no default."""
        return self.origins[name] != DEFAULT

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
    _check_variables()
    from_file = _read_file(config)

    # pydantic-settings asks the class for its sources, so the class is defined where `config` is known.
    class Sourced(Settings, BaseSettings):
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
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in Settings.model_fields:
            continue
        if meant := get_close_matches(name, Settings.model_fields, 1, cutoff=0.7):
            raise SettingsError(
                f"{variable} is not a setting: {ENV_PREFIX}{meant[0].upper()} is; rename it or unset it"
            )


def _is_loopback(host: str) -> bool:
    """True for `localhost` and addresses of the loopback interface. Another name may mean any address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _flag_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


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
        return f"from {given_by or _flag_name(name)}"
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
        return f"{name} is missing: give {_flag_name(name)}, {variable} or {name} in a --config file"
    if first["type"] == "extra_forbidden":
        lists = "`peraxis serve --help`" if given_by is None else "docs/reference.md"
        return f"{name} ({origins[name]}) is not a setting: {lists} lists them"
    if first["type"] == "path_not_directory":
        path = first["input"]
        problem = f"{path} is a file" if Path(path).exists() else f"there is no directory {path}"
        wanted = "the directory of a Hugging Face checkpoint" if name == "base" else "an existing directory"
        return f"{name} ({origins[name]}): {problem}: give {wanted}"
    return f"{name} ({origins[name]}): {message[0].lower()}{message[1:]}, got {first['input']!r}"


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
