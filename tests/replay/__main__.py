"""Compare the working tree with a commit: `python -m tests.replay REVISION`. Exit with 1 if an answer differs.

Both get the same models, keys, calls and commands, one after the other, each on servers of its own. Times, ids and
ports are left out. A `500 internal_error` needs a defect, so it is not asked for.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.process import free_port
from tests.replay.asking import OCTETS, Asker
from tests.replay.calls import ask_answers, ask_refusals, ask_roles
from tests.replay.commands import run_commands
from tests.replay.faults import ask_faults, ask_full_disk, ask_pages
from tests.replay.inputs import ReplayInputs, make_inputs
from tests.replay.metrics import steady_metrics
from tests.replay.publishing import ask_artifacts, ask_sources, run_remote_commands
from tests.replay.source_tree import ROOT, SourceTree
from tests.replay.transcript import Transcript, differences
from tests.replay.world import World
from tests.server.helpers.live_server import address_in


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=__doc__)
    parser.add_argument("revision", help="the commit to compare with, such as HEAD")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        before = SourceTree.of_revision(args.revision, Path(scratch) / "before")
        inputs = make_inputs(Path(scratch) / "inputs")
        transcripts = [
            record(source, inputs, Path(scratch) / "world") for source in (before, SourceTree(ROOT))
        ]
    found = list(differences(*transcripts))
    print("\n".join(found or [f"{len(transcripts[0].answers)} answers are the same"]))
    sys.exit(bool(found))


def record(source: SourceTree, inputs: ReplayInputs, directory: Path) -> Transcript:
    """Ask a source tree everything, in a directory that is made and removed."""
    directory.mkdir()
    source.check()
    secrets = {str(directory): "WORLD", str(inputs.text.parent): "INPUTS", str(source.directory): "SOURCE"}
    world = World(source, inputs, directory, Transcript(secrets))
    run_commands(world)
    _ask_with_keys(world)
    _ask_for_faults(world)
    _ask_without_keys(world)
    shutil.rmtree(directory)
    return world.transcript


def _ask_with_keys(world: World) -> None:
    registry, port = world.directory / "registry", free_port()
    keys = world.make_keys(registry, "acme", "inference", "publish", "metrics", "admin")
    others = world.make_keys(registry, "others", "publish")
    options = (
        "--auth", "keys", "--admin-port", port, "--max-gpu-deltas", 4, "--max-num-seqs", 4, "--max-upload-gb", 0.004,
        "--compat", "vllm-lora", "--lora-dir", world.inputs.sources, "--source-dir", world.inputs.sources,
    )  # fmt: skip
    with _served(world, registry, "keys", *options) as (url, _):
        public, admin = (Asker(world.transcript, each, keys) for each in (url, f"http://127.0.0.1:{port}"))
        world.transcript.add(
            "metrics of a fresh server", steady_metrics(admin.send("metrics", "GET", "/metrics").text)
        )
        artifacts = world.inputs.artifacts
        for name, path in (
            ("plain", artifacts.plain),
            ("chatty", artifacts.chatty),
            ("third", artifacts.third),
        ):
            _publish(admin, name, path)
        _publish(Asker(world.transcript, admin.url, others), "theirs", artifacts.plain)
        _publish(Asker(world.transcript, admin.url, others), "shared", artifacts.chatty, "public")
        _publish(admin, "shared", artifacts.third)
        ask_answers(world, public)
        world.transcript.add(
            "metrics after answers", steady_metrics(admin.send("metrics", "GET", "/metrics").text)
        )
        ask_roles(world, public, admin)
        ask_refusals(world, public, admin)
        ask_artifacts(world, admin)
        run_remote_commands(world, admin)
        world.command("doctor", "doctor", "--url", admin.url, "--json", PERAXIS_API_KEY=keys["admin"])
        world.transcript.add(
            "metrics at the end", steady_metrics(admin.send("metrics", "GET", "/metrics").text)
        )
        ask_sources(world, admin)
    world.keep_files("files of the registry", registry)
    at = ("--registry", registry, "--json")
    for title, command in (
        ("ls", ("registry", "ls")),
        ("check", ("registry", "check")),
        ("rm", ("registry", "rm", "third", "--tenant", "acme")),
        ("rm again", ("registry", "rm", "third", "--tenant", "acme")),
        ("what gc would do", ("registry", "gc", "--dry-run")),
        ("gc", ("registry", "gc")),
        ("keys", ("keys", "list")),
    ):
        world.command(f"registry, {title}", *command, *at)
    world.keep_files("files of the registry after gc", registry)


def _ask_for_faults(world: World) -> None:
    registry = world.directory / "faults"
    keys = world.make_keys(registry, "acme", "inference", "publish", "admin")
    limited = world.make_keys(registry, "limited", "inference", "publish")
    options = (
        "--auth", "keys", "--max-gpu-deltas", 2, "--max-num-seqs", 1, "--max-queue", 1, "--load-timeout", 1,
        "--shutdown-timeout", 5,
    )  # fmt: skip
    with _served(world, registry, "faults", *options) as (url, process):
        asker = Asker(world.transcript, url, {**keys, "limited": limited["inference"]})
        asker.send("admin", "PUT", "/tenants/limited", json={"requests_per_minute": 1})
        for name in ("plain", "chatty", "third"):
            _publish(asker, name, getattr(world.inputs.artifacts, name))
        _publish(Asker(world.transcript, url, limited), "plain", world.inputs.artifacts.plain)
        ask_faults(world, process, asker, registry)


def _ask_without_keys(world: World) -> None:
    registry = world.directory / "pages"
    with _served(world, registry, "pages", "--allowed-host", "peraxis.example") as (url, _):
        ask_pages(Asker(world.transcript, url, {}))
    disk = world.directory / "disk"
    disk.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk))
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        return
    try:
        with _served(world, disk / "registry", "disk") as (url, _):
            content = world.inputs.artifacts.plain.read_bytes()
            ask_full_disk(Asker(world.transcript, url, {}), content[:9] + bytes(3 << 20))
    finally:
        subprocess.run(("umount", str(disk)), check=True)


@contextmanager
def _served(
    world: World, registry: Path, name: str, *options: object
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve the base; yield the URL and the process, and keep what the server prints before it is ready."""
    log = world.directory / f"{name}.log"
    usual = (
        "--base", world.inputs.artifacts.base, "--registry", registry, "--port", 0, "--dtype", "float32",
        "--kv-cache-gb", 0.05,
    )  # fmt: skip
    with world.source.serving(log, *usual, *options) as (process, lines):
        world.transcript.add(f"{name}: printed at the start", "".join(lines))
        yield address_in(lines[-1]), process


def _publish(asker: Asker, name: str, artifact: Path, visibility: str = "private") -> None:
    path = f"/variants?name={name}&visibility={visibility}"
    reply = asker.send("publish", "POST", path, OCTETS, content=artifact.read_bytes())
    if reply.status_code != 201:
        raise RuntimeError(reply.text)


if __name__ == "__main__":
    main()
