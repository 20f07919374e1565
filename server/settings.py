"""Settings of `peraxis serve`: flag over environment over TOML file over default."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    DirectoryPath,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.tenants.tenant import LimitsSetting, TenantLimits

ENV_PREFIX = "PERAXIS_"
GIGABYTE = 1_000_000_000
HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
# As a browser writes one: a default port is left out. Any origin is *.
ORIGIN = re.compile(r"\*|https?://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


# The panels of `serve --help`, in their order.
BASE = "Base and registry"
MEMORY = "Memory"
REQUESTS = "Requests"
ACCESS = "Tenants and access"
NETWORK = "Network"
PROCESSES = "Processes"
LOGGING = "Logging"


@dataclass(frozen=True, slots=True)
class Flag:
    """How `serve --help` shows a setting. A field without one has no flag."""

    panel: str
    # The default, in words, of a setting whose value is computed at start.
    computed: str | None = None
    metavar: str | None = None


class Settings(BaseModel):
    """Settings of `peraxis serve`, under the names of its flags. Times are seconds, gigabytes are 10^9 bytes.

    The flags, their help, docs/reference.md and the schema of the chart's values are made from these fields.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    base: Annotated[
        Path,
        Field(
            description="Directory of the base's Hugging Face checkpoint, or a hub id as ORG/NAME or ORG/NAME@REV, "
            "which is fetched at start."
        ),
        Flag(BASE, metavar="DIR|HF_ID"),
    ]
    registry: Annotated[
        str,
        Field(
            min_length=1, description="Directory of the registry, created if missing, or s3://BUCKET/PREFIX."
        ),
        Flag(BASE, metavar="DIR"),
    ]
    registry_cache: Annotated[
        Path | None,
        Field(description="Directory on a local disk for the objects of a bucket, which servers may share."),
        Flag(BASE, "peraxis/registry in the user's cache directory"),
    ] = None
    # Uploads and their checks need space beside the objects.
    registry_cache_gb: Annotated[
        float,
        Field(
            gt=0, le=1e6, description="Gigabytes of a bucket's objects that --registry-cache holds at most."
        ),
        Flag(BASE),
    ] = 50.0
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Field(description="Device to compute on; auto takes CUDA if torch finds a device."),
        Flag(BASE),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Field(description="Type of the base's weights in memory; auto is the checkpoint's own."),
        Flag(BASE),
    ] = "auto"

    max_gpu_deltas: Annotated[
        Annotated[int, Field(ge=2, le=65536)] | None,
        Field(description="Slots for deltas, at least 2."),
        Flag(MEMORY, "as many as fit, up to 64"),
    ] = None
    slot_headroom: Annotated[
        float,
        Field(ge=1, le=100, description="Size of a slot, as a multiple of the bytes of the one-bit plan."),
        Flag(MEMORY),
    ] = 1.15
    max_host_cache_gb: Annotated[
        Annotated[float, Field(ge=0, le=1e6)] | None,
        Field(description="Host memory for deltas without a slot, in 10^9 bytes; 0 turns the cache off."),
        Flag(MEMORY, "an eighth of free host memory, up to 16"),
    ] = None
    kv_cache_gb: Annotated[
        Annotated[float, Field(gt=0, le=1e6)] | None,
        Field(description="Memory of the KV cache, in 10^9 bytes."),
        Flag(MEMORY, "as much as fits, up to what --max-num-seqs sequences use"),
    ] = None

    max_num_seqs: Annotated[
        int, Field(ge=1, le=4096, description="Sequences that run at a time."), Flag(REQUESTS)
    ] = 64
    max_batch_tokens: Annotated[
        Annotated[int, Field(ge=16)] | None,
        Field(description="Tokens of one step; fewer lower the inter-token latency, more speed up prefill."),
        Flag(REQUESTS, "128 on the CPU, 2048 on CUDA, at least twice --max-num-seqs"),
    ] = None
    max_model_len: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Field(
            description="Tokens of prompt and output together; with --backend vllm, of the longest variant, too."
        ),
        Flag(REQUESTS, "as base and variant were trained for"),
    ] = None
    max_queue: Annotated[
        int,
        Field(ge=1, description="Requests that may wait, beside the --max-num-seqs that run."),
        Flag(REQUESTS),
    ] = 256
    load_timeout: Annotated[
        Seconds, Field(description="Seconds that a request waits for its delta."), Flag(REQUESTS)
    ] = 60.0

    auth: Annotated[
        Literal["none", "keys"],
        Field(
            description="With keys, each request needs an API key of the registry; with none, all belong to one "
            "tenant, with every right."
        ),
        Flag(ACCESS),
    ] = "none"
    allow_unauthenticated: Annotated[
        bool,
        Field(
            description="Take --auth none on an address that other machines reach: anyone there may change every "
            "variant."
        ),
        Flag(ACCESS),
    ] = False
    allowed_host: Annotated[
        tuple[str, ...],
        Field(
            description="With --auth none: a name that requests may have in their Host, against pages of browsers; "
            "repeatable."
        ),
        Flag(ACCESS, "localhost and IP addresses, any with --allow-unauthenticated"),
    ] = ()
    allowed_origin: Annotated[
        tuple[str, ...],
        Field(
            description="With --auth keys: an origin, such as https://chat.example.org, whose pages may send requests "
            "with a key and read the replies; * for any; repeatable."
        ),
        Flag(ACCESS, "no page of another origin"),
    ] = ()
    default_limits: Annotated[
        LimitsSetting,
        Field(
            description="With --auth keys: a table of the limits of tenants that have none of their own in the "
            "registry. Without these of its fields, max_variants is 10,000, max_versions 1,000, max_stored_versions "
            "20,000, and max_stored_bytes what the tenant leaves free on the registry's volume."
        ),
    ] = TenantLimits()
    public_names: Annotated[
        Literal["publish", "admin"],
        Field(
            description="With --auth keys: the role of keys that may make variants public, whose names all tenants "
            "share."
        ),
        Flag(ACCESS),
    ] = "publish"
    source_dir: Annotated[
        tuple[DirectoryPath, ...],
        Field(description="Directory whose artifacts tenants may publish by their paths; repeatable."),
        Flag(ACCESS),
    ] = ()

    host: Annotated[str, Field(min_length=1, description="Address to listen on."), Flag(NETWORK)] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Field(description="Port to listen on; 0 takes a free one."), Flag(NETWORK)] = 8000
    admin_port: Annotated[
        Port | None,
        Field(
            description="Serve the console, /metrics, /stats, /changes, /variants, /keys and /tenants on this port, "
            "and no longer on --port."
        ),
        Flag(NETWORK, "none, they are on --port"),
    ] = None
    admin_host: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Field(description="Address that --admin-port listens on, such as 127.0.0.1."),
        Flag(NETWORK, "as --host"),
    ] = None
    max_connections: Annotated[
        int,
        Field(
            ge=16,
            description="Open connections per HTTP process, within three quarters of its file descriptors.",
        ),
        Flag(NETWORK),
    ] = 4096
    max_upload_gb: Annotated[
        float, Field(gt=0, description="Largest upload, in 10^9 bytes."), Flag(NETWORK)
    ] = 16.0
    compat: Annotated[
        Literal["none", "vllm-lora"],
        Field(
            description="With vllm-lora, serve vLLM's calls to load and unload LoRA adapters, on variants, and list "
            "in /v1/models what is loaded. These calls are on --port whatever --admin-port is, and need the role "
            "publish with --auth keys."
        ),
        Flag(NETWORK),
    ] = "none"
    lora_dir: Annotated[
        DirectoryPath | None,
        Field(
            description="With --compat vllm-lora: a directory whose artifacts a load call may publish; without it, a "
            "call loads only registered names."
        ),
        Flag(NETWORK),
    ] = None

    engine: Annotated[
        Literal["process", "inline"],
        Field(
            description="Run the engine as a process, or inline: as a thread of one single process, for debugging."
        ),
        Flag(PROCESSES),
    ] = "process"
    backend: Annotated[
        Literal["auto", "native", "vllm"],
        Field(
            description="What runs the model: vLLM (with its plugin peraxis-vllm), or the engine of this package. auto "
            "takes vLLM where it is installed and there is a CUDA device."
        ),
        Flag(PROCESSES),
    ] = "auto"
    engine_python: Annotated[
        Path | None,
        Field(
            description="Python of an environment that has vllm, peraxis-vllm and this build of peraxis, which runs "
            "the engine of --backend vllm."
        ),
        Flag(PROCESSES, "the server's own"),
    ] = None
    max_added_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=1 << 20,
            description="With --backend vllm: tokens that a variant may have beyond the base's. The native engine "
            "takes any number.",
        ),
        Flag(PROCESSES),
    ] = 256
    tensor_parallel_size: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="Devices that the base and its deltas are divided among, of this machine; with --backend vllm.",
        ),
        Flag(PROCESSES),
    ] = 1
    http_workers: Annotated[
        int, Field(ge=1, le=64, description="HTTP processes, which share the port."), Flag(PROCESSES)
    ] = 1
    load_threads: Annotated[
        int, Field(ge=1, le=256, description="Threads that read deltas."), Flag(PROCESSES)
    ] = 4
    step_timeout: Annotated[
        Seconds,
        Field(description="Seconds after which a step counts as hung and the engine is restarted."),
        Flag(PROCESSES),
    ] = 120.0
    max_restarts: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            description="Deaths of the engine without a finished request between them, or of HTTP processes within a "
            "minute, before the server gives up.",
        ),
        Flag(PROCESSES),
    ] = 4
    resume_timeout: Annotated[
        Seconds,
        Field(description="Seconds that a request of a dead engine waits for the next one to go on with it."),
        Flag(PROCESSES),
    ] = 120.0
    stream_keepalive: Annotated[
        Seconds,
        Field(description="Seconds after which a stream without a token begins and gets comments."),
        Flag(PROCESSES),
    ] = 15.0
    shutdown_timeout: Annotated[
        Seconds,
        Field(description="Seconds that running requests have to end after SIGTERM."),
        Flag(PROCESSES),
    ] = 30.0

    log_format: Annotated[
        Literal["text", "json"],
        Field(description="Form of the log; json is one JSON object per line."),
        Flag(LOGGING),
    ] = "text"
    log_prompts: Annotated[
        bool,
        Field(description="Log prompts, and messages of exceptions that may quote them."),
        Flag(LOGGING),
    ] = False
    otlp_endpoint: Annotated[
        Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")] | None,
        Field(
            description="OpenTelemetry collector for traces, as http://HOST:4318; needs the extra otel. Without it, "
            "no traces are sent."
        ),
        Flag(LOGGING),
    ] = None

    @field_validator("registry", mode="after")
    @classmethod
    def _refuse_other_stores(cls, value: str) -> str:
        if "://" in value and not value.startswith("s3://"):
            raise ValueError("give a directory's path, or s3://BUCKET/PREFIX")
        return value

    @field_validator("registry", mode="before")
    @classmethod
    def _take_paths(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

    @field_validator("base", "registry_cache", "lora_dir", "engine_python", mode="before")
    @classmethod
    def _refuse_empty_paths(cls, value: object) -> object:
        # An unset variable of a shell gives one, and as a path it is the working directory.
        if value == "":
            raise ValueError("the path is empty: give a directory")
        return value

    @field_validator("base", mode="after")
    @classmethod
    def _check_base(cls, value: Path) -> Path:
        if not value.is_dir() and not _is_of_hub(value):
            raise PydanticCustomError("path_not_directory", "Path does not point to a directory")
        return value

    @field_validator("source_dir", mode="before")
    @classmethod
    def _split_directories(cls, value: object) -> object:
        # In the environment, as in PATH.
        values = tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value
        if isinstance(values, (list, tuple)) and "" in values:
            raise ValueError("a path is empty: give a directory")
        return values

    @field_validator("allowed_host", "allowed_origin", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

    @field_validator("allowed_host")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not HOST_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a host: give it without scheme, port and path")
        return tuple(map(str.lower, value))

    @field_validator("allowed_origin")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        origins = tuple(map(str.lower, value))
        for given, origin in zip(value, origins, strict=True):
            if not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{given!r} is no origin: give scheme, host and port alone, as https://chat.example.org"
                )
            if origin.endswith(":443" if origin.startswith("https:") else ":80"):
                raise ValueError(
                    f"{given!r} has its scheme's own port, which browsers leave out: leave it out"
                )
        return origins

    @model_validator(mode="after")
    def _pages_have_keys(self) -> Settings:
        if self.allowed_origin and self.auth != "keys":
            raise ValueError("allowed_origin lets pages call this server with keys: take it with --auth keys")
        return self

    @field_validator("source_dir")
    @classmethod
    def _make_directories_absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(Path(os.path.abspath(each)) for each in value)

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
    def _vllm_has_a_process(self) -> Settings:
        if self.backend == "vllm" and self.engine == "inline":
            raise ValueError("backend is vllm and engine is inline: run the engine as a process")
        if self.engine_python is not None and self.backend == "native":
            raise ValueError("engine_python is set and backend is native: set backend to vllm")
        if self.tensor_parallel_size > 1 and self.backend != "vllm":
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size} and backend {self.backend}: set backend to vllm, "
                "which alone divides a model among devices"
            )
        python = self.engine_python
        if python is not None and not (python.is_file() and os.access(python, os.X_OK)):
            raise ValueError(f"engine_python {self.engine_python} is no program: give the path of a Python")
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
        if _is_bucket(self.registry) and find_spec("obstore") is None:
            raise ValueError(f"registry is {self.registry} and obstore is missing: pip install 'peraxis[s3]'")
        return self

    @model_validator(mode="after")
    def _the_cache_holds_an_upload(self) -> Settings:
        if _is_bucket(self.registry) and self.registry_cache_gb < self.max_upload_gb:
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
    def max_prompts(self) -> int:
        """Prompts of one call: as many as the queue can take of one tenant."""
        share = (self.max_num_seqs + self.max_queue + 1) // 2
        return min(self.max_queue, share) if self.auth == "keys" else self.max_queue

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


def flags_of_settings() -> dict[str, Flag]:
    """Return the flag of each setting that has one, in the order of the fields."""
    found = ((name, field.metadata) for name, field in Settings.model_fields.items())
    return {name: each for name, metadata in found for each in metadata if isinstance(each, Flag)}


def flag_name(setting: str) -> str:
    """Return the flag of a setting."""
    return "--" + setting.replace("_", "-")


def choices_of(setting: str) -> tuple[str, ...]:
    """Return the values that a setting may have, or () if they are not listed."""
    annotation = Settings.model_fields[setting].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _is_of_hub(base: Path) -> bool:
    # Deferred, because importing huggingface_hub takes longer than all settings.
    from deltastore.hub import repo_of

    return not base.exists() and repo_of(str(base)) is not None


def _is_bucket(location: str) -> bool:
    # Deferred: it imports the registry, and `serve --help` does without.
    from deltastore.registry.claims import is_bucket

    return is_bucket(location)


def _is_loopback(host: str) -> bool:
    """True for `localhost` and addresses of the loopback interface. Another name may mean any address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
