"""`peraxis serve`: parse the flags, load the settings, run the server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from deltastore.diagnosis import has_failed, print_diagnoses
from deltastore.errors import UsageError
from deltastore.registry.place import check_place, is_bucket
from server.openmp_policy import let_threads_sleep
from server.settings import DEFAULT_HUB_URL, Settings, load_settings

app = typer.Typer(add_completion=False)

# For --check, which needs neither.
STAND_INS: Mapping[str, Path] = {"base": Path("/"), "registry": Path("/")}
# Defaults that are computed at start, by setting.
COMPUTED: Mapping[str, str] = {
    "registry_cache": "peraxis/registry in the user's cache directory",
    "admin_port": "none, they are on --port",
    "admin_host": "as --host",
    "max_gpu_deltas": "as many as fit, up to 64",
    "max_host_cache_gb": "an eighth of free host memory, up to 16",
    "kv_cache_gb": "as much as fits, up to what --max-num-seqs sequences use",
    "max_batch_tokens": "128 on the CPU, 2048 on CUDA, at least twice --max-num-seqs",
    "max_model_len": "as the base was trained for",
    "source_dir": "none",
    "allowed_host": "localhost and IP addresses, any with --allow-unauthenticated",
    "hub_url": f"HF_ENDPOINT, else {DEFAULT_HUB_URL}",
}


class ServeCommand(TyperCommand):
    """The command with the default of each setting in its help.

    Options themselves have no default, because only those that are given override the environment and the file.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for option in self.params:
            if isinstance(option, TyperOption) and option.name in Settings.model_fields:
                option.show_default = default_text(option.name)


def default_text(setting: str) -> str:
    """Return the default of a setting as `--help` shows it."""
    field = Settings.model_fields[setting]
    if field.is_required():
        return "required"
    if field.default is None or setting in COMPUTED:
        return COMPUTED.get(setting, "none")
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)


@app.command(cls=ServeCommand)
def serve(
    base: Annotated[
        Path | None, typer.Option(help="Directory of the base's Hugging Face checkpoint.")
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Directory of the registry, created if missing, or s3://BUCKET/PREFIX."
        ),
    ] = None,
    registry_cache: Annotated[
        Path | None,
        typer.Option(help="Directory on a local disk for the objects of a bucket, which servers may share."),
    ] = None,
    registry_cache_gb: Annotated[
        float | None, typer.Option(help="Gigabytes of a bucket's objects that this directory holds at most.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    admin_port: Annotated[
        int | None,
        typer.Option(
            help="Serve /metrics, /stats, /variants, /keys and /tenants on this port, and no longer on --port."
        ),
    ] = None,
    admin_host: Annotated[
        str | None, typer.Option(help="Address that --admin-port listens on, such as 127.0.0.1.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32.")] = None,
    max_gpu_deltas: Annotated[int | None, typer.Option(help="Slots for deltas, at least 2.")] = None,
    max_host_cache_gb: Annotated[
        float | None,
        typer.Option(help="Host memory for deltas without a slot, in 10^9 bytes; 0 turns the cache off."),
    ] = None,
    slot_headroom: Annotated[
        float | None, typer.Option(help="Size of a slot over the bytes of the one-bit plan.")
    ] = None,
    kv_cache_gb: Annotated[float | None, typer.Option(help="KV cache, in 10^9 bytes.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences that run at a time.")] = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of one step; fewer lower the inter-token latency, more speed up prefill."),
    ] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and output together.")] = None,
    load_timeout: Annotated[
        float | None, typer.Option(help="Seconds that a request waits for its delta.")
    ] = None,
    load_threads: Annotated[int | None, typer.Option(help="Threads that read deltas.")] = None,
    shutdown_timeout: Annotated[
        float | None, typer.Option(help="Seconds that running requests have to end after SIGTERM.")
    ] = None,
    max_upload_gb: Annotated[float | None, typer.Option(help="Largest upload, in 10^9 bytes.")] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(
            help="Open connections per HTTP process, within three quarters of its file descriptors."
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="process, or inline: a thread of one single process, for debugging.")
    ] = None,
    http_workers: Annotated[int | None, typer.Option(help="HTTP processes, which share the port.")] = None,
    step_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a step counts as hung and the engine is restarted."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            help="Deaths of the engine, or of HTTP processes, within a minute before the server gives up."
        ),
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text, or json: one JSON object per line.")] = None,
    log_prompts: Annotated[
        bool | None,
        typer.Option("--log-prompts", help="Log prompts, and messages of exceptions that may quote them."),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="OpenTelemetry collector for traces, as http://HOST:4318; needs the extra otel."),
    ] = None,
    compat: Annotated[
        str | None,
        typer.Option(
            help="none, or vllm-lora: vLLM's calls to load and unload LoRA adapters, on variants. They are on --port "
            "whatever --admin-port is, and need the role publish with --auth keys."
        ),
    ] = None,
    lora_dir: Annotated[
        Path | None,
        typer.Option(help="With --compat vllm-lora: a directory whose artifacts a load call may publish."),
    ] = None,
    auth: Annotated[
        str | None,
        typer.Option(
            help="keys: each request needs an API key; none: all belong to one tenant, with every right."
        ),
    ] = None,
    public_names: Annotated[
        str | None,
        typer.Option(
            help="publish, or admin: only keys with that role make variants public, whose names all tenants share."
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool | None,
        typer.Option(
            "--allow-unauthenticated",
            help="Take --auth none on an address that other machines reach: anyone there may change every variant.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="With --auth none: a name that requests may have in their Host, against pages of browsers; repeatable."
        ),
    ] = None,
    source_dir: Annotated[
        list[Path] | None,
        typer.Option(help="Directory whose artifacts tenants may publish by their paths; repeatable."),
    ] = None,
    allow_hub: Annotated[
        bool | None,
        typer.Option("--allow-hub", help="Let tenants publish from public repositories of a hub."),
    ] = None,
    hub_url: Annotated[str | None, typer.Option(help="The only hub that is asked.")] = None,
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
) -> None:
    """Serve a base and the variants of a registry over HTTP.

    Examples: peraxis serve --base ./base --registry ./registry; peraxis serve --check --base ./base

    Every setting can also come from the environment (PERAXIS_PORT) or from the --config file. A flag overrides the
    environment, which overrides the file.
    """
    flags = {
        name: value
        for name, value in locals().items()
        if name not in ("config", "print_config", "check", "as_json") and value is not None
    }
    if as_json and not check:
        raise UsageError("--json prints the result of --check: give --check, too")
    if check and print_config:
        raise UsageError("give --check or --print-config, and not both")
    loaded = load_settings(flags, config, stand_ins=STAND_INS if check else None)
    if print_config:
        print(loaded.describe())
        return
    if check:
        # Deferred: importing torch takes seconds.
        from server.check import check_machine

        diagnoses = check_machine(loaded)
        print_diagnoses(diagnoses, as_json)
        raise typer.Exit(1 if has_failed(diagnoses) else 0)
    # Before a server makes a registry there.
    if not is_bucket(loaded.settings.registry):
        check_place(Path(loaded.settings.registry))
    let_threads_sleep(os.environ)
    # Deferred: --help and --print-config need none of this, and only the inline engine imports torch.
    if loaded.settings.engine == "inline":
        from server.inline import run_inline

        raise typer.Exit(run_inline(loaded.settings))
    from server.supervisor.supervisor import supervise

    raise typer.Exit(supervise(loaded.settings))
