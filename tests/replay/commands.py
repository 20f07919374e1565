"""Commands that need no server."""

from __future__ import annotations

from peraxis.cli import COMMANDS
from tests.replay.world import World

SUBCOMMANDS = {
    "keys": ("create", "list", "revoke"),
    "tenants": ("list", "set", "show"),
    "registry": ("check", "gc", "ls", "rm"),
}


def run_commands(world: World) -> None:
    """Run help pages, and every command without a server, with `--json` and with wrong arguments."""
    world.command("no arguments")
    world.command("version", "version")
    world.command("unknown command", "serv")
    for command in COMMANDS:
        world.command(f"help of {command}", command, "--help")
        for sub in SUBCOMMANDS.get(command, ()):
            world.command(f"help of {command} {sub}", command, sub, "--help")
        world.command(f"{command} with a wrong option", command, "--nonsense", "--json")
    _of_deltas(world)
    _of_settings(world)
    _of_registry(world)


def _of_deltas(world: World) -> None:
    artifacts, finetune = world.inputs.artifacts, world.inputs.finetune
    pair = ("--base", artifacts.base, "--finetune", finetune)
    delta, card = world.directory / "delta.safetensors", world.directory / "card"
    small = ("--samples", 20, "--distill-epochs", 1, "--no-progress", "--json")
    world.command("plan", "compress", *pair, "--out", delta, "--plan", "--samples", 20)
    fitted = (*small, "--calibration", world.inputs.text, "--report", card)
    world.command("compress", "compress", *pair, "--out", delta, *fitted)
    world.transcript.add("bytes of the delta", f"{delta.stat().st_size}")
    world.command("compress onto a file that exists", "compress", *pair, "--out", delta, *small)
    for path, name in (
        (delta, "delta"),
        (world.inputs.broken, "broken"),
        (world.directory / "absent", "absent"),
    ):
        world.command(f"inspect {name}", "inspect", path, "--json")
        world.command(f"inspect {name} as text", "inspect", path)
        world.command(f"verify {name}", "verify", path, "--json", "--base", artifacts.base)
    world.command("inspect a plan", "inspect", "--plan", artifacts.base, "--json")
    world.command("verify another base", "verify", artifacts.foreign, "--base", artifacts.base, "--json")
    evaluated = (*pair, "--delta", artifacts.plain, "--text", world.inputs.text)
    world.command("eval", "eval", *evaluated, "--samples", 8, "--no-progress", "--json")
    merged = world.directory / "merged"
    merging = (
        "merge", "--base", artifacts.base, "--delta", artifacts.plain, "--out", merged, "--no-progress"
    )  # fmt: skip
    world.command("merge", *merging, "--json")
    world.command("merge again", *merging, "--json")
    world.transcript.add(
        "merged files", "\n".join(f"{path.name} {path.stat().st_size}" for path in sorted(merged.iterdir()))
    )


def _of_settings(world: World) -> None:
    base, registry = world.inputs.artifacts.base, world.directory / "settings"
    serve = ("serve", "--base", base, "--registry", registry)
    world.command("print config", *serve, "--print-config", "--auth", "keys", PERAXIS_MAX_QUEUE="7")
    config = world.directory / "config.toml"
    config.write_text("max_num_seqs = 3\n[default_limits]\nmax_running = 2\n")
    world.command("print config of a file", *serve, "--print-config", "--config", config)
    config.write_text("max_num_seq = 3\n")
    world.command("misspelt setting of a file", *serve, "--config", config)
    world.command("misspelt setting of the environment", *serve, "--print-config", PERAXIS_MAX_QUEU="7")
    world.command("serve beyond this machine without keys", *serve, "--host", "0.0.0.0")
    world.command("serve no base", "serve", "--base", world.directory / "absent", "--registry", registry)
    bucket = ("serve", "--base", base, "--registry", "s3://bucket/prefix")
    world.command("serve a bucket over plain HTTP", *bucket, AWS_ENDPOINT_URL="http://127.0.0.1:9")
    world.command("serve with too few slots", *serve, "--max-gpu-deltas", 1)
    push = ("push", world.inputs.artifacts.plain, "--name", "x", "--json", "--no-progress")
    world.command("push without a server", *push, "--url", "http://127.0.0.1:9")


def _of_registry(world: World) -> None:
    registry = world.directory / "commands"
    at = ("--registry", registry)
    world.command("ls of no registry", "registry", "ls", *at, "--json")
    create = ("keys", "create", *at, "--tenant", "acme", "--role", "publish", "--expires-in", "30d", "--json")
    made = world.command("make a key", *create).document()
    world.transcript.secrets |= {made["key"]: "KEY", made["id"]: "KEY-ID"}
    # What was kept before the key was known is named alike.
    title = "make a key: peraxis"
    world.transcript.answers[title] = world.transcript.steady_text(world.transcript.answers[title])
    world.command("list keys of a directory", "keys", "list", *at, "--json")
    world.command("revoke a key of a directory", "keys", "revoke", made["id"], *at, "--json")
    world.command("revoke it again", "keys", "revoke", made["id"], *at, "--json")
    for sub in ("ls", "check", "gc"):
        world.command(f"registry {sub}, empty", "registry", sub, *at, "--json")
    world.command("rm of nothing", "registry", "rm", "nobody", *at, "--tenant", "acme", "--json")
    world.keep_files("files of a registry without variants", registry)
