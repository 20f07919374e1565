"""Publishing good and bad files, from bodies and files, and every command that talks to a server."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from typing import Any

from tests.replay.asking import OCTETS, Asker
from tests.replay.world import World


def ask_artifacts(world: World, admin: Asker) -> None:
    """Publish good and bad files in every way, change versions, and download."""
    artifacts = world.inputs.artifacts
    plain = artifacts.plain.read_bytes()

    def publish(title: str, content: bytes, query: str, **headers: str) -> Any:
        return admin.ask(
            title, "publish", "POST", f"/variants?{query}", {**OCTETS, **headers}, content=content
        )

    digest = b64encode(hashlib.sha256(plain).digest()).decode()
    publish("same bytes", plain, "name=plain")
    publish("second version, inactive", artifacts.third.read_bytes(), "name=plain&activate=false")
    publish("with its digest", plain, "name=digest", **{"Content-Digest": f"sha-256=:{digest}:"})
    publish(
        "with another digest",
        artifacts.third.read_bytes(),
        "name=digest",
        **{"Content-Digest": f"sha-256=:{digest}:"},
    )
    publish("broken", world.inputs.broken.read_bytes(), "name=broken")
    publish("no artifact", b"hello, this is no artifact", "name=broken")
    publish("cut", plain[:-100], "name=broken")
    publish("another base", artifacts.foreign.read_bytes(), "name=foreign")
    publish("fits no slot", artifacts.oversized.read_bytes(), "name=oversized")
    publish("too large to upload", plain[:9] + bytes(5 << 20), "name=large")
    publish("wrong name", plain, "name=..")
    publish("reserved name", plain, "name=base")
    publish("no name", plain, "nonsense=1")
    admin.ask(
        "as a form",
        "publish",
        "POST",
        "/variants?name=form",
        files={"file": ("x", artifacts.third.read_bytes())},
    )
    admin.ask(
        "as text", "publish", "POST", "/variants?name=text", {"Content-Type": "text/plain"}, content=plain
    )
    patches = [
        ("promote", {"active": 2}),
        ("promote again", {"active": 2}),
        ("promote nothing", {"active": 9}),
        ("wrong change", {"actve": 1}),
        ("go back", {"active": 1}),
        ("share", {"visibility": "public"}),
        ("unshare", {"visibility": "private"}),
    ]
    for title, body in patches:
        admin.ask(title, "publish", "PATCH", "/variants/plain", json=body)
    admin.ask("take a public name", "publish", "PATCH", "/variants/shared", json={"visibility": "public"})
    for part in ("bytes=0-9", "bytes=-5", "bytes=5-6,8-9", "bytes=99999999-", "nonsense"):
        admin.ask(f"range {part}", "publish", "GET", "/variants/plain/artifact", {"Range": part})
    admin.ask("version of it", "publish", "GET", "/variants/plain/artifact?version=2")
    admin.ask("delete the active version", "publish", "DELETE", "/variants/plain?version=1")
    admin.ask("delete a version", "publish", "DELETE", "/variants/plain?version=2")
    admin.ask("delete it again", "publish", "DELETE", "/variants/plain?version=2")
    admin.ask("for another tenant", "admin", "GET", "/variants?tenant=others")
    admin.ask("for another tenant without the role", "publish", "GET", "/variants?tenant=others")


def ask_sources(world: World, admin: Asker) -> None:
    """Publish from files, and ask for one of a hub."""
    sources = {
        name: str(world.inputs.sources / name)
        for name in ("third.safetensors", "foreign.safetensors", "absent")
    }
    sources |= {"file outside": str(world.inputs.artifacts.plain), "hub": "hf://nobody/nothing@main"}
    for title, source in sources.items():
        admin.ask(f"source: {title}", "publish", "POST", "/variants?name=sourced", json={"source": source})


def run_remote_commands(world: World, admin: Asker) -> None:
    """Run every command that talks to a server, as a document and as text."""
    plain = world.inputs.artifacts.plain
    commands: list[tuple[object, ...]] = [
        ("push", plain, "--name", "pushed", "--no-progress"),
        ("push", plain, "--name", "pushed", "--no-progress", "--visibility", "public"),
        ("push", world.inputs.broken, "--name", "pushed", "--no-progress"),
        ("push", world.inputs.artifacts.third, "--name", "pushed", "--no-progress", "--no-activate"),
        ("ls",), ("show", "pushed"), ("show", "nobody"), ("promote", "pushed", 2), ("rollback", "pushed"),
        ("unshare", "pushed"), ("share", "pushed"), ("load", "pushed"), ("pin", "pushed@2"), ("ps",),
        ("unpin", "pushed@2"), ("unload", "pushed@2"), ("rm", "pushed@2", "--yes"), ("rm", "pushed", "--yes"),
        ("rm", "pushed", "--yes"), ("keys", "list"), ("keys", "revoke", "nothing"), ("tenants", "list"),
        ("tenants", "set", "others", "--max-running", 7), ("tenants", "show", "others"),
        ("chat", "chatty", "--once", "hello", "--max-tokens", 3, "--temperature", 0),
        ("chat", "--compare", "chatty", "plain", "--once", "hello", "--max-tokens", 3, "--temperature", 0),
    ]  # fmt: skip
    server = {"PERAXIS_URL": admin.url, "PERAXIS_API_KEY": admin.keys["admin"]}
    for number, command in enumerate(commands):
        form = ("--json",) if number % 2 == 0 or command[0] in {"push", "rm"} else ()
        world.command(f"command {number} {' '.join(map(str, command))}", *command, *form, **server)
    world.command("ls without a key", "ls", "--json", PERAXIS_URL=admin.url)
    world.command("ls with a wrong key", "ls", PERAXIS_URL=admin.url, PERAXIS_API_KEY="px_wrong")
