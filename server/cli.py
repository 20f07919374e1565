"""`peraxis serve`: parse, gather the settings, run the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server.settings import load_settings

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    base: Annotated[
        Path | None, typer.Option(help="Directory of the base's Hugging Face checkpoint.")
    ] = None,
    registry: Annotated[
        Path | None, typer.Option(help="Directory of the registry; made when missing.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Port for /metrics alone.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32.")] = None,
    max_gpu_deltas: Annotated[int | None, typer.Option(help="Slots for deltas, at least 2.")] = None,
    max_host_cache_gb: Annotated[
        float | None, typer.Option(help="Host memory for deltas without a slot, in 10^9 bytes; 0 keeps none.")
    ] = None,
    slot_headroom: Annotated[float | None, typer.Option(help="Slot size over the one-bit plan's.")] = None,
    kv_cache_gb: Annotated[float | None, typer.Option(help="Key-value cache, in 10^9 bytes.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Samples that run at a time.")] = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a step; fewer shorten the gaps between tokens, more speed up prompts."),
    ] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")] = None,
    load_timeout: Annotated[float | None, typer.Option(help="Seconds a request waits for its delta.")] = None,
    load_threads: Annotated[int | None, typer.Option(help="Threads that read deltas.")] = None,
    shutdown_timeout: Annotated[
        float | None, typer.Option(help="Seconds that requests have to end after SIGTERM.")
    ] = None,
    max_upload_gb: Annotated[float | None, typer.Option(help="Largest upload, in 10^9 bytes.")] = None,
    auth: Annotated[
        str | None, typer.Option(help="none: whoever reaches the port is the one tenant.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings, by their names.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show every setting and stop.")
    ] = False,
) -> None:
    """Serve a base and the variants of a registry over HTTP.

    Example: peraxis serve --base ./base --registry ./registry

    Every setting may also come from the environment (PERAXIS_PORT) or from the file of --config; a flag wins, then the
    environment, then the file.
    """
    flags = {
        name: value
        for name, value in locals().items()
        if name not in ("config", "print_config") and value is not None
    }
    loaded = load_settings(flags, config)
    if print_config:
        print(loaded.describe())
        return
    from server.app import run_server  # brings the model library, which --help and --print-config do not need

    raise typer.Exit(run_server(loaded.settings))
